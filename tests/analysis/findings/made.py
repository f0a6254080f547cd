"""Synthetic tables with one case for each kind of finding, and a similar case just below its threshold.

Rows contain only the columns that questions read. Other tests use real clients and captures.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kproxy.tables import schema

START = datetime(2026, 1, 1, tzinfo=UTC)
START_NS = int(START.timestamp()) * 10**9
MS = 10**6
KEYS = {
    "Produce": 0,
    "Fetch": 1,
    "OffsetCommit": 8,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "AddPartitionsToTxn": 24,
    "EndTxn": 26,
    "InitProducerId": 22,
    "Metadata": 3,
    "ApiVersions": 18,
}

Rows = dict[str, list[dict[str, Any]]]


class Made:
    """Rows by table; each client has its own connections."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self._connections: dict[Any, int] = {}
        self._numbers: dict[int, int] = {}

    def add(self, table: str, at_s: float, **columns: Any) -> None:
        row = {"source": "made", "cluster": "default", "time": START + timedelta(seconds=at_s), **columns}
        self.rows.setdefault(table, []).append(row)

    def exchange(self, client: str, api: str, at_s: float, *, broker: int = 1, **columns: Any) -> dict[str, Any]:
        """An answered exchange; returns its key, for rows of its partitions and batches."""
        connection = self._connections.setdefault((client, broker), len(self._numbers))
        number = self._numbers[connection] = self._numbers.get(connection, -1) + 1
        key = {"connection": connection, "number": number}
        self.add(
            "exchanges",
            at_s,
            **key,
            **{
                "client_id": client,
                "client_address": "10.0.0.1",
                "broker_address": f"10.0.1.{broker}",
                "broker_port": 9092,
                "broker_id": broker,
                "api": api,
                "api_key": KEYS[api],
                "api_version": 12,
                "outcome": "answered",
                "latency_ns": 2 * MS,
                "request_bytes": 500,
                "response_bytes": 100,
                "errors": 0,
                "throttle_ms": 0,
            }
            | columns,
        )
        return {"api": api, **key, "at_s": at_s}

    def reconnect(self, client: str, broker: int = 1) -> None:
        """Send later requests of the client over a new connection."""
        del self._connections[client, broker]

    def partition(self, key: dict[str, Any], direction: str, topic: str, partition: int = 0, **columns: Any) -> None:
        self.add("partitions", **key, direction=direction, topic=topic, partition=partition, **columns)

    def write(self, place: Path) -> Path:
        for name, table in schema.BY_NAME.items():
            (place / name).mkdir(parents=True)
            rows = sorted(self.rows.get(name, []), key=lambda row: row["time"])
            plain = [{field.name: row.get(field.name) for field in table.schema} for row in rows]
            pq.write_table(pa.Table.from_pylist(plain, schema=table.schema), place / name / "made.parquet")
        return place


def dataset(place: Path) -> Path:
    """A dataset with all of these cases."""
    made = Made()
    consumers(made)
    members(made)
    commits(made)
    brokers(made)
    partitions(made)
    lags(made)
    transactions(made)
    resent(made)
    network(made)
    connects(made)
    refusals(made)
    recut(made)
    losses(made)
    standstills(made)
    doubled(made)
    cluster(made)
    return made.write(place)


def consumers(made: Made) -> None:
    for number in range(200):
        at_s = number / 20  # 20 per second
        made.exchange("poller", "Fetch", at_s, records=0, max_wait_ms=1, latency_ns=MS)
        made.exchange("idler", "Fetch", number / 2, records=0, max_wait_ms=500, latency_ns=500 * MS)  # 2 per second
    for number in range(300):
        made.exchange("nibbler", "Fetch", number / 100, records=1, max_wait_ms=500, response_bytes=150)
        made.exchange("eater", "Fetch", number / 100, records=90, max_wait_ms=500, response_bytes=9000)


