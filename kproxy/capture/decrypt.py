"""Decrypts the TLS connections of a capture with tshark.

Duty: run tshark once over the capture, with a key log or the secrets in a pcapng file, and pass the decrypted bytes to
their flows, in order. kproxy itself has no cipher. A connection without keys stays encrypted, and is counted as such.

Memory: one line of tshark's output, which is a TLS record or the decrypted bytes of one packet; tshark is another
process. Refuses to know the meaning of the decrypted bytes.
"""

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from kproxy.capture.connections.flow import Flow
from kproxy.capture.connections.flows import Flows
from kproxy.capture.formats.storage import LOCAL, STDIN, Storage
from kproxy.errors import CaptureError

_FIELDS = ("frame.time_epoch", "ip.src", "ipv6.src", "tcp.srcport", "ip.dst", "ipv6.dst", "tcp.dstport", "data.data")


def decrypt(flows: Flows, paths: Sequence[str | Path], key_log: str | Path | None, storage: Storage = LOCAL) -> None:
    """Decrypt the encrypted flows and end them all. tshark reads a local copy of a capture in a remote storage."""
    encrypted = flows.encrypted
    by_ends: dict[tuple[str, int, str, int], list[tuple[Flow, int]]] = defaultdict(list)
    for flow in encrypted:
        one, other = flow.ends
        by_ends[*one, *other].append((flow, 0))
        by_ends[*other, *one].append((flow, 1))
    if by_ends:
        ports = {flow.info.broker_port for flow in encrypted if flow.info is not None}
        with storage.here([str(path) for path in paths]) as copies:
            for time_ns, ends, data in _plain(copies, key_log, sorted(ports)):
                for flow, side in by_ends.get(ends, ()):
                    if flow.first_ns <= time_ns <= flow.last_ns:
                        flows.reopen(flow).receive(side, memoryview(data), time_ns)
                        break
    flows.end_encrypted()


def _plain(
    paths: Sequence[str | Path], key_log: str | Path | None, ports: list[int]
) -> Iterator[tuple[int, tuple[str, int, str, int], bytes]]:
    """(time, the sender's address and port and the receiver's, decrypted bytes) in the order of the capture."""
    name = str(paths[0])
    if STDIN in map(str, paths):
        raise CaptureError(name, "TLS can be decrypted in files only: save standard input to one first")
    command = [_tool("tshark", name), "-n", "-o", "tcp.reassemble_out_of_order:TRUE", "-Y", "tls && data.data"]
    if key_log is not None:
        command += ["-o", f"tls.keylog_file:{Path(key_log).absolute()}"]
    for port in ports:
        command += ["-d", f"tls.port=={port},data"]  # tshark's own Kafka dissector has no part in this
    command += ["-T", "fields", "-E", "separator=/t", "-E", "occurrence=a", "-E", "aggregator=,"]
    for field in _FIELDS:
        command += ["-e", field]
    merge = None
    if len(paths) > 1:
        merge = subprocess.Popen(
            [_tool("mergecap", name), "-a", "-w", "-", *map(str, paths)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    with TemporaryFile() as errors:
        source = ["-r", "-"] if merge else ["-r", name]
        process = subprocess.Popen(
            [*command, *source],
            stdin=merge.stdout if merge else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = _line(line)
                if found is not None:
                    yield found
            status = process.wait()
        finally:
            for running in (process, merge):
                if running is not None:
                    running.kill()
                    running.wait()
        if status not in (0, 2):  # 2: the capture ends inside a record, which kproxy reports too
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip().splitlines()
            raise CaptureError(name, f"tshark could not decrypt it: {text[-1] if text else f'status {status}'}")


def _line(line: bytes) -> tuple[int, tuple[str, int, str, int], bytes] | None:
    fields = line.rstrip(b"\r\n").decode("ascii", "replace").split("\t")
    if len(fields) != len(_FIELDS):
        return None
    seconds, _, fraction = fields[0].partition(".")
    # if headers are nested, the innermost belongs to the connection
    source, source_port, target, target_port = (
        text.rsplit(",", 1)[-1] for text in (fields[1] or fields[2], fields[3], fields[4] or fields[5], fields[6])
    )
    try:
        time_ns = int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9])
        data = bytes.fromhex(fields[7].replace(",", "").replace(":", ""))
        return time_ns, (source, int(source_port), target, int(target_port)), data
    except ValueError:
        return None


def _tool(name: str, capture: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise CaptureError(
            capture,
            f"decrypting TLS takes {name}, which is not installed: install Wireshark's tshark (apt install tshark)",
        )
    return path
