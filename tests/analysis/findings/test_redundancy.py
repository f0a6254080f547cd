"""Topics whose writes fail if any broker stops: writes were refused while all replicas but one were in sync."""

import pytest

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import findings
from kproxy.analysis.verdict import verdict
from kproxy.views.findings import sentence
from kproxy.views.verdict import sentence as sentence_of
from tests.analysis.findings import made


def refused(place, *states, error="NOT_ENOUGH_REPLICAS"):
    """Ten writes are refused from 30 s on; states: (time, ISR, replicas) of their partition."""
    table = made.Made()
    for at_s, isr, replicas in states:
        state = {"topic": "strict", "partition": 0, "change": "told", "isr": isr, "replicas": replicas}
        table.add("leadership", at_s, **state, time_ns=made.START_NS + at_s * 10**9)
    for number in range(40):
        at_ns = made.START_NS + number * 10**9
        times = {"request_start_ns": at_ns, "request_end_ns": at_ns, "response_start_ns": at_ns + made.MS}
        failed = {"errors": 1} if number >= 30 else {}
        times["response_end_ns"] = at_ns + made.MS
        key = table.exchange("writer", "Produce", number, acks=-1, **times, **failed)
        table.partition(key, "response", "strict", **({"error_code": 19, "error": error} if failed else {}))
    return table.write(place)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("states", "replicas"),
    [
        ([(1, [1, 2, 3], [1, 2, 3]), (25, [2, 3], [1, 2, 3])], 3),
        ([(1, [1, 2], [1, 2]), (25, [2], [1, 2])], 2),
        ([(25, [3], [1, 2, 3])], None),  # two are out of sync: min.insync.replicas may be 2
        ([(1, [1, 2, 3], [1, 2, 3])], None),  # the last state is long before the refusals
        ([(20, [2, 3], [1, 2, 3]), (29, [2], [1, 2, 3])], None),
        ([(50, [2, 3], [1, 2, 3])], None),
    ],
)
def test_a_topic_whose_writes_need_all_replicas_is_a_finding(tmp_path, states, replicas):
    with Tables(refused(tmp_path / "tables", *states)) as tables:
        found = findings(tables)
        text = sentence_of(verdict(tables, found))
    rigid = [one for one in found if one.kind == "no_broker_may_stop"]
    assert len(rigid) == (replicas is not None) and ("acks=all fail to topic strict." in text) == bool(rigid)
    for one in rigid:
        assert dict(one.evidence) == {"replicas": replicas, "partitions": 1, "failed": 10} and one.change
        assert sentence(one).startswith(f"writes need {replicas} of {replicas} replicas in sync")


def test_other_errors_prove_nothing_about_replicas(tmp_path):
    with Tables(refused(tmp_path / "tables", (25, [2, 3], [1, 2, 3]), error="MESSAGE_TOO_LARGE")) as tables:
        assert "no_broker_may_stop" not in {one.kind for one in findings(tables)}
