"""The jobs on small tables with answers computed by hand; rows contain only the columns that a job reads."""

import re
from datetime import UTC, datetime, timedelta

import pyarrow.parquet as pq
import pytest

from kproxy.analysis import engine, jobs
from kproxy.analysis.duck import Tables, quoted, type_text
from kproxy.analysis.findings import limits
from kproxy.analysis.findings.failures import unanswered
from kproxy.analysis.questions.parts import CAUSES
from kproxy.analysis.questions.pieces import duration_of
from kproxy.tables.schema import (
    BATCHES,
    CHANGES,
    COMMITTED_OFFSETS,
    CONNECTIONS,
    EXCHANGES,
    GROUP_EVENTS,
    PARTITIONS,
    QUALITY,
    TOPOLOGY,
)
from kproxy.views import units

REPLICA = re.compile("(broker-.*-fetcher|ReplicaFetcherThread)-")  # client ids of brokers
START = datetime(2026, 1, 1, tzinfo=UTC)
MS = 1_000_000
ALL = ("latency", "slow", "throttle", "errors", "talkers", "clients", "connections")  # with brokers' requests

EXCHANGE = {
    "source": "a.pcap",
    "connection": 1,
    "client_address": "10.0.0.1",
    "client_port": 50000,
    "broker_address": "10.0.0.9",
    "broker_port": 9092,
    "api_key": 0,
    "api": "Produce",
    "api_version": 9,
    "client_id": "app",
    "request_bytes": 1000,
    "response_bytes": 100,
    "outcome": "answered",
    "errors": 0,
    "throttle_ms": 0,
    "in_flight": 0,
    "queue_ns": 0,
    "muted_ns": 0,
    "retransmissions": 0,
}
API_KEYS = {
    "Metadata": 3,
    "Produce": 0,
    "Fetch": 1,
    "JoinGroup": 11,
    "OffsetCommit": 8,
    "TxnOffsetCommit": 28,
    "LeaderAndIsr": 4,
    "EndTxn": 26,
    "WriteTxnMarkers": 27,
    "AlterPartition": 56,
}


def exchange(number, at_s=0.0, **columns):
    """`sending`, `latency` and `receiving` are in milliseconds; other arguments are columns."""
    sending, waited, receiving = (columns.pop(name, 0) for name in ("sending", "latency", "receiving"))
    row = EXCHANGE | {"number": number, "time": START + timedelta(seconds=at_s)} | columns
    row.setdefault("latency_ns", int(waited * MS))
    row.setdefault("total_ns", int((sending + waited + receiving) * MS))
    row |= {"sending_ns": sending * MS, "receiving_ns": receiving * MS} | columns
    row["api_key"] = API_KEYS[row["api"]]
    return row


@pytest.fixture
def frame(tmp_path):
    """Makes frames of DuckDB; test_engine compares Spark's answers with DuckDB's."""
    with Tables(tmp_path) as tables:

        def make(table, rows):
            types = {field.name: type_text(field.type) for field in table.schema}
            values = (
                ", ".join(f"cast({_value(row.get(name))} as {of}) as {quoted(name)}" for name, of in types.items())
                for row in rows
            )
            return tables.query(" union all ".join(f"(select {each})" for each in values))

        yield make


def _value(value):
    if value is None or isinstance(value, bool | int):
        return "null" if value is None else str(value).lower()
    return "'" + str(value).replace("'", "''") + "'"


def some(frame, condition):
    return engine.ask({"t": frame}, some=f"select * from t where {condition}")


def rows(frame, *columns):
    names = frame.columns
    return [tuple(row[names.index(column)] for column in columns) for row in engine.rows(frame)]


def dicts(frame):
    return [dict(zip(frame.columns, row, strict=True)) for row in engine.rows(frame)]


