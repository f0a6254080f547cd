"""What a log's end is after each answer: exactly which answers raise and lower it, and what is removed."""

from uuid import UUID

import pytest

from kproxy.metrics.named import Topics
from kproxy.metrics.offsets import Log, Offsets, Position, has_ended

S = 10**9
T = 1_000 * S
ORDERS = ("orders", 0)


def log(end=100, at_ns=T, epoch=5):
    one = Log()
    one.end(end, at_ns, 0, epoch=epoch)
    return one


def state(one):
    return one.high_watermark, one.reported_ns, one.raised_ns, one.lowered_ns, one.epoch


@pytest.mark.parametrize(
    ("offset", "more", "end", "lowered"),
    [
        (100, {}, 100, False),
        (101, {}, 101, False),
        (0, {"epoch": 6}, 0, True),
        (-1, {"epoch": 6}, 100, False),
        (99, {}, 100, False),  # late
        (99, {"epoch": 5}, 100, False),
        (99, {"epoch": 6}, 99, True),
        (99, {"epoch": 6, "by_leader": False}, 100, False),
        (99, {"asked_ns": T}, 99, True),  # nothing has raised it since the question
        (99, {"asked_ns": T - 1}, 100, False),
        (100, {"asked_ns": T - 1}, 100, False),
        (99, {"asked_ns": T - 1, "epoch": 6}, 99, True),
    ],
)
def test_an_end_rises_and_is_lowered_by_a_newer_leader_or_an_answer_to_kproxy(offset, more, end, lowered):
    one = log()
    one.read(90, 95, 7, T)
    one.end(offset, T + S, 0, **more)
    assert one.high_watermark == end and (one.lowered_ns > 0) == lowered
    assert (len(one.marks) == 0) == lowered  # other records have their offsets
    assert (one.raised_ns == T + S) == (end != 100)
    assert one.reported_ns == (T if end == 100 and offset != 100 else T + S)


def test_of_a_log_without_known_epoch_a_lower_end_is_late():
    one = log(epoch=-1)
    one.end(50, T + S, 0, epoch=0)
    assert one.high_watermark == 100 and one.epoch == 0
    one.end(50, T + 2 * S, 0, epoch=1)
    assert one.high_watermark == 50


@pytest.mark.parametrize(
    ("now_ns", "epoch", "end"),
    [
        (T + 10 * S - 1, -1, 50),  # from before the truncation
        (T + 10 * S, -1, 60),
        (T + 10 * S, 6, 60),
        (T + 40 * S - 1, 5, 50),  # the former leader does not know yet that it is none
        (T + 40 * S, 5, 60),
        (T + 10 * S - 1, 6, 50),
    ],
)
def test_a_higher_end_from_before_a_truncation_is_ignored(now_ns, epoch, end):
    one = log()
    one.end(50, T + 10 * S, 0, epoch=6)
    one.end(60, now_ns, 0, epoch=epoch)
    assert one.high_watermark == end


@pytest.mark.parametrize(
    ("offset", "at_ns", "lowered"), [(100, T + S, False), (99, T + S, True), (99, T, True), (99, T - 1, False)]
)
def test_another_process_lowers_an_end_that_nothing_has_raised_since(offset, at_ns, lowered):
    one = log()
    one.read(90, 95, 7, T)
    one.lower(offset, at_ns, 4)
    assert state(one) == ((99, T, at_ns, at_ns, 5) if lowered else (100, T, T, 0, 5))
    assert (len(one.marks) == 0) == lowered


def test_an_end_is_known_once_a_leader_has_told_it():
    one = Log()
    assert not one.is_known
    one.end(10, T, 0, by_leader=False)
    assert not one.is_known and one.high_watermark == 10
    one.end(10, T + 1, 0, broker="1")
    assert one.is_known and one.broker == "1"
    one.end(11, T + 2, 0)
    assert one.broker == "1"  # who does not say who it is does not replace it


def test_the_age_of_a_record_is_exact_where_it_was_fetched_alone_else_a_bound():
    one = log(100)
    one.read(40, 41, (T - 9 * S) // 10**6, T)
    one.read(50, 52, (T - 8 * S) // 10**6, T)
    wall_ns = T + S
    assert one.age_s(40, -1, T, wall_ns) == (10.0, True)
    assert one.age_s(41, -1, T, wall_ns) == (10.0, False)  # younger than the record before it
    assert one.age_s(50, -1, T, wall_ns) == (10.0, False)
    assert one.age_s(52, 0, T, wall_ns) == (9.0, False)
    assert one.age_s(52, (T - 2 * S) // 10**6, T, wall_ns) == (3.0, False)
    assert one.age_s(30, 0, T, wall_ns) == (None, False)
    one.end(110, T + 5 * S, T + 3 * S)  # until then 100 was the end
    assert one.age_s(100, 0, T + 7 * S, T + 7 * S) == (4.0, False)
    assert one.age_s(99, 0, T + 7 * S, T + 7 * S) == (15.0, False)


@pytest.mark.parametrize(
    ("removal", "group", "ended"),
    [
        (("topic", "orders"), None, True),
        (("topic", "clicks"), None, False),
        (("partition", "orders", 0), None, True),
        (("partition", "orders", 1), None, False),
        (("group", "billing"), "billing", True),
        (("group", "billing"), "audit", False),
        (("group", "billing"), None, False),
        (("offset", "billing", "orders", 0), "billing", True),
        (("offset", "billing", "orders", 1), "billing", False),
        (("topic", "orders"), "billing", True),
    ],
)
def test_what_was_reported_until_a_removal_has_ended(removal, group, ended):
    assert has_ended({removal: T}, ORDERS, T, group) == ended
    assert not has_ended({removal: T}, ORDERS, T + 1, group)
    assert not has_ended({}, ORDERS, 0, group)


@pytest.mark.parametrize(("by_id_ns", "offset"), [(T - 1, 7), (T, 7), (T + 1, 9)])
def test_of_an_offset_by_id_and_one_by_name_the_later_one_stays_when_the_name_is_known(by_id_ns, offset):
    topics, identity = Topics(), UUID(int=5)
    lags = Offsets(topics)
    lags._commit("billing", ORDERS, 7, T, 8)
    lags._commit("billing", (identity, 0), 9, by_id_ns, 8)
    lags._commit("audit", (identity, 0), 3, T, 8)
    topics.names[identity] = "orders"
    lags.name_topics({identity: "orders"}, T + S)
    assert {of: position.offset for of, position in lags.committed.items()} == {
        ("billing", ORDERS): offset,
        ("audit", ORDERS): 3,
    }
    assert all(isinstance(position, Position) for position in lags.committed.values())