def members(made: Made) -> None:
    """`hangs` sends only heartbeats from the tenth second on; `idle` has lost its partitions, `busy` continues.

    `slow` stops fetching when `hangs` does, but commits the fetched records one by one until the end.
    """
    for name, last in (("hangs", 3), ("slow", 40)):
        for number in range(last):
            key = made.exchange(name, "OffsetCommit", 3 * number + 1, group_id=f"{name}-g")
            made.partition(key, "request", "worked", offset=100 + number)
        key = made.exchange(name, "OffsetCommit", 118, group_id=f"{name}-g")  # again, like auto-commit
        made.partition(key, "request", "worked", offset=99 + last)
    for name in ("hangs", "slow", "idle", "busy"):
        for number in range(40):
            made.exchange(name, "Heartbeat", 3 * number, group_id=f"{name}-g")
        for number in range(20 if name != "busy" else 240):
            made.exchange(name, "Fetch", number / 2, records=1, max_wait_ms=500, response_bytes=9000)
        made.exchange(name, "SyncGroup", 20 if name == "idle" else 0, group_id=f"{name}-g")


def commits(made: Made) -> None:
    for number in range(150):
        made.exchange("anxious", "OffsetCommit", number / 50, group_id="anxious-g")
        made.exchange("calm", "OffsetCommit", number, group_id="calm-g")


def brokers(made: Made) -> None:
    """Broker 7 has most of the bytes, broker 8 is slow; 9 and 10 are normal."""
    for broker in (7, 8, 9, 10):
        for number in range(600):
            slow = {"latency_ns": 400 * MS} if broker == 8 and number % 10 == 0 else {}
            size = 60_000 if broker == 7 else 3000
            made.exchange("writer", "Produce", number / 10, broker=broker, request_bytes=size, acks=-1, **slow)


def partitions(made: Made) -> None:
    """Partition 2 of `lopsided` has nearly all bytes; those of `round` have equal shares."""
    for number in range(120):
        key = made.exchange("keyed", "Produce", number / 4, acks=-1)
        for topic in ("lopsided", "round"):
            for partition in range(4):
                size = 40_000 if topic == "round" or partition == 2 else 100
                made.partition(key, "request", topic, partition, bytes=size, records=10)


def lags(made: Made) -> None:
    """The lag of `late` grows, that of `even` stays the same."""
    for number in range(60):
        for client, lag in (("late", 500 + number * 400), ("even", 5000)):
            key = made.exchange(client, "Fetch", number / 2, records=100, response_bytes=90_000, max_wait_ms=500)
            marks = {"high_watermark": 100_000 + lag, "last_stable_offset": 100_000 + lag}
            made.partition(key, "response", "orders", lag_records=lag, bytes=89_000, records=100, **marks)


def transactions(made: Made) -> None:
    """`hung` never ends, `ends` does, the coordinator aborts `late`; `stuck` cannot be read beyond offset 500."""
    for name, topic in (("hung", "held"), ("ends", "held"), ("late", "flowing")):
        made.exchange(name, "AddPartitionsToTxn", 5, transactional_id=f"{name}-tx")
        key = made.exchange(name, "Produce", 5.1, transactional_id=f"{name}-tx", acks=-1)
        made.partition(key, "request", topic)
        made.partition(key, "response", topic, offset=500)
        made.add("transactions", 4, transactional_id=f"{name}-tx", timeout_ms=900_000, time_ns=START_NS + 4 * 10**9)
    made.exchange("hung", "EndTxn", 5.2, transactional_id="hung-tx", errors=1)  # refused: the transaction stays open
    made.exchange("ends", "EndTxn", 5.2, transactional_id="ends-tx")
    for number in range(80):
        key = made.exchange("reader", "Fetch", number, records=0, max_wait_ms=500, latency_ns=500 * MS)
        mark = 500 + number * 10
        made.partition(key, "response", "stuck", high_watermark=mark, last_stable_offset=500)
        made.partition(key, "response", "flowing", high_watermark=mark, last_stable_offset=mark - 5)


