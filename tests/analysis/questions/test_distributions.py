"""Distributions of latencies, batches, lag and retransmissions agree with a count of the rows of a real capture."""

from collections import Counter

import pytest

from kproxy.analysis import jobs
from kproxy.analysis.duck import Tables
from kproxy.analysis.engine import ask
from kproxy.analysis.lags import TABLES as OF_LAG
from kproxy.analysis.lags.brought import TABLES as OF_FETCHES
from kproxy.analysis.questions import distributions
from kproxy.analysis.questions.distributions import LATENCIES_NS, RECORDS
from kproxy.convert.processes import convert
from tests.captures import capture


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    place = tmp_path_factory.mktemp("drawn")
    convert([capture("k41_quota"), capture("k41_retransmit"), capture("k41_java_cluster")], place)
    with Tables(place) as found:
        yield found


def class_of(value, bounds):
    low = max((bound for bound in bounds if value >= bound), default=0)
    return low, next((bound for bound in (0, *bounds) if bound > low), None)


def test_every_latency_is_counted_in_its_class_and_time_step(tables):
    rows = tables["exchanges"].arrow().to_pylist()
    expected = Counter(
        (row["time"].replace(microsecond=0), row["api"], *class_of(row["latency_ns"], LATENCIES_NS))
        for row in rows
        if row["latency_ns"] is not None
    )
    answer = jobs.spread(tables["exchanges"], every="1 second", replicas=True).arrow().to_pylist()
    found = {(row["time"], row["api"], row["from_ns"], row["to_ns"]): row["exchanges"] for row in answer}
    assert found == expected and len({key[2] for key in found}) > 8
    assert (
        sum(found.values())
        == jobs.latency(tables["exchanges"], by=["cluster"], replicas=True).arrow()["exchanges"].to_pylist().pop()
    )


@pytest.mark.parametrize("value", [0, 9_999, 10_000, 19_999, 20_000, 10**11 - 1, 10**11, 10**15])
def test_a_bound_belongs_to_the_class_above_it(tables, value):
    one = tables.query(f"select *  replace (cast({value} as bigint) as latency_ns) from main.exchanges limit 1")
    (row,) = distributions.spread(one, by=["cluster"], replicas=True).arrow().to_pylist()
    assert (row["from_ns"], row["to_ns"]) == class_of(value, LATENCIES_NS)


def test_batches_are_counted_by_their_records(tables):
    sent = [
        row
        for row in tables["batches"].arrow().to_pylist()
        if row["api"] == "Produce" and row["direction"] == "request" and not row["control"]
    ]
    expected = Counter((*class_of(row["records"], RECORDS), row["codec"]) for row in sent)
    answer = jobs.batch_sizes(tables["batches"], tables["exchanges"]).arrow().to_pylist()
    assert {(row["from_records"], row["to_records"], row["codec"]): row["batches"] for row in answer} == expected
    assert sum(row["records"] for row in answer) == sum(row["records"] for row in sent)
    assert class_of(1, RECORDS) == (1, 2)  # batches of one record have their own class


def test_behind_agrees_with_lag_for_the_worst_partition(tables):
    each = jobs.lag(*(tables[name] for name in OF_LAG), every="5 seconds").arrow().to_pylist()
    answer = jobs.behind(*(tables[name] for name in OF_FETCHES), every="5 seconds").arrow().to_pylist()
    worst, together = {}, Counter()
    for row in each:
        key = (row["time"], row["cluster"], row["client"], row["topic"])
        worst[key] = max(worst.get(key, 0), row["last_lag_records"])
        together[key] += row["last_lag_records"]
    keys = [(row["time"], row["cluster"], row["client"], row["topic"]) for row in answer]
    assert dict(zip(keys, (row["lag_records"] for row in answer), strict=True)) == worst
    assert dict(zip(keys, (row["sum_lag_records"] for row in answer), strict=True)) == together
    assert max(worst.values()) > 0


def test_behind_by_broker_and_by_topic_adds_up(tables):
    """Both groupings cover the same partitions of the same clients: a broker counts with its last response."""

    def answer(by):
        return jobs.behind(*(tables[name] for name in OF_FETCHES), by=by).arrow().to_pylist()

    each = answer(["client", "topic"])
    topics = {(row["cluster"], row["topic"]): row for row in answer(["topic"])}
    for (cluster, topic), row in topics.items():
        mine = [one for one in each if (one["cluster"], one["topic"]) == (cluster, topic)]
        for name in ("sum_lag_records", "partitions", "fetches"):
            assert row[name] == sum(one[name] or 0 for one in mine)
        assert row["lag_records"] == max(one["lag_records"] for one in mine)
    by_broker = answer(["cluster", "broker", "client", "topic"])
    assert sum(row["fetches"] for row in by_broker) == sum(row["fetches"] for row in each)
    assert len({row["broker"] for row in by_broker}) > 1
    assert list(by_broker[0])[:4] == ["cluster", "broker", "client", "topic"]


def test_retransmissions_agree_with_the_exchanges(tables):
    rows = tables["exchanges"].arrow().to_pylist()
    answer = jobs.retransmissions(tables["exchanges"], by=["source"], replicas=True).arrow().to_pylist()
    for row in answer:
        exchanges = [each for each in rows if each["source"] == row["source"]]
        mine = [each["retransmissions"] for each in exchanges]
        assert row["exchanges"] == len(mine) and row["retransmissions"] == sum(filter(None, mine))
        assert row["with_retransmissions"] == sum(1 for each in mine if each) >= row["delayed"]
        assert row["delayed"] == sum(1 for each in exchanges if each["loss_ns"])
    assert sum(row["retransmissions"] for row in answer) > 10
    names = [name for name in tables["exchanges"].arrow().schema.names if name not in ("retransmissions", "loss_ns")]
    live = ask(
        {"exchanges": tables["exchanges"]},
        answer=f"select {', '.join(f'`{name}`' for name in names)}, cast(null as int) as retransmissions, "
        "cast(null as bigint) as loss_ns from exchanges",
    )
    for row in jobs.retransmissions(live).arrow().to_pylist():
        unknown = ("retransmissions", "delayed", "delayed_share", "with_retransmissions")
        assert row["exchanges"] and all(row[name] is None for name in unknown), "a proxy sees no segments"


def test_changes_of_leaders_are_counted_by_kind(tables):
    rows = tables["leadership"].arrow().to_pylist()
    answer = jobs.leader_changes(tables["leadership"]).arrow().to_pylist()
    assert {row["change"]: row["changes"] for row in answer} == Counter(row["change"] for row in rows)
    for row in answer:
        mine = {(each["topic"], each["partition"]) for each in rows if each["change"] == row["change"]}
        assert row["partitions"] == len(mine)
    assert answer
