"""The chain of a connection's filters, as a session sees it."""

from typing import Any

import pytest

from kproxy.errors import Malformed
from kproxy.protocol import codec
from kproxy.protocol.apis import HEARTBEAT, METADATA
from kproxy.proxy.filters.chain import Chain, Filter
from kproxy.wire.decisions.authorizer import HOLD, MAX_HELD_REQUEST, Answer, Close, Decision, Later, Replace, answered
from kproxy.wire.events import ANSWERED, ANSWERED_BY_PROXY, BROKER, CLIENT, Event, Exchange
from kproxy.wire.interest import HeldBudget, Interest
from tests.wire.playbook import Dialogue, request, response

BODY = {"groupId": "g", "memberId": "m", "generationId": 1}
ASKED, HEARD = request(HEARTBEAT, 4, 7, BODY, "c"), response(HEARTBEAT, 4, 7, {})
REBALANCE = {"errorCode": 27}
OF_BROKER = {"clusterId": "of the broker", "brokers": [{"nodeId": 1, "host": "b", "port": 9092}]}


class Noting(Filter):
    """Holds every request, logs each call, and returns the decisions that the test chose."""

    def __init__(self, name: str, log: list[str], decision: Decision | Later = None) -> None:
        self.name, self.log, self.decision = name, log, decision

    def at_header(self, exchange: Exchange) -> Any:
        self.log.append(f"{self.name} header")
        return HOLD

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        self.log.append(f"{self.name} request")
        return self.decision

    def too_large(self, exchange: Exchange) -> None:
        self.log.append(f"{self.name} too large")


class Unconcerned(Noting):
    """Leaves requests to others at their header."""

    def at_header(self, exchange: Exchange) -> Any:
        self.log.append(f"{self.name} header")
        return None


class Answering(Filter):
    def __init__(self, name: str, log: list[str], client_id: str = "") -> None:
        self.name, self.log, self.client_id = name, log, client_id

    def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
        body = codec.decode_response(bytes(frame[4:]), METADATA, 12)[1]
        self.log.append(f"{self.name} answer {body['clusterId']}")
        return response(METADATA, 12, 7, {**body, "clusterId": self.client_id}) if self.client_id else None

    def events(self, events: list[Event]) -> None:
        self.log.extend(f"{self.name} {event.outcome}" for event in events if isinstance(event, Exchange))


def played(*filters: Filter, held_bytes: int = 1 << 20) -> Dialogue:
    chain = Chain(filters)
    return Dialogue(
        Interest(authorizes=lambda key, version: True, rewrite=True, held=HeldBudget(held_bytes)),
        authorizer=chain.authorizer,
        transform=chain.transform,
    )


def in_slices(decision: Decision) -> Later:
    def begin(frame: memoryview) -> codec.Slices[Decision]:
        yield
        return decision

    return Later(begin)


def answer() -> Answer:
    exchange = Exchange(Interest().plan(HEARTBEAT << 16 | 4), 7, 0, 0, 0, 0)
    return answered(exchange, REBALANCE)


@pytest.mark.parametrize("slices", [False, True])
def test_the_first_filter_that_decides_a_request_decides_it(slices: bool) -> None:
    log: list[str] = []
    decision = in_slices(answer()) if slices else answer()
    talk = played(Noting("a", log), Noting("b", log, decision), Noting("c", log))
    talk.client(ASKED, [20])
    assert log == ["a header", "a request", "b request"]
    assert talk.sent == {CLIENT: answer().frame, BROKER: b""}
    assert [event.outcome for event in talk.exchanges] == [ANSWERED_BY_PROXY]


def test_an_undecided_request_is_forwarded_and_a_filter_that_works_in_slices_does_not_hide_it_from_the_next() -> None:
    log: list[str] = []
    talk = played(Noting("a", log, in_slices(None)), Noting("b", log, in_slices(None)), Noting("c", log))
    talk.client(ASKED, [20])
    talk.broker(HEARD)
    assert log == ["a header", "a request", "b request", "c request"]
    assert talk.sent == {CLIENT: HEARD, BROKER: ASKED}
    assert [event.outcome for event in talk.exchanges] == [ANSWERED]


def test_a_later_filter_replaces_what_an_earlier_one_decided_in_slices_to_let_pass() -> None:
    log: list[str] = []
    other = request(HEARTBEAT, 4, 7, {**BODY, "groupId": "h"}, "c")
    talk = played(Noting("a", log, in_slices(None)), Noting("b", log, in_slices(Replace(other))))
    talk.client(ASKED, [20])
    assert talk.sent[BROKER] == other