def resent(made: Made) -> None:
    """`doubling` retries refused batches without a producer id, `exact` with one; `gives-up` does not retry."""
    for client, producer_id in (("doubling", -1), ("exact", 77), ("gives-up", -1)):
        for number in range(5):
            for again in (False, True):
                if again and client == "gives-up":
                    continue
                at_s = 10 + number + again / 2
                key = made.exchange(client, "Produce", at_s, acks=-1)
                batch = {
                    "records": 3,
                    "bytes": 300 + number,
                    "base_timestamp": 1_000_000 + number,
                    "max_timestamp": 1_000_100 + number,
                    "producer_id": producer_id,
                    "codec": "lz4",
                    "magic": 2,
                }
                made.add("batches", **key, direction="request", topic="of-" + client, partition=0, **batch)
                made.partition(key, "request", "of-" + client, bytes=300, records=3)
                error = {} if again else {"error_code": 7, "error": "REQUEST_TIMED_OUT"}
                made.partition(key, "response", "of-" + client, **error)


def network(made: Made) -> None:
    for number, (host, columns) in enumerate(
        (
            ("10.9.0.1", {"retransmissions": 400}),
            ("10.9.0.2", {"retransmissions": 400, "client_bytes": 10**9}),  # of 700,000 segments
            ("10.9.0.3", {"zero_windows": 50}),
            ("10.9.0.4", {"zero_windows": 2, "retransmissions": 5}),
            ("10.9.0.11", _late(30.0)),
            ("10.9.0.12", _late(0.3)),
        )
    ):
        _connection(made, 900 + number, host, 0.0, 60.0, **columns)
    for number in range(100):  # each replaces the previous one
        _connection(made, 1000 + number, "10.9.0.5", number / 2, 0.4)
        _connection(made, 2000 + number, "10.9.0.6", number / 2, 300.0)  # a fleet that starts and stays connected


def _late(seconds: float) -> dict[str, int]:
    late_ns = int(seconds * 1e9)
    return {"late_answers": 1, "late_answer_ns": late_ns, "late_answer_since_ns": START_NS, "late_answer_times": 7}


def connects(made: Made) -> None:
    """`10.9.0.8` reaches no broker, `10.9.0.9` tries a port that is not Kafka's; one connect of `10.9.0.10` fails."""
    nothing = {"client_bytes": 0, "broker_bytes": 0, "requests": 0}
    for number, (host, port, close) in enumerate(
        (
            *[("10.9.0.8", 9092, "refused")] * 2,
            ("10.9.0.8", 9092, "unanswered"),
            *[("10.9.0.9", 8080, "refused")] * 30,
            ("10.9.0.10", 9092, "refused"),
            *[("10.9.0.10", 9092, "fin")] * 5,
        )
    ):
        of_failed = {} if close == "fin" else nothing
        _connection(made, 4000 + number, host, 100.0 + number, 30.0, close=close, broker_port=port, **of_failed)
    # All handshakes of `10.9.0.12` fail, and one of many of `10.9.0.13`.
    alert = "bad_certificate by client"
    for number, (host, tls_failure) in enumerate([("10.9.0.12", alert)] * 4 + [("10.9.0.13", "unanswered")]):
        _connection(made, 4100 + number, host, 130.0 + number, 0.1, tls="tls", tls_failure=tls_failure, requests=0)
    for number in range(4):
        _connection(made, 4110 + number, "10.9.0.13", 140.0 + number, 30.0, tls="tls")
    # One request on which its client gave up is enough.
    lost = {"outcome": "unanswered", "latency_ns": None, "request_end_ns": START_NS + 100 * 10**9, "broker": 1}
    key = made.exchange("waiting", "Metadata", 100, **lost)
    _connection(made, key["connection"], "10.0.0.1", 100.0, 30.0)
    # Or one that still waits when the capture ends; a long poll does not count.
    for client, api in (("stalled", "Metadata"), ("polling", "SyncGroup")):
        key = made.exchange(client, api, 100, **lost)
        _connection(made, key["connection"], "10.0.0.1", 100.0, 0.0, close="open")


