"""Wireshark's dissection of packets of a capture, through pyshark and tshark.

Duty: returns the text of the dissection of some packets, for TCP and the layers above. tshark reads the whole file, so
that frames that began in earlier packets are reassembled. Needs the extra `wireshark` and tshark.

Bounds: MOST packets of a file.
"""

import asyncio
import re
import shutil
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from kproxy.errors import CaptureError, KproxyError

MOST = 50
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def dissections(
    path: Path, numbers: Sequence[int], port: int, key_log: Path | str | None = None
) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of these packets of a file, the first MOST of them. port: the broker's.

    Raises ModuleNotFoundError without pyshark, KproxyError without tshark, CaptureError if tshark cannot read the file.
    """
    import pyshark
    from pyshark.capture.capture import TSharkCrashException

    if shutil.which("tshark") is None:
        raise KproxyError("--wireshark takes tshark, which is not installed: install it (apt install tshark)")
    chosen = sorted(set(numbers))[:MOST]
    if not chosen:
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # pyshark uses it, and it handles the exit of tshark
    packets = pyshark.FileCapture(
        str(path),
        display_filter=f"frame.number in {{{', '.join(map(str, chosen))}}}",
        decode_as={f"tcp.port=={port}": "kafka" if key_log is None else "tls"},
        override_prefs={} if key_log is None else {"tls.keylog_file": str(key_log)},
        keep_packets=False,
    )
    try:
        for packet in packets:
            text = StringIO()
            layers = [layer.layer_name for layer in packet.layers]
            for layer in packet.layers[layers.index("tcp") if "tcp" in layers else 0 :]:
                layer.pretty_print(text)
            yield int(packet.number), _COLOUR.sub("", text.getvalue()).replace("\t", "  ").replace("\n:", "\n")
    except TSharkCrashException as fault:
        raise CaptureError(str(path), f"tshark failed: {str(fault).strip().splitlines()[-1]}") from fault
    finally:
        packets.close()
        asyncio.set_event_loop(None)
        loop.close()
