"""The lag of a group some of whose members the capture lacks, as those that speak inside TLS."""

from datetime import timedelta
from typing import Any

import pytest

from kproxy.analysis import jobs
from kproxy.analysis.lags.groups import NOT_CAPTURED
from kproxy.tables.schema import CHANGES, COMMITTED_OFFSETS, EXCHANGES, GROUP_EVENTS, PARTITIONS, TOPOLOGY
from tests.analysis.test_jobs import START, exchange, frame  # noqa: F401
from tests.analysis.test_lags import dicts

LAST_S = 40
Row = dict[str, Any]


def place(number: int, at_s: float, api: str, direction: str, **columns: Any) -> Row:
    own = {"source": "a.pcap", "connection": 1, "topic": "t", "cluster": "east", "api": api, "direction": direction}
    return own | {"number": number, "time": START + timedelta(seconds=at_s)} | columns


def ends() -> list[Row]:
    """The logs of two partitions grow by 100 records a second."""
    return [
        place(at_s, at_s, "ListOffsets", "response", partition=partition, error_code=0, end_offset=100 * at_s)
        for at_s in range(LAST_S + 1)
        for partition in (0, 1)
    ]


def commits(partition: int, until_s: int, begin_s: int = 0) -> list[Row]:
    """Of all records, once a second."""
    found = []
    for at_s in range(begin_s, until_s):
        number = 1000 * (partition + 1) + at_s
        found.append(place(number, at_s, "OffsetCommit", "request", partition=partition, offset=100 * at_s))
        found.append(place(number, at_s + 0.01, "OffsetCommit", "response", partition=partition, error_code=0))
    return found


def moved(at_s: float, event: str, member: str, generation: int | None, partitions: str | None = None) -> Row:
    own = {"source": "a.pcap", "cluster": "east", "group_id": "g", "protocol": "classic", "event": event}
    times = {"time": START + timedelta(seconds=at_s), "time_ns": int((START.timestamp() + at_s) * 1e9)}
    return own | times | {"member_id": member, "generation": generation, "reason": partitions}


BEGIN = [moved(0, "assigned", "a", 1, "t-0, t-1")]
TAKEN = [*BEGIN, moved(10.5, "revoked", "a", 2, "t-1")]
CAUGHT_UP = (0, None)
UNKNOWN = (None, NOT_CAPTURED)


@pytest.mark.parametrize(
    ("partitions", "events", "expected"),
    [
        pytest.param([*commits(0, 41), *commits(1, 10)], TAKEN, [CAUGHT_UP, UNKNOWN], id="a member unseen"),
        pytest.param([*commits(0, 41), *commits(1, 10)], BEGIN, [CAUGHT_UP, (3100, None)], id="its member is stuck"),
        pytest.param(
            [*commits(0, 41), *commits(1, 10)],
            [*BEGIN, moved(10.4, "assigned", "b", 2, "t-1"), *TAKEN[1:]],
            [CAUGHT_UP, (3100, None)],
            id="its new member is seen and commits nothing",
        ),
        pytest.param(
            [*commits(0, 41), *commits(1, 10), *commits(1, 41, 20)], TAKEN, [CAUGHT_UP, CAUGHT_UP], id="comes back"
        ),
        pytest.param(
            [*commits(0, 20), *commits(1, 10)],
            [*TAKEN, moved(20, "leave", "a", None)],
            [UNKNOWN, UNKNOWN],
            id="the last member seen left, to others",
        ),
        pytest.param(
            [*commits(0, 20), *commits(1, 20)],
            [*BEGIN, moved(20, "leave", "a", None)],
            [(2100, None), (2100, None)],
            id="the only member left",
        ),
        pytest.param(
            [*commits(0, 10), *commits(1, 10)],
            [*BEGIN, moved(10.5, "revoked", "a", 2, "t-0, t-2 and 7 more")],
            [UNKNOWN, UNKNOWN],
            id="more partitions than an event lists",
        ),
    ],
)
def test_a_partition_that_a_member_without_requests_took_has_no_known_lag(
    frame,  # noqa: F811
    partitions,
    events,
    expected,
):
    told = [*ends(), *partitions]
    numbers = sorted({row["number"] for row in partitions})
    talk = [exchange(number, number % 1000, api="OffsetCommit", group_id="g") for number in numbers]
    nothing = frame(CHANGES, [{}]), frame(TOPOLOGY, [{}])
    inputs = (
        frame(PARTITIONS, told),
        frame(EXCHANGES, talk),
        frame(COMMITTED_OFFSETS, [{}]),
        frame(GROUP_EVENTS, events),
    )
    found = {row["partition"]: row for row in dicts(jobs.group_lag(*inputs, *nothing))}
    assert [(found[each]["lag_records"], found[each]["unknown"]) for each in (0, 1)] == expected
    hidden = sum(each == UNKNOWN for each in expected)
    (group,) = dicts(jobs.group_lag(*inputs, *nothing, by=["group_id"]))
    assert (group["unknown_partitions"], group["uncommitted_partitions"]) == (hidden, 0)