def test_latency_by_anything_over_time(frame):
    table = frame(
        EXCHANGES,
        [exchange(n, at_s=n // 50 * 60, latency=n + 1, queue_ns=n % 2 * MS) for n in range(100)]
        + [exchange(100, api="Fetch", api_version=12, latency=500, client_id=None), exchange(101, latency_ns=None)],
    )
    answer = jobs.latency(table, by=["api", "version", "broker", "client"])
    assert rows(answer, "api", "version", "broker", "client", "exchanges", "p50_ns", "p99_ns", "p999_ns", "max_ns") == [
        ("Produce", 9, "10.0.0.9:9092", "app", 100, 50 * MS, 99 * MS, 100 * MS, 100 * MS),
        ("Fetch", 12, "10.0.0.9:9092", "10.0.0.1", 1, 500 * MS, 500 * MS, 500 * MS, 500 * MS),  # a single exchange
    ]
    assert rows(answer, "queue_p99_ns") == [(MS,), (0,)]
    halves = jobs.latency(some(table, "api = 'Produce'"), every="1 minute")
    assert rows(halves, "exchanges", "p50_ns", "max_ns") == [(50, 25 * MS, 50 * MS), (50, 75 * MS, 100 * MS)]
    assert rows(halves, "time")[1][0] - rows(halves, "time")[0][0] == 60_000_000


def test_latency_counts_unanswered_requests(frame):
    """Percentiles are of answered requests only, so the count shows that an API without answers is not healthy."""
    lost = ("unanswered", "lost", "unanswered", "no_answer_expected")
    table = frame(
        EXCHANGES,
        [exchange(number, latency=number + 1) for number in range(3)]
        + [exchange(3 + number, latency_ns=None, outcome=outcome) for number, outcome in enumerate(lost)]
        + [exchange(9, api="Fetch", latency_ns=None, outcome="unanswered")],
    )
    found = rows(jobs.latency(table), "api", "exchanges", "unanswered", "max_ns")
    assert found == [("Produce", 3, 3, 3 * MS), ("Fetch", 0, 1, None)]


def test_slow_names_the_cause(frame):
    table = frame(
        EXCHANGES,
        [
            exchange(0, latency=50, throttle_ms=400),  # Produce v9: the broker responds, then mutes the connection
            exchange(1, latency=450, queue_ns=40 * MS, muted_ns=400 * MS),
            exchange(2, latency=900, queue_ns=700 * MS, in_flight=3),
            exchange(3, latency=300, api_version=3, throttle_ms=280),  # before KIP-219: the broker delays the response
            exchange(4, latency=505, api="Fetch", api_version=12, max_wait_ms=500),
            exchange(5, latency=2000, api="Fetch", api_version=12, max_wait_ms=500),
            exchange(6, latency=3000, api="JoinGroup", api_version=5),
            exchange(7, sending=150, latency=60, receiving=10, retransmissions=2),
            exchange(8, latency=160, connection=2),  # a connection with a round trip of 100 ms
            exchange(9, latency=700, acks=-1),
            exchange(10, latency=99),
            exchange(11, latency=480, api="Fetch", api_version=12, max_wait_ms=500, records=7),
            exchange(12, latency=481, api="Fetch", api_version=12, max_wait_ms=500, records=0),
        ],
    )
    trips = frame(CONNECTIONS, [{"source": "a.pcap", "connection": 2, "handshake_rtt_ns": 100 * MS}])
    answer = jobs.slow(table, trips, slower_than_ms=100)
    assert dict(rows(answer, "number", "cause")) == {
        1: "throttle",
        2: "queue",
        3: "throttle",
        4: "long_poll",
        5: "broker",
        6: "long_poll",
        7: "sending",
        8: "round_trip",
        9: "broker",
        11: "long_poll",
        12: "long_poll",
    }
    parts = {row["number"]: row for row in dicts(answer)}
    for row in parts.values():
        assert row["total_ns"] == sum(row[f"{part}_ns"] for part in CAUSES)
    assert parts[1]["throttle_ns"] == 400 * MS and parts[1]["queue_ns"] == 40 * MS
    assert parts[2]["explanation"] == (
        "waited 700 ms behind earlier requests of its connection; in flight when it came: 3"
    )
    assert parts[1]["explanation"] == (
        "muted for 400 ms after earlier answers that were throttled: the client is over a quota"
    )
    assert parts[3]["explanation"] == "throttled for 280 ms: the client is over a quota"
    assert parts[5]["explanation"] == "the broker took 1.50 s; another 500 ms of expected wait (long poll)"
    assert parts[6]["explanation"] == "waited 3.00 s for other members of its group to come, or to be dropped"
    assert parts[7]["explanation"] == (
        "its client took 150 ms to send 1000 bytes, which the broker would have taken at once; another 60.0 ms in the "
        "broker; segments sent again meanwhile: 2"
    )
    waited = "for data, of the 500 ms that it allowed"
    assert parts[4]["explanation"] == f"expected wait (long poll): 500 ms {waited}"  # records were not counted
    assert parts[11]["explanation"] == f"expected wait (long poll): 480 ms {waited}; data came late"
    assert parts[12]["explanation"] == f"expected wait (long poll): 481 ms {waited}; nothing new to read"
    assert parts[9]["explanation"] == "the broker took 700 ms, replication to the others included"
    assert rows(engine.first_rows(jobs.slow(table, trips), 2), "number") == [(6,), (5,)]


def test_throttle_errors_talkers(frame):
    table = frame(
        EXCHANGES,
        [
            exchange(0, 0, throttle_ms=100),
            exchange(1, 1, throttle_ms=300),
            exchange(2, 2, client_id="calm", request_bytes=7900, response_bytes=None),
            exchange(3, 3, errors=2, error_code=6, error="NOT_LEADER_OR_FOLLOWER"),
            exchange(4, 4, errors=1, error_code=6, error="NOT_LEADER_OR_FOLLOWER", client_id="calm", request_bytes=0),
            exchange(5, 5, outcome="unanswered", request_bytes=0, response_bytes=0),
        ]
        + [exchange(n, 6, outcome="unanswered", request_bytes=0, response_bytes=0, connection=2) for n in range(9)],
    )
    ends = [{"source": "a.pcap", "connection": n, "close": close} for n, close in ((1, "reset"), (2, "open"))]
    inside = frame(
        EXCHANGES,
        [
            exchange(6, errors=3, error_code=0, error="NONE"),
            exchange(7, errors=1, error_code=0, error="NONE", client_id=""),
        ],
    )
    both = engine.ask({"t": table, "i": inside}, both="select * from t union all select * from i")
    part = {"source": "a.pcap", "connection": 1, "number": 6, "direction": "response"}
    parts = frame(
        PARTITIONS,
        [
            part | {"partition": n, "error_code": code, "error": error}
            for n, code, error in ((0, 3, "UNKNOWN"), (1, 0, "NONE"), (2, 3, "UNKNOWN"), (3, 9, "REPLICA"))
        ]
        + [part | {"number": 3, "error_code": 9, "error": "REPLICA"}],
    )
    assert rows(
        jobs.throttle(table), "client", "exchanges", "throttled", "share", "throttle_ms", "max_throttle_ms"
    ) == [("app", 13, 2, 2 / 13, 400, 300)]
    assert rows(
        jobs.errors(both, parts, frame(CONNECTIONS, ends)),
        "api",
        "error",
        "exchanges",
        "codes",
        "clients",
        "last_client",
    ) == [
        ("Produce", "NOT_LEADER_OR_FOLLOWER", 2, 3, 2, "calm"),
        ("Produce", "REPLICA", 1, 3, 1, "app"),
        ("Produce", "UNKNOWN", 1, 3, 1, "app"),
        ("Produce", "inside_answer", 1, 1, 1, "10.0.0.1"),
        ("Produce", "not_missed", 1, 0, 1, "app"),
        ("Produce", "in_flight_at_end", 9, 0, 1, "app"),  # the most frequent outcome, but not an error
    ]
    assert rows(jobs.talkers(table), "client", "exchanges", "bytes", "share", "exchanges_per_second") == [
        ("calm", 2, 8000, 8000 / 11300, 0.5),
        ("app", 13, 3300, 3300 / 11300, 2.0),
    ]


def test_the_outcome_of_an_unanswered_request_depends_on_the_side_that_closed(frame):
    """Closed by: the client; the broker; the broker, since the port expects TLS; unknown."""
    ends = [
        {"closed_by": "client"},
        {"closed_by": "broker"},
        {"closed_by": "broker", "tls_failure": "TLS expected"},
        {"closed_by": None},
    ]
    began = round(START.timestamp()) * 1000 * MS
    of = {"source": "a.pcap", "start_ns": began, "end_ns": began + 500 * MS, "close": "fin"}
    connections = frame(CONNECTIONS, [of | {"connection": n} | end for n, end in enumerate(ends)])
    asked = {"outcome": "unanswered", "total_ns": None, "latency_ns": None}
    asked |= {"request_start_ns": began, "request_end_ns": began}
    table = frame(EXCHANGES, [exchange(0, connection=n, client_id=f"client-{n}", **asked) for n in range(len(ends))])
    found = jobs.errors(table, frame(PARTITIONS, [{}]), connections)
    assert rows(found, "error", "exchanges", "last_client") == [
        ("not_missed", 2, "client-3"),
        ("closed_by_broker", 1, "client-1"),
        ("tls_expected", 1, "client-2"),
    ]
    assert rows(jobs.slow(table, connections), "client", "explanation") == [
        ("client-0", "no answer: its client closed the connection after 500 ms"),
        ("client-1", "no answer: the broker closed its connection after 500 ms"),
        ("client-2", "no answer: its client sent no TLS, and the port expects it"),
        ("client-3", "no answer: its connection ended after 500 ms"),
    ]


def test_a_response_after_the_client_had_closed_the_connection_counts_as_missed(frame):
    """One client waits 30 s and closes 15 s before the response; others close early, after it, or not themselves."""
    began = round(START.timestamp()) * 1000 * MS
    ends = [("client", 30_000), ("client", 500), ("client", 46_000), ("broker", 30_000), (None, None)]
    connections = frame(
        CONNECTIONS,
        [
            {"source": "a.pcap", "connection": n, "start_ns": began, "end_ns": began + 50_000 * MS, "close": "reset"}
            | {"closed_by": by, "closed_ns": at_ms and began + at_ms * MS}
            for n, (by, at_ms) in enumerate(ends)
        ],
    )
    times = {"request_start_ns": began, "request_end_ns": began, "errors": 0, "error": None, "error_code": 0}
    times |= {"response_start_ns": began + 45_000 * MS, "response_end_ns": began + 45_000 * MS}
    waited = {"latency_ns": 45_000 * MS, "total_ns": 45_000 * MS, "broker_ns": 45_000 * MS}
    of_clients = [exchange(0, connection=n, client_id=f"client-{n}", **times, **waited) for n in range(len(ends))]
    exchanges = frame(EXCHANGES, of_clients)
    assert rows(jobs.errors(exchanges, frame(PARTITIONS, [{}]), connections), "error", "exchanges", "last_client") == [
        ("answered_too_late", 1, "client-0")
    ]
    told = dict(rows(jobs.slow(exchanges, connections), "client", "explanation"))
    assert {client: text.partition("; its client")[2] for client, text in told.items()} == {
        "client-0": " had closed the connection 15.0 s before the answer",
        "client-1": " had closed the connection 44.5 s before the answer",
        **dict.fromkeys(("client-2", "client-3", "client-4"), ""),
    }
    ((failed, gave_up, longest_ns),) = rows(
        unanswered({"exchanges": exchanges, "connections": connections}, limits()), "failed", "gave_up", "longest_ns"
    )
    assert (failed, gave_up, longest_ns) == (1, 1, 30_000 * MS)


def test_skew(frame):
    def part(api, direction, partition, size, **columns):
        names = {"topic": "t", "api": api, "direction": direction, "partition": partition, "bytes": size, "records": 1}
        return {"source": "a.pcap", "cluster": "east", "connection": 1, "number": 0} | names | columns

    table = frame(
        PARTITIONS,
        [
            part("Produce", "request", 0, 800),
            part("Produce", "request", 0, 100),
            part("Produce", "request", 1, 100),
            part("Produce", "request", 1, 70, cluster="west"),  # another topic with the same name
            part("Produce", "response", 1, 5000),
            part("Fetch", "request", 1, 5000),
            part("Fetch", "response", 1, 60),
            part("Fetch", "response", 2, 6000, number=1),  # to a follower
            part("ListOffsets", "request", 3, None),  # implies four partitions
            part("Fetch", "response", 0, 60, topic=None, topic_id="id"),
        ],
    )
    talk = frame(EXCHANGES, [exchange(0), exchange(1, api="Fetch", replica_id=2)])
    names = (
        "cluster",
        "topic",
        "api",
        "partition",
        "bytes",
        "share",
        "times_even",
        "excess_bytes",
        "partitions",
        "idle",
    )
    none = some(frame(TOPOLOGY, [{}]), "false")
    hot = ("east", "t", "Produce", 0, 900, 0.9, 3.6, 650, 4, 3 - 1)
    assert rows(jobs.skew(table, talk, none), *names) == [
        hot,
        ("east", "t", "Fetch", 1, 60, 1.0, 4.0, 45, 4, 3),
        ("west", "t", "Produce", 1, 70, 1.0, 2.0, 35, 2, 1),
        ("east", "id", "Fetch", 0, 60, 1.0, 1.0, 0, 1, 0),
        ("east", "t", "Fetch", 0, 0, 0.0, 0.0, -15, 4, 3),
        ("east", "t", "Fetch", 2, 0, 0.0, 0.0, -15, 4, 3),
        ("east", "t", "Fetch", 3, 0, 0.0, 0.0, -15, 4, 3),
        ("west", "t", "Produce", 0, 0, 0.0, 0.0, -35, 2, 1),
        ("east", "t", "Produce", 1, 100, 0.1, 0.4, -150, 4, 2),
        ("east", "t", "Produce", 2, 0, 0.0, 0.0, -250, 4, 2),
        ("east", "t", "Produce", 3, 0, 0.0, 0.0, -250, 4, 2),
    ]
    twelve = frame(TOPOLOGY, [{"cluster": "west", "kind": "topic", "topic": "t", "partitions": 12}])
    west = rows(some(jobs.skew(table, talk, twelve), "cluster = 'west'"), "partition", "times_even", "idle")
    assert west[0] == (1, 12.0, 11) and len(west) == 12
    assert rows(jobs.skew(table, talk, none, where="partition = 0 and topic = 't'"), *names)[0] == hot
    replicated = rows(jobs.skew(table, talk, none, replicas=True), "api", "partition", "bytes")
    assert ("Fetch", 2, 6000) in replicated


def test_skew_counts_only_partitions_that_can_exist(frame):
    """Requests can name any partition: refused ones do not count, and no number makes two thousand million rows."""
    last = 2**31 - 1

    def part(topic, direction, partition, size, error_code=None):
        keys = {"source": "a.pcap", "cluster": "east", "connection": 1, "number": 0, "api": "Produce"}
        each = {"topic": topic, "direction": direction, "partition": partition, "bytes": size, "error_code": error_code}
        return keys | each

    table = frame(
        PARTITIONS,
        [
            part("refused", "request", 0, 300),
            part("refused", "request", last, 100),
            part("refused", "response", 0, None, 0),
            part("refused", "response", last, None, 3),
            part("unanswered", "request", 0, 300),
            part("unanswered", "request", last, 100),
        ],
    )
    none = some(frame(TOPOLOGY, [{}]), "false")
    names = ("topic", "partition", "bytes", "partitions", "idle")
    assert sorted(rows(jobs.skew(table, frame(EXCHANGES, [exchange(0)]), none), *names)) == [
        ("refused", 0, 300, 1, 0),
        ("refused", last, 100, 1, 0),
        ("unanswered", 0, 300, last, last - 1),
        ("unanswered", last, 100, last, last - 1),
    ]


def test_batching(frame):
    keys = {"source": "a.pcap", "connection": 1, "number": 0, "api": "Produce", "direction": "request", "topic": "t"}
    table = frame(
        BATCHES,
        [keys | {"records": n, "bytes": 100 * n, "codec": "lz4", "control": False} for n in (1, 1, 10)]
        + [keys | {"records": 5, "bytes": 50, "codec": "zstd", "control": False}]
        + [keys | {"records": None, "bytes": 70, "codec": "zstd", "control": False}]  # a batch of an old message format
        + [keys | {"number": 1, "records": 2, "bytes": 300, "codec": "none", "control": False}]
        + [keys | {"topic": "u", "records": 4, "bytes": 40, "codec": "gzip", "control": False}]
        + [keys | {"records": 5, "bytes": 50, "codec": "none", "control": True}]
        + [keys | {"api": "Fetch", "direction": "response", "records": 5, "bytes": 50, "control": False}],
    )
    talk = frame(EXCHANGES, [exchange(0), exchange(1, client_id="plain")])
    assert rows(
        jobs.batching(table, talk), "client", "topic", "codec", "batches", "records", "bytes", "records_p50",
        "bytes_per_record", "ratio", "single_share",
    ) == [
        ("app", "t", "lz4", 3, 12, 1200, 1, 100.0, 1.5, pytest.approx(2 / 3)),
        ("app", "t", "zstd", 2, 5, 120, 5, 10.0, 15.0, 0.0),
        ("app", "u", "gzip", 1, 4, 40, 4, 10.0, None, 0.0),
        ("plain", "t", "none", 1, 2, 300, 2, 150.0, None, 0.0),
    ]  # fmt: skip


def test_fetching(frame):
    fetches = [(0, 1), (0, 500), (7, 1), (None, 1), (0, 249)]
    table = frame(
        EXCHANGES,
        [
            exchange(n, at_s=n, api="Fetch", records=records, latency=latency, max_wait_ms=500, replica_id=replica)
            for n, ((records, latency), replica) in enumerate(zip(fetches, (-1, None, -1, -1, -1), strict=True))
        ]
        + [exchange(5, at_s=5, api="Fetch", records=9, replica_id=1, client_id="broker-1-fetcher-0")]
        + [exchange(6, at_s=6, api="Fetch", records=9, client_id="broker-1-fetcher-0")],  # its body was not read
    )
    names = ("fetches", "read", "empty", "empty_early", "records", "empty_share", "fetches_per_second")
    assert rows(jobs.fetching(table), *names) == [(5, 4, 3, 2, 7, 0.75, 1.0)]
    assert rows(jobs.fetching(table, by=["host"], replicas=True), "fetches", "records") == [(7, 25)]


def test_lag_and_offsets(frame):
    keys = {"source": "a.pcap", "connection": 1, "topic": "t", "partition": 0, "cluster": "east"}

    def row(number, at_s, api, direction, **columns):
        return keys | {
            "number": number, "time": START + timedelta(seconds=at_s), "api": api, "direction": direction
        } | columns  # fmt: skip

    commits = ((4, 10, "OffsetCommit", 100), (5, 15, "OffsetCommit", 300), (6, 30, "TxnOffsetCommit", 200))
    table = frame(
        PARTITIONS,
        [row(n, n, "Fetch", "response", lag_records=behind) for n, behind in enumerate((5, 90, 20))]
        + [row(3, 3, "Fetch", "response", lag_records=None)]
        + [row(n, at, api, "request", offset=offset) for n, at, api, offset in commits]
        + [row(5, 15, "OffsetCommit", "response", error_code=27), row(6, 30, "OffsetCommit", "response", error_code=0)]
        + [row(7, 60, "Fetch", "response", lag_records=900)]  # to a follower
        + [row(8, 70, "Fetch", "response", lag_records=1, cluster="west")]
        + [row(9, 70, "OffsetCommit", "request", offset=1, cluster="west")],
    )
    talk = frame(
        EXCHANGES,
        [exchange(n, api="Fetch") for n in (0, 1, 2, 3, 8)]
        + [exchange(n, api="OffsetCommit", group_id="g") for n in (4, 5, 9)]
        + [exchange(6, api="TxnOffsetCommit", group_id="g"), exchange(7, api="Fetch", replica_id=3)],
    )
    names = ("cluster", "client", "fetches", "first_lag_records", "last_lag_records", "max_lag_records", "growing")
    mine = [("east", "app", 3, 5, 20, 90, True), ("west", "app", 1, 1, 1, 1, False)]
    others = [frame(each, [{}]) for each in (COMMITTED_OFFSETS, GROUP_EVENTS, CHANGES, TOPOLOGY)]
    assert rows(jobs.lag(table, talk, *others), *names) == mine
    assert rows(jobs.lag(table, talk, *others, replicas=True), "last_lag_records")[0] == (900,)
    names = (
        "cluster", "group_id", "commits", "longest_gap_ns", "last_offset", "went_back", "refused", "commits_per_second"
    )  # fmt: skip
    assert rows(jobs.offsets(table, talk), *names) == [
        ("east", "g", 3, 15_000 * MS, 200, 1, 1, 0.1),
        ("west", "g", 1, None, 1, 0, 0, None),
    ]
    late = jobs.offsets(table, talk, where="`offset` = 200")  # its gap is still the one to the previous commit
    assert rows(late, "commits", "longest_gap_ns", "went_back") == [(1, 15_000 * MS, 1)]


def test_group_lag(frame):
    keys = {"source": "a.pcap", "connection": 1, "topic": "t", "partition": 0, "cluster": "east"}

    def row(number, api, direction, **columns):
        at = {"number": number, "time": START + timedelta(seconds=number), "api": api, "direction": direction}
        return keys | at | columns

    table = frame(
        PARTITIONS,
        [
            row(0, "OffsetFetch", "response", offset=5, group_id="g"),
            row(1, "OffsetCommit", "request", offset=10),
            row(1, "OffsetCommit", "response", error_code=0),
            row(2, "TxnOffsetCommit", "request", offset=20),
            row(2, "TxnOffsetCommit", "response", error_code=0),
            row(3, "OffsetCommit", "request", offset=90),
            row(3, "OffsetCommit", "response", error_code=27),  # refused
            row(4, "OffsetFetch", "response", offset=7, group_id="h", partition=1),
            row(4, "OffsetFetch", "response", offset=-1, group_id="new", partition=1),  # no commit yet
            row(5, "Fetch", "response", high_watermark=100, end_offset=100, error_code=0),
            row(6, "Fetch", "response", high_watermark=-1, error_code=3, partition=1),
            row(7, "ListOffsets", "response", offset=0, error_code=0),  # the log start
            row(8, "OffsetCommit", "request", offset=30, cluster="west"),
            row(8, "OffsetCommit", "response", error_code=0, cluster="west"),
            row(9, "Produce", "response", offset=40, end_offset=50, error_code=0, cluster="west"),
        ],
    )
    transaction = {"transactional_id": "x", "cluster": "east"}
    talk = [exchange(n, api="OffsetCommit", group_id="g") for n in (1, 3, 8)]
    talk += [exchange(2, at_s=2, api="TxnOffsetCommit", group_id="g", **transaction)]
    talk += [exchange(4, at_s=4, api="EndTxn", connection=2, **transaction)]
    talk = frame(EXCHANGES, talk)
    ended = keys | {"number": 4, "connection": 2, "time": START + timedelta(seconds=4), "group_id": "g"}
    others = frame(GROUP_EVENTS, [ended | {"event": "offsets_committed"}]), frame(CHANGES, [{}]), frame(TOPOLOGY, [{}])
    names = ("cluster", "group_id", "partition", "committed_offset", "end_offset", "lag_records", "commits")

    def written(number, group, offset, change="committed"):
        at = {"number": number, "time": START + timedelta(seconds=number), "group_id": group, "change": change}
        return keys | at | {"offset": offset}

    assert rows(
        jobs.group_lag(table, talk, frame(COMMITTED_OFFSETS, [written(9, "g", 99, "pending")]), *others), *names
    ) == [
        ("east", "g", 0, 20, 100, 80, 2),
        ("west", "g", 0, 30, 50, 20, 1),
        ("east", "h", 1, 7, None, None, 0),
    ]

    log = frame(  # records of coordinators, read by a Fetch
        COMMITTED_OFFSETS,
        [
            written(1, "g", 10),
            written(9, "g", 25),
            written(9, "g", 99, "pending"),
            written(9, "g", 99, "aborted"),
            written(2, "unseen", 40),
            written(1, "gone", 7),
            written(3, "gone", None, "removed"),
        ],
    )
    assert rows(jobs.group_lag(table, talk, log, *others), *names) == [
        ("east", "g", 0, 25, 100, 75, 2),
        ("east", "unseen", 0, 40, 100, 60, 1),
        ("west", "g", 0, 30, 50, 20, 1),
        ("east", "h", 1, 7, None, None, 0),
    ]
    only = rows(jobs.group_lag(table, talk, log, *others, every="5 seconds", where="of_group = 'unseen'"), *names)
    assert only == [("east", "unseen", 0, 40, None, None, 1), ("east", "unseen", 0, 40, 100, 60, 0)]


def test_clients_lists_clients_with_dropped_versions(frame):
    table = frame(
        EXCHANGES,
        [
            exchange(0, api_version=2, client_id="old"),
            exchange(1, api_version=3, client_id="edge"),
            exchange(2, api_version=2, client_id="edge"),
            exchange(3, api="LeaderAndIsr", api_version=4, client_id="broker"),
            exchange(4, api_version=13, client_id="new", connection=2),
        ],
    )
    known = {"source": "a.pcap", "connection": 2, "software_name": "apache-kafka-java", "software_version": "4.1.0"}
    assert "broker" not in [client for (client,) in rows(jobs.clients(table, frame(CONNECTIONS, [known])), "client")]
    answer = jobs.clients(table, frame(CONNECTIONS, [known]), replicas=True)
    assert rows(
        answer, "client", "software_version", "api", "lowest", "highest", "served_from", "verdict", "kafka"
    ) == [
        ("broker", None, "LeaderAndIsr", 4, 4, None, "gone", "4.1.2"),
        ("old", None, "Produce", 2, 2, 3, "too_old", "4.1.2"),
        ("edge", None, "Produce", 2, 3, 3, "ok", "4.1.2"),
        ("new", "4.1.0", "Produce", 13, 13, 3, "ok", "4.1.2"),
    ]
    newer = jobs.clients(table, frame(CONNECTIONS, [known]), kafka="3.9")
    assert rows(some(newer, "verdict != 'ok'"), "client") == []
    older = jobs.clients(table, frame(CONNECTIONS, [known]), kafka="3.7.1", replicas=True)
    assert rows(some(older, "client = 'broker'"), "verdict", "kafka") == [("ok", "3.7.2")]
    with pytest.raises(ValueError, match=r"known are 0\.8\.0, .*, 4\.4, from whose official jars"):
        jobs.clients(table, frame(CONNECTIONS, [known]), kafka="0.7")


@pytest.mark.parametrize(
    ("api", "client_id"),
    [("WriteTxnMarkers", "broker-1-txn-marker-sender"), ("Fetch", "broker-1-fetcher-0"), ("AlterPartition", "1")],
)
def test_requests_that_only_brokers_send_do_not_count_as_clients(frame, api, client_id):
    table = frame(EXCHANGES, [exchange(0, client_id="app"), exchange(1, api=api, client_id=client_id)])
    assert rows(jobs.talkers(table, by=["api"]), "api") == [("Produce",)]
    assert len(rows(jobs.talkers(table, by=["api"], replicas=True), "api")) == 2


def test_connections(frame):
    def connection(at_s, life_ms, **columns):
        row = {name: EXCHANGE[name] for name in ("source", "client_address", "broker_address", "broker_port")}
        names = "requests client_bytes broker_bytes retransmissions out_of_order zero_windows gap_bytes"
        counts = dict.fromkeys(names.split(), 1)
        return row | counts | {
            "connection": 1, "time": START + timedelta(seconds=at_s), "start_ns": round(at_s * 1000) * MS,
            "end_ns": (round(at_s * 1000) + life_ms) * MS, "close": "fin"
        } | columns  # fmt: skip

    table = frame(
        CONNECTIONS,
        [
            connection(0, 10, handshake_rtt_ns=5),
            connection(60, 30, close="reset"),
            connection(179.98, 20, requests=0, handshake_rtt_ns=7),
        ],
    )
    refused = [connection(at_s, 0, close="refused", requests=0) for at_s in range(5)]
    tried = frame(CONNECTIONS, [connection(0, 10), connection(179.98, 20), *refused])
    talk = frame(EXCHANGES, [exchange(0), exchange(0, connection=7, api="Fetch", replica_id=2)])
    assert rows(
        jobs.connections(table, talk), "connections", "per_minute", "life_p50_ns", "round_trip_p50_ns",
        "retransmissions", "resets", "unused", "bytes",
    ) == [(3, 1.0, 20 * MS, 5, 3, 1, 1, 6)]  # fmt: skip
    lasted = rows(jobs.connections(tried, frame(EXCHANGES, [{}])), "connections", "refused", "life_p50_ns")
    assert lasted == [(7, 5, 10 * MS)]
    steps = rows(jobs.connections(table, talk, every="2 minutes"), "connections", "per_minute")
    assert steps == [(2, 1.0), (1, 0.5)]
    without_times = frame(CONNECTIONS, [connection(0, 0), connection(0, 0)])
    assert rows(jobs.connections(without_times, talk), "connections", "per_minute", "life_p50_ns") == [(2, None, None)]
    calls = frame(
        EXCHANGES,
        [
            exchange(0, connection=11, client_id="app"),
            exchange(1, connection=11, client_id="later"),
            exchange(0, connection=12, client_id="app"),
            exchange(0, connection=13, client_id=""),
        ],
    )
    named = frame(CONNECTIONS, [connection(n, 10, connection=n + 11) for n in range(4)])
    assert set(rows(jobs.connections(named, calls, by=["client"]), "client", "connections")) == {
        ("app", 2),
        (EXCHANGE["client_address"], 2),
    }
    brokers = frame(CONNECTIONS, [connection(0, 10, connection=1), connection(1, 10, connection=7)])
    assert rows(jobs.connections(brokers, talk), "connections") == [(1,)]
    assert rows(jobs.connections(brokers, talk, replicas=True), "connections") == [(2,)]


def test_compare(frame):
    ours = [exchange(n, n, latency=10, records=3) for n in range(5)] + [exchange(4, api="Fetch", latency=1, records=7)]
    ours = frame(EXCHANGES, ours[1:])
    theirs = frame(EXCHANGES, [exchange(n, latency=30, errors=n % 2, throttle_ms=5, records=9) for n in range(2)])
    assert rows(
        jobs.compare(ours, theirs), "api", "exchanges", "b_exchanges", "p99_change", "b_error_share", "b_throttle_ms"
    ) == [("Produce", 4, 2, 3.0, 0.5, 10), ("Fetch", 1, None, None, None, None)]
    records = rows(jobs.compare(ours, theirs), "api", "records", "b_records", "records_per_second")
    assert records == [("Produce", 12, 18, 3.0), ("Fetch", 7, None, 1.75)]


def test_captures_of_different_lengths_are_compared_by_rates_without_everyday_errors(frame):
    """The other is four times as long with the same rate; there, clients join a group and create a topic, which causes
    everyday errors. Requests for a topic that is never created count as refused.
    """
    refusals = ("MEMBER_ID_REQUIRED", "REBALANCE_IN_PROGRESS", "NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE")
    ours = frame(EXCHANGES, [exchange(n, n, api="Metadata", errors=0) for n in range(11)])
    theirs = [exchange(n, n, api="Metadata", errors=0) for n in range(41)]
    theirs[7] |= {"errors": 1, "error_code": 3, "error": "UNKNOWN_TOPIC_OR_PARTITION"}
    theirs[17] |= {"errors": 1, "error_code": 0, "error": "NONE", "api_version": 13}
    theirs += [
        exchange(n, n, connection=2, api="JoinGroup", errors=1, error_code=79, error=error)
        for n, error in enumerate(refusals)
    ]
    theirs += [
        exchange(n, n, connection=3, client_id="typo", api="Metadata", errors=1, error=error)
        for n, error in enumerate(["UNKNOWN_TOPIC_OR_PARTITION"] * 4)
    ]
    answer = jobs.compare(ours, frame(EXCHANGES, theirs), by=["api", "client"])
    names = ("api", "client", "b_exchanges", "rate_change", "b_error_share", "b_everyday_share")
    found = {row[:2]: row[2:] for row in rows(answer, *names)}
    assert found["Metadata", "app"] == (41, pytest.approx(41 / 40 / 1.1), 0, 2 / 41)
    assert found["JoinGroup", "app"] == (4, None, 0, 1)
    assert found["Metadata", "typo"] == (4, None, 1, 0)
    steps = rows(jobs.compare(ours, ours, every="2 seconds"), "after_ns", "exchanges_per_second", "rate_change")
    assert steps[0] == (0, 1.0, 1.0)


def test_quality(frame):
    row = {"source": "a.pcap", "kind": "gap", "count": 1, "bytes": 10, "sentence": "holes"}
    table = frame(QUALITY, [row | {"first_ns": 5_000_000, "last_ns": 9_000_000}, row | {"first_ns": 2_000_000}])
    assert rows(jobs.quality(table), "source", "kind", "count", "bytes", "sentence") == [
        ("a.pcap", "gap", 2, 20, "holes")
    ]
    assert rows(jobs.quality(table), "first", "last") == [(2000, 9000)]


def assert_slow_agrees_with_the_throttles(exchanges, slow):
    """The throttle time in `slow` equals the time explained by throttle_ms of earlier responses, to the nanosecond."""
    quota = [e for e in exchanges if e["source"] == "k41_quota.pcap" and e["response_end_ns"] is not None]
    muted = [row for row in slow if row["source"] == "k41_quota.pcap" and row["cause"] == "throttle"]
    assert sum(row["exchanges"] for row in muted) > 20
    for row in muted:
        before = sorted((e for e in quota if e["connection"] == row["connection"]), key=lambda e: e["number"])
        (mine,) = (e for e in before if e["number"] == row["number"])
        low, high = mine["request_start_ns"], mine["response_start_ns"]
        covered, reached = 0, low
        for e in before[: before.index(mine)]:
            begin, end = e["response_end_ns"], e["response_end_ns"] + (e["throttle_ms"] or 0) * MS
            covered += max(0, min(end, high) - max(begin, reached))
            reached = max(reached, min(end, high))
        assert row["throttle_ns"] == covered == mine["muted_ns"]
        assert row["explanation"].startswith("muted for ")


@pytest.mark.parametrize("which", ["duckdb", "spark"])
def test_durations_have_the_same_format_in_explanations_and_columns(request, tmp_path, which):
    """An explanation and the column next to it show the same text for a figure."""
    values = [0, 1, 999, 1000, 1234, 9994, 9995, 99_949, 99_950, 999_499, 999_500, 12_345_678, 280 * MS, 999_499_999]
    values += [999_500_000, 1_500 * MS, 3_424 * MS, 9_995 * MS, 59_999 * MS, 120_000 * MS, 7_200_000 * MS, 10**15]
    text = f"select {duration_of('figure_ns')} as told, nr from given order by nr"
    given = " union all ".join(
        f"select cast({value} as bigint) as figure_ns, {nr} as nr" for nr, value in enumerate(values)
    )
    with Tables(tmp_path) as tables:
        frame = tables.query(given) if which == "duckdb" else request.getfixturevalue("spark").sql(given)
        told = [row[0] for row in engine.rows(engine.ask({"given": frame}, answer=text))]
    assert told == [units.duration(value) for value in values]


def test_on_tables_of_real_traffic(tables):
    """The totals of each job agree with a count of the rows; real rows have nulls, zeros and unusual sizes."""
    exchanges = pq.read_table(tables / "exchanges").to_pylist()
    with Tables(tables) as duck:
        answer = {
            name: dicts(job.run(*map(duck.__getitem__, job.tables), **({"replicas": True} if name in ALL else {})))
            for name, job in jobs.JOBS.items()
            if name != "compare"
        }
    assert sum(row["exchanges"] for row in answer["latency"]) == sum(row["latency_ns"] is not None for row in exchanges)
    for row in answer["latency"]:
        latencies = sorted(e["latency_ns"] for e in exchanges if e["api"] == row["api"] and e["latency_ns"] is not None)
        assert row["p50_ns"] == latencies[(len(latencies) - 1) // 2] and row["max_ns"] == latencies[-1]
    answered = [row for row in answer["slow"] if row["cause"] != "unanswered"]
    assert sum(row["exchanges"] for row in answered) == sum((e["total_ns"] or 0) > 100 * MS for e in exchanges)
    assert_slow_agrees_with_the_throttles(exchanges, answer["slow"])
    causes = {row["cause"] for row in answer["slow"][:100]}
    assert causes >= {"throttle", "long_poll"}
    quota = [row for row in answer["slow"] if row["source"] == "k41_quota.pcap" and row["total_ns"] > 1000 * MS]
    assert "queue" not in {row["cause"] for row in quota}  # every long wait was a mute by a quota
    assert all(row["explanation"] for row in answer["slow"])
    assert sum(row["throttle_ms"] for row in answer["throttle"]) == sum(e["throttle_ms"] or 0 for e in exchanges) > 0
    assert abs(sum(row["share"] for row in answer["talkers"]) - 1) < 1e-9
    assert sum(row["connections"] for row in answer["connections"]) == pq.read_table(tables / "connections").num_rows
    assert {
        row["client"]: row["verdict"] for row in answer["clients"] if row["api"] == "UpdateMetadata"
    } == dict.fromkeys((e["client_id"] for e in exchanges if e["api"] == "UpdateMetadata"), "gone")
    fetches = [e for e in exchanges if e["api"] in ("Fetch", "ShareFetch") and e["outcome"] == "answered"]
    fetches = [e for e in fetches if not REPLICA.match(e["client_id"])]
    assert sum(row["fetches"] for row in answer["fetching"]) == len(fetches)
    assert sum(row["empty"] for row in answer["fetching"]) == sum(e["records"] == 0 for e in fetches) > 0
    parts = pq.read_table(tables / "partitions").to_pylist()
    commits = [p for p in parts if p["api"] == "OffsetCommit" and p["direction"] == "request"]
    assert sum(row["commits"] for row in answer["offsets"]) == len(commits) > 0
    brokers = {
        (e["connection"], e["number"]) for e in exchanges if e["api"] == "Fetch" and REPLICA.match(e["client_id"])
    }
    assert {(e["connection"], e["number"]) for e in exchanges if e["replica_id"] is not None} == brokers != set()
    parts = [p for p in parts if (p["connection"], p["number"]) not in brokers]
    behind = [p for p in parts if p["api"] == "Fetch" and p["direction"] == "response" and p["lag_records"] is not None]
    assert sum(row["fetches"] for row in answer["lag"]) == len(behind) > 0
    ends = {(row["topic"], row["partition"]): row["end_offset"] for row in answer["group-lag"]}
    assert ends and all(row["lag_records"] is None or row["lag_records"] >= 0 for row in answer["group-lag"])
    assert sum(row["commits"] for row in answer["group-lag"]) <= len(commits)
    moved = sum(p["bytes"] or 0 for p in parts)
    assert sum(row["bytes"] or 0 for row in answer["skew"]) == moved > 0
    assert all(0 <= row["idle"] < row["partitions"] > row["partition"] for row in answer["skew"])
    batches = pq.read_table(tables / "batches").to_pylist()
    produced = [b for b in batches if b["api"] == "Produce" and not b["control"]]
    assert sum(row["batches"] for row in answer["batching"]) == len(produced) > 0
    assert {row["kind"] for row in answer["quality"]} >= {"packets", "kafka"}
    failed = [e for e in exchanges if e["errors"] or e["outcome"] in ("unanswered", "lost")]
    assert sum(row["exchanges"] for row in answer["errors"]) >= len(failed) > 0