def refusals(made: Made) -> None:
    """Each client is refused with a different error, `lucky` only once."""
    for client, error, count in (
        ("zombie", "INVALID_PRODUCER_EPOCH", 5),
        ("huge", "MESSAGE_TOO_LARGE", 12),
        ("lonely", "NOT_ENOUGH_REPLICAS", 20),
        ("broken", "INVALID_RECORD", 4),
        ("late", "REQUEST_TIMED_OUT", 12),
        ("stray", "NOT_LEADER_OR_FOLLOWER", 30),
        ("lucky", "TOPIC_AUTHORIZATION_FAILED", 1),
        ("elected", "NOT_LEADER_OR_FOLLOWER", 5),  # as many as one election causes
    ):
        for number in range(count + 20):
            key = made.exchange(client, "Produce", 100 + number, acks=-1, errors=int(number < count))
            if number < count:
                made.partition(key, "response", "of-" + client, error_code=1, error=error)
    for number in range(8):  # its assignor is none of the others'
        refused = {"errors": 1, "error_code": 23, "error": "INCONSISTENT_GROUP_PROTOCOL"}
        made.exchange("robin", "JoinGroup", 100 + number, group_id="of-ranges", **refused)


def recut(made: Made) -> None:
    """A connection ends with five unanswered requests; their records are sent again in different batches."""
    for number in range(5):
        at_s = 300 + number / 10
        lost = {"outcome": "unanswered", "latency_ns": None, "request_end_ns": START_NS + int(at_s * 1e9)}
        key = made.exchange("cutter", "Produce", at_s, acks=1, **lost)
        _batch(made, key, 10 * number, 10 * number + 9, 10)
    _connection(made, key["connection"], "10.0.0.1", 290.0, 11.0)
    for first, last in ((0, 14), (15, 37), (38, 49)):
        key = made.exchange("cutter", "Produce", 310 + first / 10, broker=2, acks=1)
        _batch(made, key, first, last, last - first + 1)


def _batch(made: Made, key: dict[str, Any], first: int, last: int, records: int) -> None:
    times = {"base_timestamp": 2_000_000 + first, "max_timestamp": 2_000_000 + last}
    same = {"direction": "request", "topic": "of-cutter", "partition": 0, "codec": "lz4", "magic": 2, "producer_id": -1}
    made.add("batches", **key, **same, **times, records=records, bytes=40 * records)
    made.partition(key, "request", "of-cutter", records=records, bytes=40 * records)


def losses(made: Made) -> None:
    """Two partitions of `trusting` lose five and two records; one batch of `retrying` is acknowledged twice.

    `anew` is a topic that was deleted and recreated; responses to `steady` overtake each other.
    """
    for topic, at_s, client, broker, partition, offset, records, acks, batch in (
        ("of-trusting", 350.0, "trusting", 1, 0, 90, 10, 1, 1),
        ("of-trusting", 351.0, "trusting", 1, 0, 100, 5, 1, 2),
        ("of-trusting", 351.0, "trusting", 1, 1, 40, 4, 1, 3),
        ("of-trusting", 351.5, "other", 2, 0, 100, 2, -1, 4),  # smaller than the lost batch
        ("of-trusting", 351.6, "other", 2, 0, 102, 8, -1, 5),
        ("of-trusting", 351.7, "other", 3, 1, 42, 4, -1, 6),
        ("of-retrying", 350.0, "retrying", 1, 0, 100, 5, -1, 7),
        ("of-retrying", 351.0, "retrying", 2, 0, 100, 5, -1, 7),
        *(("of-anew", 350.0 + offset / 10, "anew", 1, 0, offset, 10, -1, 8 + offset) for offset in (0, 10, 20)),
        *(("of-anew", 360.0 + offset / 10, "anew", 1, 0, offset, 10, -1, 90 + offset) for offset in (0, 10, 20)),
        *(("of-steady", 350.0 + at, "steady", 1, 0, offset, 10, -1, offset) for at, offset in enumerate((20, 10, 30))),
    ):
        key = made.exchange(client, "Produce", at_s, broker=broker, acks=acks)
        made.partition(key, "request", topic, partition, bytes=50 * records, records=records)
        made.partition(key, "response", topic, partition, error_code=0, error="NONE", offset=offset)
        known = {"records": records, "bytes": 50 * records, "base_timestamp": 3_000_000 + batch, "producer_id": 9}
        made.add("batches", **key, direction="request", topic=topic, partition=partition, magic=2, **known)


