"""The parts of the time of an exchange add up to the whole, for every exchange of real traffic, on both engines."""

import pytest

from kproxy.analysis import engine
from kproxy.analysis.duck import Tables
from kproxy.analysis.questions import timing
from kproxy.analysis.questions.parts import CAUSES
from kproxy.tables.schema import CONNECTIONS, EXCHANGES
from tests.analysis.test_jobs import MS, dicts, exchange, frame, rows
from tests.spark_session import tables

__all__ = ["frame", "tables"]

COLUMNS = ("sending_ns", "queue_ns", "muted_ns", "broker_ns", "receiving_ns", "loss_ns", "closed_window_ns")


def test_the_parts_add_up_to_the_whole_time_of_each_exchange(tables):
    """The parts in the tables, and the finer ones of `slow`."""
    with Tables(tables) as duck:
        exchanges = dicts(engine.ask({"t": duck["exchanges"]}, a="select * from t"))
        told = dicts(timing.each(duck["exchanges"], duck["connections"]))
    answered = [row for row in exchanges if row["outcome"] == "answered"]
    assert len(answered) > 2000 and any(row["muted_ns"] for row in answered)
    for row in answered:
        parts = [row[name] for name in COLUMNS]
        assert min(parts) >= 0 and sum(parts) == row["total_ns"]
    assert sum(row["cause"] != "unanswered" for row in told) == len(answered)
    for row in told:
        parts = [row[f"{cause}_ns"] for cause in CAUSES]
        assert min(parts) >= 0 and sum(parts) == row["total_ns"]


def test_a_run_of_waiting_exchanges_is_one_row_with_the_exchange_at_its_head(frame):
    def at(number, begun_ms, ended_ms, **columns):
        times = {"request_start_ns": begun_ms * MS, "response_end_ns": ended_ms * MS}
        return exchange(number, latency=ended_ms - begun_ms, **times, **columns)

    table = frame(
        EXCHANGES,
        [
            at(0, 0, 2000, acks=-1),
            *(at(n, 10 * n, 2001 + n, queue_ns=1900 * MS, in_flight=n) for n in range(1, 6)),
            at(6, 9000, 9010, throttle_ms=900),
            *(at(n, 9020, 9930 + n, muted_ns=890 * MS) for n in (7, 8)),
            at(9, 60_000, 60_300, queue_ns=250 * MS),  # much later: a second run
            at(10, 70_000, 70_000, outcome="unanswered", total_ns=None, latency_ns=None),
        ],
    )
    ends = frame(CONNECTIONS, [{"source": "a.pcap", "connection": 1, "end_ns": 75_000 * MS, "close": "reset"}])
    answer = timing.slow(table, ends)
    assert rows(answer, "number", "cause", "exchanges", "head") == [
        (10, "unanswered", 1, None),
        (0, "broker", 1, None),
        (1, "queue", 5, "Produce 0 took 2.00 s: in the broker"),
        (8, "throttle", 2, "the answer to Produce 6 announced a throttle of 900 ms"),
        (9, "queue", 1, None),
    ]
    assert rows(answer, "explanation")[0] == ("no answer: its connection ended after 5.00 s",)
    by = timing.slow(table, ends, by=["cause", "client"])
    assert rows(by, "cause", "client", "exchanges", "number") == [
        ("queue", "app", 6, 1),
        ("throttle", "app", 2, 8),
        ("broker", "app", 1, 0),
        ("unanswered", "app", 1, 10),
    ]
    with pytest.raises(ValueError, match="needs the table partitions"):
        timing.slow(table, ends, by=["topic"])


def test_a_request_that_waits_at_the_end_of_the_capture_is_slow_if_overdue(frame):
    """The capture ends with the last packet of any connection; a long poll is not overdue."""
    waits = {"outcome": "unanswered", "total_ns": None, "latency_ns": None, "request_start_ns": 0, "request_end_ns": 0}
    asked = (
        {},
        {"request_start_ns": 26_000 * MS, "request_end_ns": 26_000 * MS},
        {"api": "Fetch", "max_wait_ms": 500},
        {"api": "Fetch", "max_wait_ms": 29_000},
        {"api": "JoinGroup"},
    )
    table = frame(EXCHANGES, [exchange(n, latency=1, **waits | of) for n, of in enumerate(asked)])
    ends = [{"source": "a.pcap", "connection": n, "end_ns": 30_000 * MS * (n - 1), "close": "open"} for n in (1, 2)]
    answer = timing.slow(table, frame(CONNECTIONS, ends))
    said = "no answer within 30.0 s, when the capture ended"
    assert dict(rows(answer, "number", "explanation")) == {0: said, 2: said}


def test_lost_segments_are_the_cause_only_if_they_delayed_something(frame):
    lost = {"retransmissions": 1, "closed_window_ns": 0, "loss_ns": 300 * MS, "broker_ns": 20 * MS}
    spurious = lost | {"loss_ns": 0, "broker_ns": 320 * MS}
    reader = spurious | {"retransmissions": 0, "closed_window_ns": 300 * MS, "broker_ns": 20 * MS}
    table = frame(EXCHANGES, [exchange(n, latency=320, **of) for n, of in enumerate((lost, spurious, reader))])
    answer = timing.slow(table, frame(CONNECTIONS, [{"source": "a.pcap", "connection": 9}]), replicas=True)
    told = dict(rows(answer, "number", "explanation"))
    assert told == {
        0: "the network lost segments of it: 300 ms until they were sent again",
        1: "the broker took 320 ms; segments sent again meanwhile: 1, which delayed nothing",
        2: "its reader took nothing for 300 ms: its window was closed",
    }


def test_a_fetch_of_an_unknown_version_may_be_a_long_poll(frame):
    asked = ({"api": "Fetch"}, {"api": "Fetch", "max_wait_ms": 0}, {})
    table = frame(EXCHANGES, [exchange(n, latency=320, broker_ns=320 * MS, **of) for n, of in enumerate(asked)])
    answer = timing.slow(table, frame(CONNECTIONS, [{"source": "a.pcap", "connection": 9}]), replicas=True)
    perhaps = "320 ms of the broker, a long poll perhaps: how long this version of a request may wait cannot be read"
    took = "the broker took 320 ms"
    assert dict(rows(answer, "number", "explanation")) == {0: perhaps, 1: took, 2: took}
