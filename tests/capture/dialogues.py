"""Dialogues of mostly usual Kafka connections, as a Hypothesis strategy.

A dialogue is a list of stretches: many similar exchanges of one kind, then at most one unusual exchange. Readers by
column convert most of such a dialogue, and must continue after each unusual exchange. `Share` counts how much they
converted, so that a property can assert that the columns were used at all.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kproxy.protocol.apis import FETCH, HEARTBEAT, METADATA, OFFSET_COMMIT, PRODUCE
from kproxy.protocol.records import Record, write_batch
from kproxy.wire.events import BROKER, CLIENT
from tests.wire.playbook import request, response

HANDSHAKE = 17

Frame = tuple[int, bytes]  # side, bytes
Body = dict[str, Any]


@dataclass
class Share:
    """How many exchanges out of all were converted by column."""

    by_column: int = 0
    all: int = 0

    def add(self, by_column: int, all_: int) -> None:
        self.by_column += by_column
        self.all += all_

    def __float__(self) -> float:
        return self.by_column / max(self.all, 1)


def records(number: int, batches: int = 1) -> bytes:
    """Batches whose sizes and offsets differ from one exchange to the next."""
    return b"".join(
        write_batch(
            [
                Record(10 * number + offset, 1_700_000_000_000 + number, None, bytes(100 + number % 7))
                for offset in range(2)
            ]
        )
        for _ in range(batches)
    )


def _produced(number: int) -> Body:
    return {
        "acks": -1,
        "topicData": [
            {
                "name": name,
                "partitionData": [{"index": index, "records": records(number, 1 + index)} for index in (0, 1)],
            }
            for name in ("orders", "payments")[: 1 + number % 2]
        ],
    }


def _stored(number: int) -> Body:
    partitions = [{"index": 0, "errorCode": 0, "baseOffset": number}]
    return {
        "responses": [{"name": "orders", "partitionResponses": partitions}],
        "throttleTimeMs": (0, 0, 0, 5)[number % 4],
    }


def _fetched(number: int) -> Body:
    partitions = [{"partitionIndex": index, "highWatermark": number, "records": records(number)} for index in (0, 1)]
    return {"responses": [{"topic": "orders", "partitions": partitions}], "throttleTimeMs": (0, 700)[number % 16 == 9]}


def _committed(number: int) -> Body:
    partitions = [{"partitionIndex": index, "committedOffset": number} for index in range(number % 3)]
    return {"groupId": "g", "memberId": "m", "topics": [{"name": "orders", "partitions": partitions}]}


# (API key, version, request body, response body) of exchanges that are converted by column
USUAL: tuple[tuple[int, int, Callable[[int], Body], Callable[[int], Body]], ...] = (
    (PRODUCE, 9, _produced, _stored),
    (PRODUCE, 3, _produced, _stored),
    (FETCH, 12, lambda number: {"maxWaitMs": 500}, _fetched),
    (FETCH, 4, lambda number: {"maxWaitMs": 500}, _fetched),
    (OFFSET_COMMIT, 8, _committed, lambda number: {"topics": [], "throttleTimeMs": 0}),
    (
        HEARTBEAT,
        4,
        lambda number: {"groupId": "group", "memberId": "m"},
        lambda number: {"errorCode": 27 * (number % 9 == 4)},
    ),
)
ODDITIES = (
    "nothing",
    "another group",  # a request that begins differently from the previous ones
    "another api",
    "large answer",  # with bytes after the end of its body
    "cut records",
    "no answer expected",
    "answer to nobody",
    "noise",  # bytes of neither side's protocol
    "handshake",  # SASL tokens without a header follow
)


@dataclass(frozen=True)
class Stretch:
    kind: int  # an index into USUAL
    count: int
    depth: int  # requests in flight
    oddity: str


def stretches(most: int) -> st.SearchStrategy[list[Stretch]]:
    """Dialogues of at most `most` exchanges per stretch."""
    stretch = st.builds(
        Stretch,
        st.integers(0, len(USUAL) - 1),
        st.integers(most // 4, most),
        st.sampled_from((1, 1, 2, 5)),
        st.sampled_from((*ODDITIES[:1] * 12, *ODDITIES[1:])),
    )
    return st.lists(stretch, min_size=1, max_size=4)


def frames(dialogue: list[Stretch]) -> list[Frame]:
    """The frames of both sides, in the order in which they are sent."""
    sent: list[Frame] = []
    number = 0
    for stretch in dialogue:
        key, version, ask, answer = USUAL[stretch.kind]
        waiting: deque[bytes] = deque()
        for _ in range(stretch.count):
            sent.append((CLIENT, request(key, version, number, ask(number))))
            waiting.append(response(key, version, number, answer(number)))
            if len(waiting) >= stretch.depth:
                sent.append((BROKER, waiting.popleft()))
            number += 1
        sent += [(BROKER, frame) for frame in waiting]
        sent += _odd(stretch.oddity, number)
        number += 1
    return sent


def _odd(oddity: str, number: int) -> list[Frame]:
    heartbeat = (CLIENT, request(HEARTBEAT, 4, number, {"groupId": "group", "memberId": "m"}))
    answer = response(HEARTBEAT, 4, number)
    match oddity:
        case "another group":
            return [(CLIENT, request(HEARTBEAT, 4, number, {"groupId": "g" * 600})), (BROKER, answer)]
        case "another api":
            return [(CLIENT, request(METADATA, 9, number, {"topics": []})), (BROKER, response(METADATA, 9, number))]
        case "large answer":
            return [heartbeat, (BROKER, (len(answer) + 70_000 - 4).to_bytes(4) + answer[4:] + bytes(70_000))]
        case "cut records":
            topics = [{"topic": "t", "partitions": [{"partitionIndex": 0, "records": records(number)[:-30]}]}]
            asked = request(FETCH, 12, number, {"maxWaitMs": 500})
            return [(CLIENT, asked), (BROKER, response(FETCH, 12, number, {"responses": topics}))]
        case "no answer expected":
            return [(CLIENT, request(PRODUCE, 9, number, {"acks": 0}))]
        case "answer to nobody":
            return [(BROKER, response(HEARTBEAT, 4, -number))]
        case "noise":
            return [(number % 2, bytes(range(40)))]
        case "handshake":
            mechanisms = response(HANDSHAKE, 1, number, {"mechanisms": ["PLAIN"]})
            return [(CLIENT, request(HANDSHAKE, 1, number, {"mechanism": "PLAIN"})), (BROKER, mechanisms)]
    return []
