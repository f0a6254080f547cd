"""Deleted topics, expired members, moved leaders and aborted transactions are one finding each, with the cause."""

import pytest

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import findings
from kproxy.analysis.verdict import verdict
from kproxy.views.findings import sentence
from kproxy.views.verdict import sentence as verdict_of
from tests.analysis.findings import made

NS = 10**9


def ns(at_s: float) -> int:
    return made.START_NS + round(at_s * NS)


def asked(table: made.Made, tmp_path, kinds=None):
    with Tables(table.write(tmp_path / "tables")) as tables:
        found = findings(tables, kinds=kinds)
        return found, verdict_of(verdict(tables, found))


def written(table: made.Made, client: str, topic: str, at_s: float, error: str = "NONE") -> None:
    code = 0 if error == "NONE" else 3
    times = {"request_end_ns": ns(at_s), "response_start_ns": ns(at_s) + 1000, "response_end_ns": ns(at_s) + 1000}
    key = table.exchange(client, "Produce", at_s, errors=min(code, 1), acks=-1, partitions=1, **times)
    table.partition(key, "response", topic, error=error, error_code=code)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("is_used", "refused", "is_found"), [(True, 9, True), (False, 9, False), (True, 0, False)])
def test_the_deletion_of_a_topic_in_use_explains_errors_of_its_clients(tmp_path, is_used, refused, is_found):
    table = made.Made()
    for number in range(20):
        if is_used:
            written(table, "writer", "doomed", number / 2)
        written(table, "other", "kept", number / 2)
    for number in range(refused):
        written(table, "writer", "doomed", 10.5 + number / 2, "UNKNOWN_TOPIC_OR_PARTITION")
    table.add("topology", 10.6, kind="topic", change="gone", topic="doomed", time_ns=ns(10.6))
    change = {"api": "DeleteTopics", "resource_type": "topic", "resource_name": "doomed", "time_ns": ns(10.2)}
    table.add("changes", 10.2, **change, client_id="admin", client_address="10.0.0.9", answered=True)
    found, told = asked(table, tmp_path)
    assert [one.kind for one in found if "doomed" in one.where] == (
        ["topic_deleted"] if is_found else ["unknown_topic"] if refused else []
    )
    if is_found:
        (one,) = [each for each in found if each.kind == "topic_deleted"]
        assert "unknown_topic" in {each.kind for each in one.consequences} and one.since_ns == ns(10.2)
        assert sentence(one).endswith("; deleted by client admin, host 10.0.0.9")
        assert told.startswith("Topic doomed was deleted while one client used it: ") and "9 requests failed" in told


def member(
    table: made.Made,
    group: str,
    until_s: float,
    back_s: float | None = None,
    ends_s: float | None = None,
    session_s: float = 10,
):
    """A member that sends a heartbeat every three seconds, until its session expires."""
    beats = [at for at in range(0, 60, 3) if at <= until_s or (back_s is not None and at >= back_s)]
    key = {}
    for at_s in beats:
        key = table.exchange(group, "Heartbeat", at_s, group_id=group, request_end_ns=ns(at_s))
    known = {"group_id": group, "member_id": f"{group}-1", "client_id": group, "client_address": "10.0.0.1"}
    table.add("group_events", 0, **known, event="join", time_ns=ns(0), connection=key["connection"], number=0)
    row = {"group_id": group, "protocol": "classic", "generation": 2, "cause": "session_expired"}
    expired_s = until_s + session_s
    table.add("rebalances", expired_s, **row, cause_member=f"{group}-1", started_ns=ns(expired_s))
    row = {"connection": key["connection"], "start_ns": ns(0), "start_seen": True}
    over = {"end_ns": ns(60), "close": "open"} if ends_s is None else {"end_ns": ns(ends_s), "close": "fin"}
    table.add("connections", 0, **row, **over)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"until_s": 12, "back_s": 30}, "its process or its host stood still"),
        ({"until_s": 12, "ends_s": 12.5}, "its connection had ended without LeaveGroup"),
        ({"until_s": 12}, "it was not heard of again"),
    ],
)
def test_an_expired_session_is_reported_with_the_fate_of_its_member(tmp_path, times, said):
    table = made.Made()
    member(table, "g", **times)
    (one,), told = asked(table, tmp_path, ["session_expired"])
    assert (one.where, one.since_ns, one.until_ns) == ("group g, client g", ns(12), ns(22))
    assert said in sentence(one) and dict(one.evidence)["silent_ns"] == 10 * NS
    assert told.startswith("Group g, client g: 1 member sent nothing for 10.0 s")


