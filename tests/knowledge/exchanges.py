"""The exchanges of a run's capture, in the order in which insight wants them."""

from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from kproxy.insight.decoded import DecodedExchange, decode_exchange
from kproxy.insight.knowledge import APIS, Knowledge
from kproxy.insight.rows import Row
from kproxy.protocol import codec
from kproxy.protocol.apis import PRODUCE
from tests.knowledge.truth import Run
from tests.streams import frames, streams


@cache
def exchanges(folder: Path, apis: Collection[int] = APIS) -> list[DecodedExchange]:
    """Those of some APIs, in the order of their answers; those without one when their connection ended."""
    run = Run(folder)
    found: list[tuple[int, DecodedExchange]] = []
    for connection, stream in enumerate(streams(run.capture, run.ports.__contains__)):
        pending: list[tuple[int, int, int, bytes, int]] = []
        last = 0
        for number, (side, frame, now_ns) in enumerate(frames(stream)):
            last = now_ns
            if side == 0:
                key, version = (int.from_bytes(frame[at : at + 2], "big") for at in (0, 2))
                if key != PRODUCE or codec.decode_request(frame)[1]["acks"]:
                    pending.append((number, key, version, frame, now_ns))
                continue
            number, key, version, asked, asked_ns = pending.pop(0)
            if key in apis:
                decoded = _decoded(run, stream.port, connection, number, key, version, asked, frame, asked_ns, now_ns)
                found += [(now_ns, each) for each in decoded]
        for number, key, version, asked, asked_ns in pending:
            if key in apis:
                decoded = _decoded(run, stream.port, connection, number, key, version, asked, None, asked_ns, 0)
                found += [(last, each) for each in decoded]
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _decoded(
    run: Run,
    port: int,
    connection: int,
    number: int,
    key: int,
    version: int,
    asked: bytes,
    answer: bytes | None,
    asked_ns: int,
    answered_ns: int,
) -> Iterator[DecodedExchange]:
    size = b"\0\0\0\0"
    header, _ = codec.decode_request(asked)
    exchange = decode_exchange(
        key,
        version,
        size + asked,
        None if answer is None else size + answer,
        asked_ns,
        answered_ns,
        client_id=header.get("clientId"),
        broker_id=run.ports[port],
        connection=connection,
        number=number,
    )
    assert exchange is not None, (key, version)
    yield exchange


class Told:
    """What insight makes of a run: all rows, and at chosen moments what it knows."""

    def __init__(self, run: Run) -> None:
        self.knowledge = Knowledge("default")
        self.rows: list[Row] = []
        self._left = list(reversed(exchanges(run.folder)))

    def until(self, time_ns: int) -> Knowledge:
        """What is known when everything up to a time has been fed."""
        while self._left and max(self._left[-1].response_start, self._left[-1].request_end) <= time_ns:
            self.rows += self.knowledge.feed(self._left.pop())
        return self.knowledge

    def finish(self) -> list[Row]:
        while self._left:
            self.rows += self.knowledge.feed(self._left.pop())
        self.rows += self.knowledge.finish()
        return self.rows
