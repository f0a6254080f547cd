"""The coordinators' logs, as replicas fetch them: read alone, they give what the official tools reported."""

import random
from functools import cache

import pytest

from kproxy.capture.quality import Quality
from kproxy.convert.job import Job
from kproxy.convert.kept_frames import KEPT_FRAMES
from kproxy.convert.rows import Rows
from kproxy.insight.decoded import decode_exchange
from kproxy.insight.knowledge import Knowledge
from kproxy.insight.logs import coordinator_logs, read_ranges
from kproxy.insight.logs.coordinator_logs import LOGS, OFFSETS, TRANSACTIONS, CoordinatorLogs, Logged
from kproxy.insight.rows import TABLES, Assignment, CommittedOffset, GroupEvent, Rebalance, Transaction
from kproxy.protocol import codec
from kproxy.protocol.apis import FETCH
from kproxy.protocol.records import Record, write_batch
from kproxy.tables import schema
from kproxy.tables.knowledge import KnowledgeColumns
from kproxy.wire.bodies import BATCHES
from tests import captures
from tests.knowledge.recorded import DATA
from tests.knowledge.truth import Run

SECOND = 10**9
KEY = ("connection", "number", "topic", "partition")
COMMIT = [*KEY, "api", "direction", "offset", "error_code"]


@cache
def inputs_of(path, ports=()):
    """The inputs of insight from a capture, in order of time: (record of a log or exchange, names of topics)."""
    found = []

    def add(table, batch):
        if table is KEPT_FRAMES:
            found.extend(batch.to_pylist())

    rows = Rows(add, keeps=True)
    for _ in rows.read(Job("c", (str(path),), "c", ports, detail=BATCHES), Quality()):
        pass
    names = rows.names.topics
    ordered = []
    for each in sorted(found, key=lambda row: (row["at_ns"], row["connection"], row["number"])):
        if each["api_key"] == FETCH:
            topic = each["topic"] or names.get(each["topic_id"])
            if topic in LOGS:
                ordered.append(
                    Logged(
                        each["at_ns"],
                        topic,
                        each["partition"],
                        each["response"],
                        each["broker_id"],
                        each["connection"],
                        each["number"],
                    )
                )
            continue
        exchange = decode_exchange(
            *(each[name] for name in ("api_key", "api_version", "request", "response", "request_end", "response_start"))
        )
        if exchange is not None:
            ordered.append(exchange)
    return ordered


def commits(path, ports):
    """(API, topic, partition, offset) of each successful commit on the wire."""
    found = []

    def add(table, batch):
        if table is schema.PARTITIONS:
            found.extend(batch.select(COMMIT).to_pylist())

    for _ in Rows(add).read(Job("c", (str(path),), "c", ports, detail=BATCHES), Quality()):
        pass
    answered = {tuple(row[name] for name in KEY): row["error_code"] for row in found if row["direction"] == "response"}
    return [
        (row["api"], row["topic"], row["partition"], row["offset"])
        for row in found
        if row["direction"] == "request"
        and row["api"] in ("OffsetCommit", "TxnOffsetCommit")
        and answered.get(tuple(row[name] for name in KEY)) == 0
    ]


def time_ns_of(each):
    return each.at_ns if isinstance(each, Logged) else each.response_start or each.request_end


def known_of(path, *, wire, log, ports=()):
    known = Knowledge("c")
    rows = []
    for each in inputs_of(path, ports):
        if isinstance(each, Logged):
            rows += known.feed_log(each) if log else ()
        elif wire or each.api_key in (3, 75):  # for the names of topics
            rows += known.feed(each)
    rows += known.finish()
    return known, rows