def standstills(made: Made) -> None:
    """A broker is silent for 8 s: `halting` waits, `refused-a-while` is refused for 12 s; `rare` does not write.

    `going` uses another broker, `bad` sends invalid records, `muted` is muted by its quota.
    """

    def write(client: str, at_s: float, took_s: float = 0.002, **columns: Any) -> dict[str, Any]:
        times = {
            "latency_ns": int(took_s * 1e9),
            "response_end_ns": START_NS + round((500 + at_s + took_s) * 1000) * MS,
        }
        return made.exchange(client, "Produce", 500 + at_s, acks=-1, **times, **columns)

    for client in ("halting", "refused-a-while", "rare", "going", "bad", "muted"):
        for number in range(10):
            write(client, number)
    for number in range(30):
        write("going", 10 + number / 2)
        made.partition(write("bad", 10 + number / 2, errors=1, partitions=1), "response", "x", error="INVALID_RECORD")
    for number in range(24):
        key = write("refused-a-while", 10 + number / 2, errors=1, partitions=1)
        made.partition(key, "response", "x", error_code=13, error="NETWORK_EXCEPTION")
    write("refused-a-while", 22)
    write("halting", 10, 8)
    write("muted", 10, 8, muted_ns=7 * 10**9)
    for client in ("halting", "rare", "bad", "muted"):
        write(client, 26)


def doubled(made: Made) -> None:
    """Retries whose outcome follows from offsets: of `twice`, one batch is in the log twice, one once, three reversed.

    `among` has the same retries, and other writers outside the capture, to whom skipped offsets may belong.
    """
    for client, others in (("twice", 0), ("among", 100)):
        for at_s, batch, records, error, offset in (
            (0, 0, 10, None, 0),
            (1.0, 1, 5, "REQUEST_TIMED_OUT", None),
            (1.1, 2, 7, "REQUEST_TIMED_OUT", None),
            *((1.2 + n / 10, 3 + n, 3, "NOT_ENOUGH_REPLICAS", None) for n in range(3)),
            (3.0, 1, 5, None, 15),  # after a gap of five offsets
            (3.1, 2, 7, None, 20),
            *((3.5 - n / 10, 3 + n, 3, None, 33 - 3 * n) for n in (2, 1, 0)),
            (9.0, 9, 4, None, 36 + others),  # long after all failures
        ):
            key = made.exchange(client, "Produce", 600 + at_s, acks=-1)
            topic = f"of-{client}"
            made.partition(key, "request", topic, bytes=20 * records, records=records)
            answer = {"error_code": 0, "offset": offset} if error is None else {"error_code": 7, "error": error}
            made.partition(key, "response", topic, **answer)
            first = 4_000_000 + 100 * batch
            known = {"records": records, "bytes": 20 * records, "base_timestamp": first, "max_timestamp": first + 50}
            made.add("batches", **key, direction="request", topic=topic, partition=0, **known, producer_id=-1, magic=2)


