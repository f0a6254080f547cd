"""Exchanges as rows: every field has its column, and unknown values are null."""

import pyarrow as pa

from kproxy.tables.columns import ExchangeColumns
from kproxy.tables.schema import EXCHANGES
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import ANSWERED, FULL, NONE, OPAQUE, REQUEST_NOT_SEEN, Exchange
from kproxy.wire.interest import ApiPlan

INFO = ConnectionInfo("east", "live:main", "10.0.0.1", 40000, "10.0.0.2", 9092, 3, 1_700_000_000_000_000_000)
PRODUCE = ApiPlan(0, 9, "Produce", True)
UNSEEN = ApiPlan(NONE, NONE, "unknown", False)


def full():
    exchange = Exchange(PRODUCE, -5, 7, 2, 1000, 1_700_000_000_123_456_789)
    exchange.client_id = "me"
    exchange.request_end = exchange.request_start + 10
    exchange.response_start = exchange.request_start + 110
    exchange.response_end = exchange.request_start + 130
    exchange.response_bytes = 60
    exchange.queue_ns, exchange.muted_ns = 0, 30
    exchange.throttle_ms = 0
    exchange.error_code = 6
    exchange.errors = (6, 6)
    exchange.acks = -1
    exchange.max_wait_ms = None
    exchange.transactional_id = "tx"
    exchange.outcome = ANSWERED
    exchange.decoded = FULL
    return exchange


def test_a_row_has_the_values_of_its_exchange():
    columns = ExchangeColumns()
    columns.append(INFO, full(), 4)
    batch = columns.batch()
    assert batch.schema.equals(EXCHANGES.schema)
    (row,) = batch.to_pylist()
    assert row.pop("time").timestamp() == 1_700_000_000.123456
    start = 1_700_000_000_123_456_789
    assert row == {
        "source": "live:main",
        "cluster": "east",
        "connection": INFO.id,
        "number": 7,
        "request_start_ns": start,
        "request_end_ns": start + 10,
        "response_start_ns": start + 110,
        "response_end_ns": start + 130,
        "latency_ns": 100,
        "queue_ns": 0,
        "muted_ns": 30,
        "replica_id": None,
        "total_ns": 130,
        "client_address": "10.0.0.1",
        "client_port": 40000,
        "broker_address": "10.0.0.2",
        "broker_port": 9092,
        "broker_id": 3,
        "api_key": 0,
        "api": "Produce",
        "api_version": 9,
        "correlation_id": -5,
        "client_id": "me",
        "request_bytes": 1000,
        "response_bytes": 60,
        "outcome": "answered",
        "error_code": 6,
        "error": "NOT_LEADER_OR_FOLLOWER",
        "errors": 2,
        "throttle_ms": 0,
        "in_flight": 2,
        "acks": -1,
        "max_wait_ms": None,
        "topics": None,
        "partitions": None,
        "records": None,
        "group_id": None,
        "transactional_id": "tx",
        "decoded": "full",
        "retransmissions": 4,
        "sending_ns": 0,
        "broker_ns": 80,
        "receiving_ns": 20,
        "loss_ns": 0,
        "closed_window_ns": 0,
    }


def test_unknown_values_are_null_and_never_minus_one():
    columns = ExchangeColumns()
    columns.append(INFO, Exchange(PRODUCE, 1, 0, 0, 100, 5_000))
    answer = Exchange(UNSEEN, 9, NONE, 0, NONE, NONE)
    answer.response_start, answer.response_end, answer.response_bytes = 7_000, 8_000, 30
    answer.outcome, answer.decoded = REQUEST_NOT_SEEN, OPAQUE
    columns.append(INFO, answer)
    unanswered, unasked = columns.batch().to_pylist()
    nulls = {name for name, value in unanswered.items() if value is None}
    assert nulls >= {"request_end_ns", "response_start_ns", "latency_ns", "total_ns", "queue_ns", "response_bytes"}
    assert nulls >= {"muted_ns", "throttle_ms", "error_code", "error", "acks", "client_id", "retransmissions"}
    assert unasked["time"].microsecond == 7
    assert [unasked[name] for name in ("number", "api_key", "api_version", "request_bytes", "api")] == [None] * 4 + [
        "unknown"
    ]


def test_a_batch_forgets_its_rows_and_batches_share_nothing():
    columns = ExchangeColumns()
    assert columns.batch().num_rows == 0
    for turn in range(3):
        for number in range(100):
            exchange = full()
            exchange.client_id = f"client-{turn}-{number}"
            columns.append(INFO, exchange)
        assert columns.rows == 100
        batch = columns.batch()
        assert batch.column("client_id").to_pylist() == [f"client-{turn}-{number}" for number in range(100)]
        assert columns.rows == 0


def test_unknown_codes_and_names_have_names():
    columns = ExchangeColumns()
    exchange = full()
    exchange.error_code = 999
    columns.append(INFO, exchange)
    assert columns.batch().column("error").to_pylist() == ["unknown_999"]
    assert EXCHANGES.schema.field("time").type == pa.timestamp("us", tz="UTC")