def test_the_filter_that_holds_a_request_learns_that_it_is_too_large() -> None:
    log: list[str] = []
    talk = played(Unconcerned("a", log), Noting("b", log), Noting("c", log))
    talk.client((MAX_HELD_REQUEST + 1).to_bytes(4) + ASKED[4:])
    assert log == ["a header", "b header", "b too large"]
    assert talk.faults[-1].fatal and talk.sent[BROKER] == b""


@pytest.mark.parametrize("is_last", [False, True])
def test_a_filter_that_decides_in_slices_learns_that_no_memory_is_left_for_the_request(is_last: bool) -> None:
    """Once no filter learned it, or the filter of an earlier request did: the policy's audit and counters lacked it."""
    log: list[str] = []
    others = () if is_last else (Noting("c", log),)
    talk = played(Noting("a", log), Noting("b", log, in_slices(answer())), *others, held_bytes=len(ASKED))
    talk.client(ASKED, [20])
    log.clear()
    talk.client(request(HEARTBEAT, 4, 8, {**BODY, "groupId": "another"}, "c"))
    assert log == ["a request", "b request", "b too large"]
    assert talk.faults[-1].kind == "held_too_many" and talk.faults[-1].fatal


def test_an_earlier_filter_may_close_before_a_later_one_holds() -> None:
    class Closing(Filter):
        def at_header(self, exchange: Exchange) -> Any:
            return Close("no")

        def decide(self, exchange: Exchange, frame: Any) -> Decision:
            raise AssertionError("it is closed")

    log: list[str] = []
    talk = played(Closing(), Noting("b", log))
    talk.client(ASKED, [20])
    assert log == [] and talk.faults[-1].text == "no" and talk.sent == {CLIENT: b"", BROKER: b""}


def test_answers_pass_the_filters_in_order_and_events_reach_all_filters() -> None:
    log: list[str] = []
    filters = [Answering("a", log, "first"), Answering("b", log), Answering("c", log, "second")]
    talk = played(*filters)
    talk.client(request(METADATA, 12, 7, {}, "c"))
    talk.broker(response(METADATA, 12, 7, OF_BROKER))
    assert log == ["a answer of the broker", "b answer first", "c answer first"]
    assert codec.decode_response(talk.sent[CLIENT][4:], METADATA, 12)[1]["clusterId"] == "second"
    log.clear()
    for sink in Chain(filters).sinks:
        sink(list(talk.exchanges))
    assert log == ["a answered", "b answered", "c answered"]


def test_the_client_does_not_get_an_answer_that_a_filter_refuses() -> None:
    class Refusing(Filter):
        def answer(self, exchange: Exchange, frame: memoryview) -> bytes | None:
            raise Malformed("it must not leave")

    log: list[str] = []
    talk = played(Answering("a", log, "first"), Refusing())
    talk.client(request(METADATA, 12, 7, {}, "c"))
    talk.broker(response(METADATA, 12, 7, OF_BROKER))
    assert talk.sent[CLIENT] == b"" and "it must not leave" in talk.faults[-1].text


def test_a_chain_has_only_the_hooks_that_its_filters_have() -> None:
    log: list[str] = []
    assert Chain([]).authorizer is None and Chain([]).transform is None and Chain([]).sinks == ()
    noting, answering = Noting("a", log), Answering("b", log)
    chain = Chain([noting, answering])
    assert chain.authorizer is noting and chain.transform == answering.answer
    assert Chain([answering], holds_answers=False).transform is None


def test_the_core_relays_no_connection_whose_filters_need_all_events() -> None:
    class Some(Answering):
        needs_all_events = False

    log: list[str] = []
    assert Chain([Noting("a", log), Some("b", log)]).allows_core
    assert not Chain([Some("a", log), Answering("b", log)]).allows_core


def test_the_core_may_relay_what_all_filters_let_pass() -> None:
    class Fields(Filter):
        def __init__(self, fields: frozenset[str] | None, passing: bool = True, quiet: bool = True) -> None:
            self.fields, self.passing, self.quiet = fields, passing, quiet

        def decide(self, exchange: Exchange, frame: Any) -> Decision:
            return None

        @property
        def is_quiet(self) -> bool:
            return self.quiet

        def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
            return self.fields

        def passes(self, exchange: Exchange, frame: Any) -> bool:
            return self.passing

    exchange: Any = None
    a, b = Fields(frozenset(("a",))), Fields(frozenset(("b",)), passing=False, quiet=False)
    assert Chain([a, b]).deciding_fields(exchange, b"") == {"a", "b"}
    assert Chain([a, Fields(None)]).deciding_fields(exchange, b"") is None
    assert Chain([a, a]).passes(exchange, b"") and not Chain([a, b]).passes(exchange, b"")
    assert Chain([a, a]).is_quiet and not Chain([a, b]).is_quiet