def cluster(made: Made) -> None:
    """Controllers change, a partition has no leader for half a minute, one lacks broker 2, another lacks it for 5 s."""
    for number, broker in enumerate((1, 2, 3, 1, 2)):
        at_s = 200.0 + 10 * number
        row = {"kind": "controller", "change": "active", "broker_id": broker, "time_ns": START_NS + int(at_s * 1e9)}
        made.add("topology", at_s, **row)
    for topic, change, at_s, isr, replicas in (
        ("dark", "offline", 20, [4], [4]),
        ("dark", "elected", 50, [4], [4]),
        ("thin", "isr_shrunk", 20, [1, 3], [1, 2, 3]),
        ("thin", "isr_grown", 60, [1, 2, 3], [1, 2, 3]),
        ("brief", "isr_shrunk", 20, [1, 2], [1, 2, 3]),
        ("brief", "isr_grown", 25, [1, 2, 3], [1, 2, 3]),
    ):
        state = {"topic": topic, "partition": 0, "change": change, "isr": isr, "replicas": replicas}
        made.add("leadership", at_s, **state, time_ns=START_NS + at_s * 10**9)
    for number in range(30):
        _connection(made, 3000 + number, "10.9.0.7", 400 + number / 10, 0.05, requests=0)
        _connection(made, 4000 + number, "10.9.0.14", 400 + number / 10, 0.05, requests=0, client_bytes=0)  # probes


def _connection(made: Made, number: int, host: str, at_s: float, life_s: float, **columns: Any) -> None:
    start_ns = START_NS + int(at_s * 1e9)
    made.add(
        "connections",
        at_s,
        **{
            "connection": number,
            "start_ns": start_ns,
            "end_ns": start_ns + int(life_s * 1e9),
            "client_address": host,
            "broker_address": "10.0.1.1",
            "broker_port": 9092,
            "client_bytes": 10**6,
            "broker_bytes": 10**6,
            "requests": 10,
            "retransmissions": 0,
            "zero_windows": 0,
            "start_seen": True,
            "close": "fin",
        }
        | columns,
    )


APART_S = 5 * 3600.0


def two_captures(place: Path) -> Path:
    """Two captures of two minutes, hours apart; the second one also has the log of coordinators, with its history.

    `restless-g` rebalances in both, `log-g` did so long before. The lag of `slow` grows in both, that of `behind`
    between them.
    """
    made = Made()
    for capture, begin_s in enumerate((0.0, APART_S)):
        for number in range(40):
            made.exchange("member", "Heartbeat", begin_s + 3 * number, group_id="restless-g")
            for client, lag in (("slow", (40 * capture + number) * 100), ("behind", 100_000 * capture)):
                key = made.exchange(client, "Fetch", begin_s + 3 * number, records=1, max_wait_ms=500)
                made.partition(key, "response", "orders", lag_records=lag, records=1)
        for number in range(8):
            _rebalance(made, "restless-g", begin_s + 15 * number, 8 * capture + number)
    for number in range(50):
        _rebalance(made, "log-g", -86_400.0 + 3600 * number / 2, number)
    return made.write(place)


def _rebalance(made: Made, group: str, at_s: float, generation: int) -> None:
    at_ns = START_NS + int(at_s * 1e9)
    known = {"group_id": group, "protocol": "classic", "strategy": "range", "generation": generation}
    known |= {"cause": "session_expired", "members_before": 2, "members_after": 2, "started_ns": at_ns}
    made.add("rebalances", at_s, **known, joined_ns=at_ns + 10**9, ended_ns=at_ns + 3 * 10**9)


