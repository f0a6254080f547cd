"""The exchanges of a capture of changing groups, and the brokers' own logs of the same time."""

import gzip
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kproxy.insight.decoded import DecodedExchange
from kproxy.protocol import codec
from kproxy.protocol.apis import PRODUCE
from tests.streams import frames, streams

DATA = Path(__file__).parent.parent / "data" / "groups"
CAPTURE = DATA / "k41_groups_a.pcap.zst"


def decoded_exchanges(path: Path, ports: Iterable[int], wanted: Iterable[int]) -> list[DecodedExchange]:
    """The exchanges of the wanted APIs in the order of their responses; unanswered ones come last."""
    ports, wanted = set(ports), set(wanted)
    found, unanswered = [], []
    for connection, stream in enumerate(streams(path, ports.__contains__)):
        pending: list[tuple[int, int, bytes, int]] = []
        for side, frame, now_ns in frames(stream):
            if side == 0:
                key, version = (int.from_bytes(frame[at : at + 2], "big") for at in (0, 2))
                if key != PRODUCE or codec.decode_request(frame)[1]["acks"]:
                    pending.append((key, version, frame, now_ns))
                continue
            key, version, asked, asked_ns = pending.pop(0)
            if key in wanted:
                found.append(_decoded(key, version, asked, frame, asked_ns, now_ns, connection))
        unanswered += [_decoded(*rest[:3], None, rest[3], 0, connection) for rest in pending if rest[0] in wanted]
    return sorted(found, key=lambda each: each.response_start) + unanswered


def _decoded(key, version, asked, answer, asked_ns, answered_ns, connection) -> DecodedExchange:  # type: ignore[no-untyped-def]
    header, request = codec.decode_request(asked)
    response = None if answer is None else codec.decode_response(answer, key, version)[1]
    client_id = header.get("clientId")
    return DecodedExchange(
        key, version, request, response, asked_ns, answered_ns, client_id=client_id, connection=connection
    )


class Logged(NamedTuple):
    """A generation as the group coordinator logged it; times in seconds."""

    prepared: float
    reason: str
    stabilised: float
    members: int
    assigned: float
    leader: str


_LINE = re.compile(r"b\d (\S+ \S+) \w+ .*?(Preparing to rebalance|Stabilized|Assignment received).*")
_PREPARED = re.compile(r"group (\S+) in state \w+ with old generation (\d+) \(reason: (.*)\)\.")
_STABILISED = re.compile(r"Stabilized group (\S+) generation (\d+) with (\d+) members")
_ASSIGNED = re.compile(r"leader (\S+) for group (\S+) for generation (\d+)")


@cache
def log() -> str:
    """The brokers' log lines on groups, leaders and ISR."""
    return gzip.decompress((DATA / "k41_groups_a.brokerlog.gz").read_bytes()).decode()


def departures() -> set[str]:
    """The members that left by LeaveGroup."""
    return set(re.findall(r"Member (\S+) has left group through explicit", log()))


@cache
def generations() -> dict[tuple[str, int], Logged]:
    """Every generation that a coordinator stabilised, by group and number."""
    prepared, stabilised, assigned = {}, {}, {}
    for line in _LINE.finditer(log()):
        at = datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp()
        if found := _PREPARED.search(line[0]):
            prepared[found[1], int(found[2]) + 1] = at, found[3]
        elif found := _STABILISED.search(line[0]):
            stabilised[found[1], int(found[2])] = at, int(found[3])
        elif found := _ASSIGNED.search(line[0]):
            assigned[found[2], int(found[3])] = at, found[1]
    return {key: Logged(*prepared[key], *stabilised[key], *assigned[key]) for key in stabilised}
