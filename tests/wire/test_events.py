"""The initial values of an event."""

from kproxy.protocol.apis import METADATA
from kproxy.wire.events import Exchange
from kproxy.wire.interest import Interest

FIRST = ("plan", "correlation_id", "number", "in_flight", "request_bytes", "request_start")
NO_NUMBER = (
    *("request_end", "response_bytes", "response_start", "response_end", "queue_ns", "muted_ns", "throttle_ms"),
)
NOTHING = (
    *("client_id", "error_code", "acks", "max_wait_ms", "group_id", "transactional_id"),
    *("request_body", "response_body"),
)


def test_a_new_exchange_is_unanswered_and_has_no_results() -> None:
    plan = Interest().plan(METADATA << 16 | 9)
    exchange = Exchange(plan, 7, 1, 2, 30, 5)
    assert {name: getattr(exchange, name) for name in Exchange.__slots__ if hasattr(exchange, name)} == {
        **dict(zip(FIRST, (plan, 7, 1, 2, 30, 5), strict=True)),
        **dict.fromkeys(NO_NUMBER, -1),
        **dict.fromkeys(NOTHING),
        "errors": (),
        "outcome": "unanswered",
        "decoded": "header",
    }
    assert exchange.api_version == 9
