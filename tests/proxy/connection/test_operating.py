"""The operator's view of connections and commands on them, on a worker with relays of three clusters."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kproxy.proxy.connection import operating
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE

NOW_NS = 9 * 10**9


class Relay:
    """The part of a relay that an operator reaches."""

    def __init__(self, number, cluster, pending=(), **values):
        self.number, self.pending_requests, self.closed = number, len(pending), False
        self.info = ConnectionInfo(cluster, "live:main", "10.0.0.1", 40000, "10.0.0.2", 9092, 3, 4 * 10**9)
        self.session = SimpleNamespace(pending=list(pending))
        self.listener, self.principal, self.tls_version = "main", "User:alice", None
        self.software, self.client_id = None, "shop"
        self._counting = SimpleNamespace(errors=2)
        self.done = []
        for name, value in values.items():
            setattr(self, name, value)

    def counts(self):
        return SimpleNamespace(client_id=self.client_id, received_bytes=[11, 22], requests=7)

    def close(self, cause):
        self.done.append(("close", cause))

    def finish(self, cause):
        self.done.append(("finish", cause))


def worker(*relays):
    return SimpleNamespace(relays={relay.number: relay for relay in relays}, now_ns=lambda: NOW_NS, flight=None)


def pending(number, start=NOW_NS - 1_500_000_000, end=5, begun=NONE, client_id="own"):
    plan = SimpleNamespace(api="Fetch", api_version=12)
    return SimpleNamespace(
        number=number,
        plan=plan,
        correlation_id=number + 100,
        client_id=client_id,
        request_bytes=64,
        request_start=start,
        request_end=end,
        response_start=begun,
    )


def test_a_row_has_the_names_of_its_connection_truncated():
    row = operating.connection_row(Relay(5, "east", [pending(1)], client_id="c" * 257, software=("a" * 255, "1")))
    assert row == {
        "number": 5,
        "cluster": "east",
        "listener": "main",
        "client": "10.0.0.1:40000",
        "principal": "User:alice",
        "client_id": "c" * 256,
        "software": "a" * 255 + " ",
        "tls": None,
        "broker": 3,
        "upstream": "10.0.0.2:9092",
        "opened_ns": 4 * 10**9,
        "requests": 7,
        "requests_pending": 1,
        "bytes_in": 11,
        "bytes_out": 22,
    }
    bare = operating.connection_row(Relay(5, "east", client_id=None))
    assert (bare["client_id"], bare["software"], bare["requests_pending"]) == (None, None, 0)


def test_the_rows_of_requests_in_flight_show_their_progress():
    asked = [pending(1), pending(2, NOW_NS + 5, NONE, client_id=""), pending(3, begun=0)]
    assert operating.requests(worker(Relay(5, "east")), 6) is None
    assert operating.requests(worker(Relay(5, "east")), 5) == []
    rows = operating.requests(worker(Relay(5, "east", asked)), 5)
    assert rows[0] == {
        "number": 1,
        "api": "Fetch",
        "version": 12,
        "correlation_id": 101,
        "client_id": "own",
        "bytes": 64,
        "pending_s": 1.5,
        "is_whole": True,
        "answer_begun": False,
    }
    names = ("client_id", "pending_s", "is_whole", "answer_begun")
    assert [tuple(row[name] for name in names) for row in rows[1:]] == [
        ("shop", 0.0, False, False),
        ("own", 1.5, True, True),
    ]
    many = operating.requests(worker(Relay(5, "east", [pending(n) for n in range(201)])), 5)
    assert [row["number"] for row in many] == list(range(200))


def test_one_open_connection_is_closed():
    one, closed = Relay(1, "east"), Relay(2, "east", closed=True)
    assert [operating.close(worker(one, closed), number) for number in (1, 2, 3)] == [1, 0, 0]
    assert (one.done, closed.done) == ([("close", "operator")], [])


@pytest.mark.parametrize(
    ("number", "cluster", "asked"),
    [
        (None, None, [1, 2, 3]),
        (2, None, [2]),
        (None, "east", [1, 2]),
        (3, "west", [3]),
        (3, "east", []),
        (4, None, []),  # it is closed
        (9, None, []),
    ],
)
def test_open_connections_are_drained_by_number_by_cluster_or_all(number, cluster, asked):
    relays = [Relay(1, "east"), Relay(2, "east"), Relay(3, "west"), Relay(4, "east", closed=True)]
    assert operating.drain(worker(*relays), number, cluster) == len(asked)
    assert [relay.number for relay in relays if relay.done] == asked
    assert all(relay.done == [("finish", "operator")] for relay in relays if relay.done)


def test_the_log_level_is_read_and_set():
    logging.getLogger().setLevel(logging.WARNING)
    assert operating.log_level(worker(), None) == "warning"
    for level in ("debug", "info", "warning", "error"):
        assert operating.log_level(worker(), level) == level == operating.log_level(worker(), None)
    with pytest.raises(ValueError, match="level='loud' is none of debug, info, warning, error"):
        operating.log_level(worker(), "loud")


def test_without_a_flight_recorder_there_is_no_dump():
    assert operating.dump_start(worker(), "name") is None and operating.dump_result(worker(), "name") is None
    operating.dump_found(worker(), "name", "text")


def test_the_log_line_of_an_ended_connection_has_a_value_for_each_placeholder():
    relay = Relay(5, "east")
    fields = list(operating.end_fields(relay, NOW_NS))
    assert operating.END_LINE % ("idle", *fields) == (
        "ended cause=idle cluster=east listener=main broker=3 client=10.0.0.1:40000 principal=User:alice "
        "client_id=shop software=None tls=None duration_s=5.000 requests=7 errors=2 bytes_in=11 bytes_out=22"
    )
    relay.info = replace(relay.info, broker_id=None)
    assert list(operating.end_fields(relay, NOW_NS))[2] == "bootstrap"