@pytest.mark.parametrize(("session_s", "severity"), [(6, "note"), (45, "warning"), (60, "critical")])
def test_the_severity_of_an_expired_session_follows_the_time_without_a_reader(tmp_path, session_s, severity):
    """The partitions of a killed consumer have no reader for session.timeout.ms, 45 s by default."""
    table = made.Made()
    member(table, "g", until_s=12, ends_s=12.5, session_s=session_s)
    (one,), _ = asked(table, tmp_path, ["session_expired"])
    assert (one.severity, dict(one.evidence)["silent_ns"]) == (severity, session_s * NS)


def led(
    table: made.Made, at_s: float, leader: int, isr: list[int], partition: int = 0, change: str = "elected"
) -> None:
    row = {"topic": "orders", "partition": partition, "leader": leader, "isr": isr, "replicas": [1, 2]}
    table.add("leadership", at_s, **row, change=change, time_ns=ns(at_s))


@pytest.mark.parametrize(
    ("after", "is_found"),
    [
        ([(20, 1, [1]), (30, 1, [1, 2])], True),
        ([(20, 1, [1])], False),  # broker 2 is still away
        ([(20, 1, [1]), (30, 1, [1, 2]), (40, 2, [1, 2])], False),  # leadership moved back
        ([(20, 1, [1, 2])], False),  # an operator moved it
    ],
)
def test_leaders_that_do_not_move_back_are_reported_with_the_current_leaders(tmp_path, after, is_found):
    table = made.Made()
    for partition in range(3):
        led(table, 1, 2, [1, 2], partition, "created")
        for at_s, leader, isr in after:
            led(table, at_s, leader, isr, partition)
    led(table, 1, 1, [1, 2], 3, "created")
    found, _ = asked(table, tmp_path, ["leaders_away"])
    assert [(one.where, one.severity) for one in found] == ([("broker 2", "note")] if is_found else [])
    if is_found:
        assert sentence(found[0]).startswith(
            "3 of 3 partitions that it led have another leader since it was away, though it is in sync again; "
            "partitions are led 4 by broker 1"
        )


@pytest.mark.parametrize("is_same", [True, False])
def test_members_that_leave_and_rejoin_over_one_connection_have_polled_too_late(tmp_path, is_same):
    """Two processes in turn; with new connections, the consumers were closed and created again."""
    table = made.Made()
    for number in range(12):
        at_s = 10 * number
        name = f"m-{number}"
        known = {"group_id": "g", "member_id": name, "client_id": f"c-{number % 2}", "protocol": "classic"}
        link = {"connection": number % 2 if is_same else number, "number": number}
        table.add("group_events", at_s, **known, **link, event="join", time_ns=ns(at_s))
        table.add("group_events", at_s + 12, **known, **link, event="leave", time_ns=ns(at_s + 12))
        table.exchange(f"c-{number % 2}", "Heartbeat", at_s, group_id="g")
        row = {"group_id": "g", "protocol": "classic", "generation": number, "cause": "member_joined"}
        row |= {"cause_member": name, "members_before": 1, "members_after": 1, "started_ns": ns(at_s)}
        table.add("rebalances", at_s, **row, joined_ns=ns(at_s + 4), ended_ns=ns(at_s + 4))
    (one,), _ = asked(table, tmp_path, ["rebalance_storm"])
    assert ("max.poll.records" in one.change) == is_same
    assert dict(one.evidence).get("returned") == (10 if is_same else None)