@pytest.mark.parametrize("name", ("members", "epochs"))
def test_the_logs_alone_give_what_each_describe_reported(name):
    """Members, their partitions, the strategy of their generation, and their committed offsets."""
    run = Run(DATA / name)
    known, committed = Knowledge("c"), {}
    waiting = list(inputs_of(DATA / name / "traffic.pcap.zst"))
    compared = offsets = 0
    for described in run.described:
        while waiting and time_ns_of(waiting[0]) < described.from_ns:
            each = waiting.pop(0)
            if isinstance(each, Logged):
                rows = known.feed_log(each)
            elif each.api_key == 3:
                rows = known.feed(each)
            else:
                continue
            for row in rows:
                if isinstance(row, CommittedOffset) and row.change in ("committed", "removed"):
                    committed[row.group_id, row.topic, row.partition] = row.offset
        for _ in known.due(None):
            pass
        changing = {
            group
            for each in waiting
            if time_ns_of(each) < described.to_ns + 2 * SECOND and not isinstance(each, Logged)
            for group in (each.request.get("groupId"),)
            if group is not None
        }
        for group_id, (state, members, _, strategy) in described.states.items():
            group = next((each for each in known.groups if each.group_id == group_id and each.members), None)
            if state != "Stable" or group is None or group_id in changing:
                continue
            assert len(group.members) == members, (group_id, described.from_ns)
            assert not strategy or group.strategy in (strategy, None)
            owned = {member.id: member.owned for member in group.members.values()}
            assert owned == described.owned.get(group_id, owned), group_id
            compared += 1
        for key, (offset, _) in described.offsets.items():
            if key[0] not in changing and key in committed:
                assert committed[key] is not None and committed[key] <= offset
                offsets += committed[key] == offset
    assert compared >= 3 and offsets > 10


def test_with_the_wire_and_the_logs_nothing_is_reported_twice():
    """Every successful commit on the wire is one row; a generation seen on the wire has no second row."""
    path, ports = captures.capture("k41_java_cluster"), (9091, 9092, 9093)
    _, wire = known_of(path, wire=True, log=False, ports=ports)
    _, both = known_of(path, wire=True, log=True, ports=ports)
    _, alone = known_of(path, wire=False, log=True, ports=ports)

    def generations(rows):
        return sorted(
            (row.group_id, row.generation, row.strategy, row.members_before, row.members_after)
            for row in rows
            if isinstance(row, Rebalance)
        )

    def assigned(rows):
        return sorted(row[2:-1] for row in rows if isinstance(row, Assignment))

    # The log has assignments that the wire lacks: in two generations the members left first.
    complete = [row for row in wire if not isinstance(row, Rebalance) or row.ended_ns is not None]
    assert generations(both) == generations(wire) and len(generations(wire)) == 11
    assert generations(alone) == generations(complete) and len(generations(complete)) == 9
    assert assigned(both) == assigned(wire)
    assert {row[:-2] for row in assigned(alone)} == {row[:-2] for row in assigned(wire)}
    stored = [row for row in both if isinstance(row, GroupEvent) and row.event == "stored"]
    assert {(row.group_id, row.generation) for row in stored if not row.reason.startswith("Empty")} == {
        row[:2] for row in generations(complete)
    }
    ended = []
    for each in inputs_of(path, ports):
        if not isinstance(each, Logged) and each.api_key == 26 and not each.response["errorCode"]:
            kind = "Commit" if each.request["committed"] else "Abort"
            ended.append((each.request["transactionalId"], f"Complete{kind}"))
    committed = commits(path, ports)
    in_transactions = sum(api == "TxnOffsetCommit" for api, *_ in committed)
    rows = [row for row in both if isinstance(row, CommittedOffset)]
    group_fields = [
        row[3:6] for row in rows if row.change == "pending" or (row.change == "committed" and row.producer_id is None)
    ]
    assert sorted(group_fields) == sorted(each[1:] for each in committed) and len(group_fields) > 100
    assert (
        sum(row.change in ("committed", "aborted") and row.producer_id is not None for row in rows) == in_transactions
    )
    transactions = [row for row in both if isinstance(row, Transaction) and row.log_offset is not None]
    completed = [(row.transactional_id, row.state) for row in transactions if row.state.startswith("Complete")]
    assert sorted(completed) == sorted(ended) and len(ended) > 10
    assert {row.partitions for row in transactions if row.state == "Ongoing"} >= {"beta-1"}