PROVOKED = {
    ("empty_fetches", "client poller"),
    ("tiny_fetches", "client nibbler"),
    ("commit_storm", "group anxious-g"),
    ("hot_broker", "broker 7 (10.0.1.7:9092)"),
    ("slow_broker", "broker 8 (10.0.1.8:9092)"),
    ("hot_partition", "topic lopsided, partition 2"),
    ("stopped_fetching", "client hangs, group hangs-g"),
    ("growing_lag", "client late, topic orders"),
    ("open_transaction", "transactional id hung-tx, client hung"),
    ("stuck_stable_offset", "topic stuck, partition 0"),
    ("resent_not_idempotent", "client doubling, topic of-doubling"),
    ("doubtful_records", "client gives-up, topic of-gives-up"),
    ("records_lost", "client trusting, topic of-trusting"),
    ("producers_standing_still", "client halting, client refused-a-while"),
    ("resent_not_idempotent", "client twice, topic of-twice"),
    ("doubtful_records", "client among, topic of-among"),
    ("fenced", "client zombie, Produce, topic of-zombie"),
    ("refused_too_large", "client huge, Produce, topic of-huge"),
    ("not_enough_replicas", "client lonely, Produce, topic of-lonely"),
    ("refused_records", "client broken, Produce, topic of-broken"),
    ("refused_members", "client robin, JoinGroup, group of-ranges"),
    ("timed_out", "client late, Produce, topic of-late"),
    ("no_leader", "client stray, Produce, topic of-stray"),
    ("unanswered", "client cutter, broker 1 (10.0.1.1:9092)"),
    ("unanswered", "client stalled, broker 1 (10.0.1.1:9092)"),
    ("client_timeouts", "client waiting, broker 1 (10.0.1.1:9092)"),
    ("connects_failed", "host 10.9.0.8, broker 1 (10.0.1.1:9092)"),
    ("connects_failed", "host 10.9.0.10, broker 1 (10.0.1.1:9092)"),
    ("tls_failed", "host 10.9.0.12, broker 1 (10.0.1.1:9092)"),
    ("tls_failed", "host 10.9.0.13, broker 1 (10.0.1.1:9092)"),
    ("late_answers", "host 10.9.0.11, broker 1 (10.0.1.1:9092)"),
    ("controller_changes", "the controller"),
    ("offline_partitions", "topic dark"),
    ("no_broker_may_stop", "topic dark"),
    ("under_replicated", "broker 2"),
    ("reconnect_storm", "client 10.9.0.7, broker 1 (10.0.1.1:9092)"),
    ("retransmissions", "10.9.0.1 and 10.0.1.1:9092"),
    ("zero_windows", "10.9.0.3 and 10.0.1.1:9092"),
    ("connection_churn", "client 10.9.0.5"),
}


def ask(made: Made, client: str, broker: int, at_s: float, took_s: float, **columns: Any) -> None:
    """A request that is answered `took_s` later."""
    asked_ns = START_NS + round(at_s * 1e9)
    answered_ns = asked_ns + round(took_s * 1e9)
    times = {"request_start_ns": asked_ns, "request_end_ns": asked_ns}
    times |= {"response_start_ns": answered_ns, "response_end_ns": answered_ns}
    made.exchange(client, at_s=at_s, broker=broker, latency_ns=answered_ns - asked_ns, **times, **columns)


def pause(
    made: Made,
    paused_s: float,
    *,
    clients: int = 3,
    answered: str | None = None,
    paused: tuple[int, ...] = (2,),
    after_s: float = 0,
    **columns: Any,
) -> None:
    """Clients send to brokers 1 and 2 every 0.2 s; from the tenth second on, paused ones are silent, then answer all.

    after_s: offset of all times. answered: "one by one" after the pause, or "at any time" to another client.

    A writer with acks=all at broker 1 waits for its replica meanwhile, and is slow only for that reason.
    """
    columns = {"api": "Metadata", **columns}
    for number in range(300):
        at_s = number / 5
        is_held = 10 <= at_s < 10.2
        for broker in (1, 2):
            for client in range(clients):
                took_s = 10 + paused_s - at_s if is_held and broker in paused else 0.002
                if answered == "one by one" and is_held:
                    took_s += 0.6 * client
                if broker in paused and 10.2 <= at_s < 10 + paused_s:
                    continue  # the clients have a request in flight
                ask(made, f"app-{client}", broker, after_s + at_s, took_s, **columns)
        if answered == "at any time":
            ask(made, "other", 2, after_s + at_s, 0.002, api="Metadata")
        took_s = max(0.002, 10 + paused_s - at_s) if 10 <= at_s < 10 + paused_s else 0.002
        for _ in range(8):
            ask(made, "writer", 1, after_s + at_s, took_s, api="Produce", acks=-1)


