"""Writes that wait together at several leaders give a finding that names the common follower."""

import pytest

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import findings, limits
from kproxy.analysis.verdict import verdict
from kproxy.views.findings import sentence
from kproxy.views.verdict import sentence as verdict_of
from tests.analysis.findings import made


@pytest.mark.parametrize(
    ("change", "where", "shared"),
    [
        ({}, "broker 2", "a follower, broker 2"),
        ({"replicas": ((1, 2, 3, 4), (3, 1, 2, 4))}, "brokers 1 and 3", "a follower, broker 2 or 4"),
        ({"replicas": ()}, "brokers 1 and 3", "a follower"),
        ({"replicas": ((1, 2), (3, 4))}, None, None),  # the leaders have no common follower
        ({"replicas": ((1, 3), (3, 1))}, None, None),  # the leaders follow each other
        ({"paused_s": 0.9}, None, None),
        ({"leaders": (3,)}, None, None),
        ({"slow": "Produce"}, None, None),  # broker 3 is slow for other requests too
        ({"slow": "Fetch"}, None, None),
        ({"apart_s": 1.0}, None, None),
    ],
)
def test_writes_that_wait_at_several_leaders_name_their_paused_follower(tmp_path, change, where, shared):
    table = made.Made()
    made.pause_of_follower(table, **change)
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables, limits({"very_slow_produce_ms": 500, "slow_produces_min": 10}))
        told = verdict_of(verdict(tables, answer))
    found = [one for one in answer if one.kind == "writes_waiting_together"]
    assert [one.where for one in found] == ([where] if where else [])
    for one in found:
        evidence = dict(one.evidence)
        assert (evidence["leaders"], evidence["shared"]) == ("brokers 1 and 3", shared)
        assert (evidence["longest_ns"], one.severity) == (2_100_000_000, "warning")
        assert sentence(one).startswith(
            f"24 writes with acks=all at brokers 1 and 3 waited for 2.10 s at the same moment and were acknowledged "
            f"together; what these leaders share is {shared}: "
        )
        assert told.startswith("Writes with acks=all at brokers 1 and 3 waited together")
        assert (" for broker 2, their follower" in told) == (where == "broker 2")
        assert "slow_broker" not in {each.kind for each in answer}  # it is a consequence


def test_repeated_waits_for_a_follower_are_one_finding(tmp_path):
    table = made.Made()
    for turn in range(3):
        made.pause_of_follower(table, paused_s=2.1 + turn, after_s=60 * turn)
    with Tables(table.write(tmp_path / "tables")) as tables:
        (one,) = findings(tables, kinds=["writes_waiting_together"])
    assert sentence(one).startswith(
        "3 times writes with acks=all at brokers 1 and 3 waited at the same moment, for up to 4.10 s, 9.30 s in all"
    )


def test_writes_that_wait_for_a_paused_broker_are_a_consequence_of_its_pause(tmp_path):
    """Clients of broker 2 wait too, so its pause is a finding of its own."""
    table = made.Made()
    made.pause_of_follower(table, paused_s=1.5)
    made.pause(table, 1.5)
    with Tables(table.write(tmp_path / "tables")) as tables:
        answer = findings(tables)
    (paused,) = [one for one in answer if one.kind == "broker_paused"]
    assert "writes_waiting_together" in {each.kind for each in paused.consequences}
    assert "writes_waiting_together" not in {one.kind for one in answer}