def commit(offset, base, *, epoch=0, **of_batch):
    key = codec.encode_data("OffsetCommitKey", 0, {"group": "g", "topic": "t", "partition": 0})
    value = codec.encode_data("OffsetCommitValue", 3, {"offset": offset, "metadata": ""})
    batch = bytearray(write_batch([Record(base, 1000 + base, key, value)], **of_batch))
    batch[12:16] = epoch.to_bytes(4, "big")  # the leader epoch, which the checksum does not cover
    return Logged(base, OFFSETS, 0, bytes(batch))


def offsets(logs, *batches):
    return [row.offset for batch in batches for row in logs.feed(batch)]


def test_each_record_is_reported_once_whoever_fetches_it_and_from_where():
    logs = CoordinatorLogs("c")
    assert offsets(logs, *(commit(base, base) for base in (5, 6, 6, 5, 7))) == [5, 6, 7]
    # history first, then newer records
    assert offsets(logs, *(commit(base, base) for base in (0, 1, 6, 1, 4, 5, 8))) == [0, 1, 4, 8]
    assert offsets(logs, commit(80, 8, epoch=1), commit(8, 8), commit(80, 8, epoch=1)) == [
        80
    ]  # another leader had a shorter log


def ended(base, producer, kind=1):
    of_batch = {"producer_id": producer, "producer_epoch": 0, "is_transactional": True}
    marker = Record(base, 1000 + base, b"\0\0\0" + bytes([kind]), bytes(6))
    return Logged(base, OFFSETS, 0, write_batch([marker], is_control=True, **of_batch))


def test_a_marker_ends_nothing_before_a_gap():
    """The first transaction was aborted, and its marker at offset 1 is lost: the second marker commits only the
    second."""
    of_batch = {"producer_id": 7, "producer_epoch": 0, "is_transactional": True}
    logs = CoordinatorLogs("c")
    talk = [commit(10, 0, **of_batch), commit(20, 2, **of_batch), ended(3, 7)]
    changes = [(row.offset, row.change) for each in talk for row in logs.feed(each)]
    assert changes == [(10, "pending"), (20, "pending"), (20, "committed")]
    late = list(logs.feed(ended(1, 7, kind=0)))  # another replica fetches it later
    assert [(row.offset, row.change, row.log_offset) for row in late] == [(10, "aborted", 1)]
    assert logs.left_out == 0


def test_pending_records_are_bounded_in_bytes(monkeypatch):
    """Each generation of a group with many members is a large record."""
    monkeypatch.setattr(coordinator_logs, "WAITING_BYTES", 100_000)
    member = dict.fromkeys(("memberId", "groupInstanceId", "clientId", "clientHost"), "m")
    member |= {"rebalanceTimeout": 1, "sessionTimeout": 1, "subscription": b"", "assignment": b"x" * 30_000}
    group_fields = {"protocolType": "consumer", "generation": 1, "protocol": "range", "leader": "m"}
    value = codec.encode_data("GroupMetadataValue", 3, group_fields | {"currentStateTimestamp": 1, "members": [member]})
    key = codec.encode_data("GroupMetadataKey", 0, {"group": "g"})
    logs = CoordinatorLogs("c")
    due = []
    for base in range(10):
        list(logs.feed(Logged(base, OFFSETS, 0, write_batch([Record(base, 1000, key, value)]))))
        due += [entry.offset for entry in logs.due(base)]
    assert due == list(range(7))  # three of them are pending
    assert [entry.offset for entry in logs.due(10 * SECOND)] == [7, 8, 9]
    assert not list(logs.due(None))


