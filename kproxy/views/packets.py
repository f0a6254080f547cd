"""Output of the packets of one exchange, and of the parts of its time."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kproxy.convert.packets import Packet
from kproxy.views import units
from kproxy.views.terminal import printable
from kproxy.wire.events import CLIENT

SHOWN = 40  # packets
_PARTS = {
    "sending_ns": "sent, from its first byte to its last",
    "queue_ns": "behind earlier requests",
    "throttle_ns": "throttled",
    "network_ns": "on the network: lost segments, or a closed window",
    "round_trip_ns": "one round trip",
    "long_poll_ns": "expected wait (long poll)",
    "broker_ns": "in the broker",
    "receiving_ns": "sent back, from the answer's first byte to its last",
    "delivery_ns": "sent again, until the client acknowledged all of the answer",
    "unanswered_ns": "without an answer",
}


def parts(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each part of an exchange's total time, with its share, from a row of `slow`."""
    total = max(row["total_ns"], 1)
    for name, words in _PARTS.items():
        if row[name]:
            yield f"{units.duration(row[name]):>9} {row[name] / total:>6.1%}  {words}"


def lines(packets: Sequence[Packet], shown: int = SHOWN) -> Iterator[str]:
    """Yield a line for each packet; of more than `shown` packets only the first and the last ones."""
    if not packets:
        yield "none that the capture holds"
        return
    several = len({packet.path for packet in packets}) > 1
    cut = len(packets) - shown
    width = max(len(f"{packet.number:,}") for packet in packets)
    for place, packet in enumerate(packets):
        if cut > 0 and shown // 2 <= place < len(packets) - shown // 2:
            if place == shown // 2:
                yield f"... {len(packets) - shown // 2 * 2:,} more ..."
            continue
        way = "client -> broker" if packet.side == CLIENT else "client <- broker"
        remarks = [packet.carries] if packet.carries else []
        if packet.is_repeated:
            remarks.append("captured twice" if packet.is_copy else "sent again")
        name = f"  {printable(Path(packet.path).name)}" if several else ""
        line = (
            f"{packet.number:>{width},}  {units.time(packet.time_ns, decimals=6)[11:]}  "
            f"+{units.duration(packet.time_ns - packets[0].time_ns):<8} {way} "
            f"{units.size(packet.payload_bytes):>8}  {packet.flags:<7} {', '.join(remarks)}{name}"
        )
        yield line.rstrip()
