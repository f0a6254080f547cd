"""How far consumers are behind, of a real consumer that prefetches, and of one whose lag goes up and down."""

from datetime import timedelta
from pathlib import Path

import pytest

from kproxy.analysis import engine, jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import findings
from kproxy.convert.processes import convert
from kproxy.tables.schema import COMMITTED_OFFSETS, EXCHANGES, PARTITIONS
from tests.analysis.test_jobs import START, exchange, frame  # noqa: F401 - the fixture

CAPTURE = Path(__file__).parents[1] / "data" / "incidents" / "k41_lag_prefetch.pcap.zst"
INPUTS = ("partitions", "exchanges", "committed_offsets")
S = 10**9


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    place = tmp_path_factory.mktemp("prefetching")
    convert([CAPTURE], place)
    with Tables(place) as tables:
        yield tables


def dicts(answer):
    names = [column.name for column in engine.columns(answer)]
    return [dict(zip(names, row, strict=True)) for row in engine.rows(answer)]


def test_a_group_that_prefetches_is_behind_by_what_it_has_committed(tables):
    """The official tool said 35,758 records ten seconds before the capture's end; 450 a second came."""
    found = dicts(jobs.group_lag(*(tables[name] for name in INPUTS)))
    assert [row["group_id"] for row in found] == ["g-slow"] * 3
    assert 35_000 < sum(row["lag_records"] for row in found) < 42_000
    for row in found:
        assert row["growing"] and row["growth_per_s"] > 100 and row["catch_up_ns"] is None
        assert row["client"] == "slow-cons" and row["committed_offset"] < 2000 < row["fetched_offset"]
        assert row["fetch_lag_records"] == row["end_offset"] - row["fetched_offset"] < row["lag_records"]
        assert 25 * S < row["behind_ns"] < 90 * S


def test_lag_by_fetches_leads_to_what_was_not_committed(tables):
    found = dicts(jobs.lag(tables["partitions"], tables["exchanges"]))
    assert [row["last_lag_records"] for row in found] == [0, 0, 0]  # as the consumer's own fetches say
    assert all(row["committed_lag_records"] > 13_000 for row in found)
    assert all(row["growing"] for row in found)


def test_it_is_a_finding(tables):
    (found,) = (one for one in findings(tables) if one.kind == "growing_lag")
    assert found.where == "group g-slow, topic lagt"
    assert dict(found.evidence)["last_lag_records"] > 35_000


def test_a_lag_that_shrinks_says_when_it_is_gone(frame):  # noqa: F811
    """1,000 records at first, 100 more a second, 150 committed a second."""

    def row(number, at_s, api, direction, **columns):
        own = {"source": "a.pcap", "connection": 1, "topic": "t", "partition": 0, "cluster": "east"}
        at = {"number": number, "time": START + timedelta(seconds=at_s), "api": api, "direction": direction}
        return {name: value for name, value in (own | at | columns).items() if value is not None}

    log = [row(n, n, "ListOffsets", "response", error_code=0, offset=5000 + 100 * n) for n in range(16)]
    commits = [row(100 + n, n + 0.5, "OffsetCommit", "request", offset=4000 + 150 * n) for n in range(16)]
    talk = [exchange(100 + n, n, api="OffsetCommit", group_id="g") for n in range(16)]
    pending = row(0, 0, None, None, group_id="g", offset=1, change="pending")
    inputs = frame(PARTITIONS, log + commits), frame(EXCHANGES, talk), frame(COMMITTED_OFFSETS, [pending])
    (found,) = dicts(jobs.group_lag(*inputs))
    assert (found["first_lag_records"], found["lag_records"], found["max_lag_records"]) == (950, 250, 950)
    assert found["growth_per_s"] == pytest.approx(-50, rel=0.1) and not found["growing"]
    assert found["catch_up_ns"] == pytest.approx(5 * S, rel=0.1)
    # The log ended at 6,200, at or before the offset 6,250, at second 12, and the tables end at second 15.
    assert found["behind_ns"] == 3 * S
    assert found["fetched_offset"] is None