def test_unfinished_transactions_are_dropped_for_others(monkeypatch):
    monkeypatch.setattr(read_ranges, "MAX_PENDING", 10)
    logs = CoordinatorLogs("c")
    changes = []
    for number in range(30):
        of_batch = {"producer_id": number, "producer_epoch": 0, "is_transactional": True}
        changes += [row.change for row in logs.feed(commit(number, 2 * number, **of_batch))]
        if number >= 20:
            marker = Record(2 * number + 1, 1000, b"\0\0\0\1", bytes(6))
            ended = write_batch([marker], is_control=True, **of_batch)
            changes += [row.change for row in logs.feed(Logged(number, OFFSETS, 0, ended))]
    assert changes.count("pending") == 30
    assert changes.count("committed") == 10 and logs.left_out == 11


FAR = (1 << 63) - 1


def in_tables(rows):
    """The values of the rows in their tables."""
    columns = KnowledgeColumns()
    for row in rows:
        columns.append(TABLES[type(row)], "c", row)
    return [row for _, batch in columns.batches() for row in batch.to_pylist()]


@pytest.mark.parametrize("far", (FAR, FAR // 10**6 + 1, -(1 << 63)))
def test_times_beyond_the_columns_range_are_null(far):
    """Clients choose some of these times: OffsetCommit had a timestamp and a retention time."""
    key = codec.encode_data("OffsetCommitKey", 0, {"group": "g", "topic": "t", "partition": 0})
    value = {"offset": 5, "metadata": "", "commitTimestamp": far, "expireTimestamp": far}
    record = Record(1, far, key, codec.encode_data("OffsetCommitValue", 1, value))
    (row,) = in_tables(CoordinatorLogs("c").feed(Logged(7000, OFFSETS, 0, write_batch([record]))))
    assert (row["time_ns"], row["expires_ns"], row["offset"]) == (7000, None, 5)

    state = {"producerId": 1, "producerEpoch": 0, "transactionTimeoutMs": 1, "transactionStatus": 1}
    state |= {"transactionPartitions": [], "transactionLastUpdateTimestampMs": far, "transactionStartTimestampMs": far}
    key = codec.encode_data("TransactionLogKey", 0, {"transactionalId": "x"})
    record = Record(1, 3, key, codec.encode_data("TransactionLogValue", 0, state))
    (row,) = in_tables(CoordinatorLogs("c").feed(Logged(7000, TRANSACTIONS, 0, write_batch([record]))))
    assert (row["time_ns"], row["started_ns"]) == (3_000_000, None)

    group_fields = {"protocolType": "consumer", "generation": 1, "protocol": "range", "leader": "m"}
    member = dict.fromkeys(("memberId", "groupInstanceId", "clientId", "clientHost"), "m")
    member |= {"rebalanceTimeout": 1, "sessionTimeout": 1, "subscription": b"", "assignment": b""}
    value = codec.encode_data(
        "GroupMetadataValue", 3, group_fields | {"currentStateTimestamp": far, "members": [member]}
    )
    record = Record(1, 3, codec.encode_data("GroupMetadataKey", 0, {"group": "g"}), value)
    known = Knowledge("c")
    rows = in_tables([*known.feed_log(Logged(7000, OFFSETS, 0, write_batch([record]))), *known.finish()])
    assert [row["started_ns"] for row in rows if "cause" in row] == [3_000_000]


def test_unreadable_records_are_counted():
    logs = CoordinatorLogs("c")
    dice = random.Random(5)
    for number in range(500):
        batch = bytearray(commit(number, number).batch)
        for _ in range(dice.randrange(1, 4)):
            batch[dice.randrange(len(batch))] = dice.randrange(256)
        in_tables(logs.feed(Logged(number, dice.choice(LOGS), dice.randrange(-1, 3), bytes(batch))))
        list(logs.feed(Logged(number, OFFSETS, 0, dice.randbytes(dice.randrange(100)))))
        list(logs.due(number))
    assert logs.left_out > 300