def pause_of_follower(
    made: Made,
    *,
    paused_s: float = 2.1,
    leaders: tuple[int, ...] = (1, 3),
    slow: str | None = None,
    apart_s: float = 0,
    replicas: tuple[tuple[int, ...], ...] = ((1, 2, 3), (3, 1, 2)),
    after_s: float = 0,
) -> None:
    """Writes with acks=all at these leaders wait from the tenth second on; brokers 1 and 3 answer all else at once.

    slow: another API that waits at broker 3 too. apart_s: delay of broker 3's acknowledgements. replicas: those of one
    partition of broker 1 and one of broker 3; () if no Metadata has them. after_s: offset of all times.
    """
    for number in range(150):
        at_s = number / 5
        is_held = 10 <= at_s < 10 + paused_s
        for partition, broker in enumerate((1, 3)):
            waits_s = max(0.002, 10 + paused_s - at_s + apart_s * partition) if is_held else 0.002
            for client in ("writer", "other"):
                took_s = waits_s if broker in leaders else 0.002
                ask(made, client, broker, after_s + at_s, took_s, api="Produce", acks=-1)
                key = {name: made.rows["exchanges"][-1][name] for name in ("api", "connection", "number")}
                made.partition({**key, "at_s": after_s + at_s}, "request", "orders", partition)
            for client, api, columns in (("trusting", "Produce", {"acks": 1}), ("reader", "Fetch", {"max_wait_ms": 0})):
                took_s = waits_s if (api, broker) == (slow, 3) else 0.002
                ask(made, client, broker, after_s + at_s, took_s, api=api, **columns)
    for partition, each in enumerate(replicas):
        state = {"leader": each[0], "isr": each, "replicas": each, "change": "created", "time_ns": START_NS}
        made.add("leadership", 0, topic="orders", partition=partition, **state)
    for broker in (1, 2, 3, 4):
        made.add("topology", 0, kind="broker", change="appeared", broker_id=broker, time_ns=START_NS)


def absence(
    made: Made,
    named: Sequence[tuple[str, float]],
    tried_s: float | None,
    served_s: float | None,
    *,
    is_in_sync: bool,
) -> None:
    """Broker 2 has a replica of each topic, and the only one of `lone`.

    named: changes of broker 2 in Metadata, with their times. tried_s: time of a failed connect to it. served_s: time of
    a request that it answers.
    """
    for number in range(401):
        at_ns = START_NS + number * 100 * MS
        made.exchange("app", "Metadata", number / 10, response_start_ns=at_ns, response_end_ns=at_ns)
    if served_s is not None:
        at_ns = START_NS + round(served_s * 10**9)
        made.exchange("app", "Metadata", served_s, broker=2, response_start_ns=at_ns, response_end_ns=at_ns)
    for change, at_s in (*named, ("appeared", 0.5)):
        broker = 2 if (change, at_s) in named else 1
        made.add("topology", at_s, kind="broker", change=change, broker_id=broker, time_ns=START_NS + int(at_s * 10**9))
    if tried_s is not None:
        at = {"start_ns": START_NS + round(tried_s * 10**9), "client_address": "10.0.0.1", "close": "refused"}
        for number in range(9):
            made.add(
                "connections",
                tried_s,
                connection=900 + number,
                broker_address="10.0.1.2",
                broker_port=9092,
                broker_id=2,
                **at,
            )
    for topic, replicas in (("orders", [1, 2]), ("lone", [2])):
        isr = replicas if is_in_sync else [each for each in replicas if each != 2]
        leader = isr[0] if isr else None
        change = "created" if isr else "offline"
        told = {"leader": leader, "isr": isr, "replicas": replicas, "change": change, "time_ns": START_NS + 10**9}
        made.add("leadership", 1, topic=topic, partition=0, **told)