@pytest.mark.parametrize(("held_s", "is_found"), [(15, True), (5, False)])
def test_an_aborted_transaction_explains_a_stuck_last_stable_offset(tmp_path, held_s, is_found):
    """It ends long before the tables do; the last stable offset was stuck as long as it was open."""
    table = made.Made()
    key = table.exchange("forgetful", "Produce", 1, transactional_id="tx", acks=-1)
    table.partition(key, "request", "ledger")
    table.partition(key, "response", "ledger", offset=100, error_code=0)
    for number in range(60):
        at_s = 2 + number
        marks = {
            "high_watermark": 110 + 10 * number,
            "last_stable_offset": 100 if number <= held_s else 105 + 10 * number,
        }
        table.partition(table.exchange("reader", "Fetch", at_s), "response", "ledger", **marks)
        table.rows["partitions"][-1] |= {"time": table.rows["exchanges"][-1]["time"], "api": "Fetch"}
    for row in table.rows["partitions"]:
        row.setdefault("time", table.rows["exchanges"][0]["time"])
    found, _ = asked(table, tmp_path, ["open_transaction", "stuck_stable_offset"])
    assert [one.kind for one in found] == (["open_transaction"] if is_found else [])
    if is_found:
        (one,) = found
        assert [each.kind for each in one.consequences] == ["stuck_stable_offset"]
        assert sentence(one).startswith(f"open for {held_s + 1}.0 s until its coordinator aborted it")
        assert dict(one.consequences[0].evidence)["stuck_ns"] == held_s * NS


def test_a_single_fencing_of_a_transactional_producer_is_found(tmp_path):
    table = made.Made()
    for client, api, more in (("zombie", "AddPartitionsToTxn", {}), ("plain", "Produce", {})):
        table.exchange(client, api, 1, errors=1, error_code=47, error="INVALID_PRODUCER_EPOCH", **more)
    found, _ = asked(table, tmp_path, ["fenced"])
    assert [one.where for one in found] == ["client zombie, AddPartitionsToTxn"]


@pytest.mark.parametrize(("error", "said"), [("NOT_LEADER_OR_FOLLOWER", True), ("MESSAGE_TOO_LARGE", False)])
def test_the_verdict_mentions_that_clients_retry_failed_requests(tmp_path, error, said):
    table = made.Made()
    for number in range(20):
        written(table, "writer", "orders", number, error if number < 2 else "NONE")
    _, told = asked(table, tmp_path)
    assert told.startswith("2 of 20 requests failed")
    assert ("which clients send again by themselves, as when leaders move" in told) == said


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_request_behind_a_write_on_its_connection_waits_for_the_same_broker(tmp_path, is_behind):
    """Broker 2 is gone; at broker 1, a write waits for its replica, and a later Metadata waits behind the write."""
    table = made.Made()
    lost = {"outcome": "unanswered", "latency_ns": None, "response_start_ns": None, "response_end_ns": None}
    for number in range(400):
        at_s = number / 10
        times = {"request_end_ns": ns(at_s), "response_start_ns": ns(at_s) + 10**6, "response_end_ns": ns(at_s) + 10**6}
        table.exchange("other", "Metadata", at_s, broker=1, **times)
        table.exchange("other", "Metadata", at_s, broker=3, **times)
        if not 19.5 <= at_s < 33:
            table.exchange("other", "Produce", at_s, broker=2, acks=1, **times)
        elif at_s < 20:
            table.exchange("other", "Produce", at_s, broker=2, acks=1, **(times | lost))
    for api in ("Produce", "Metadata") if is_behind else ("Metadata",):
        table.exchange("strict", api, 21, broker=1, acks=-1, **(lost | {"request_end_ns": ns(21)}))
    table.exchange("strict", "Metadata", 39, broker=3)
    ends = {("other", 1): 40, ("other", 2): 20, ("other", 3): 40, ("strict", 1): 30, ("strict", 3): 40}
    for (client, broker), end_s in ends.items():
        row = {"connection": table._connections[client, broker], "start_ns": ns(0), "end_ns": ns(end_s), "close": "fin"}
        row |= {"client_address": "10.0.0.1", "broker_address": f"10.0.1.{broker}", "broker_port": 9092}
        table.add("connections", 0, **row, broker_id=broker, start_seen=True)
    found, _ = asked(table, tmp_path, ["broker_gone", "client_timeouts"])
    assert {one.kind for one in found} == ({"broker_gone"} if is_behind else {"broker_gone", "client_timeouts"})
