"""Groups that a client invents move the cells and the scrape up to their caps, and no further."""

import pickle

from kproxy.metrics import Metrics
from kproxy.metrics.counters.groups import (
    CAUSES,
    CHANGES,
    EMPTY_EXPIRY_NS,
    EXPIRY_NS,
    LEFT_OUT,
    MAX_GROUPS,
    InsightCells,
)
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.metrics.scrape.known import UNHEARD
from tests.metrics.test_metrics import labels, scrape

S = 10**9


def followed(cells):
    metrics = Metrics()
    metrics.cluster("default").follow()
    metrics.cluster("default").insight = lambda: cells
    return metrics


def test_counters_are_there_before_anything_happens():
    born = scrape(followed(InsightCells()))
    for name, label, values in (
        ("kproxy_rebalance_causes_total", "cause", CAUSES),
        ("kproxy_leadership_changes_total", "change", CHANGES),
        ("kproxy_insight_left_out_total", "why", (*UNHEARD, *LEFT_OUT)),
    ):
        assert born[name] == {labels(cluster="default", **{label: value}): 0 for value in values}
    assert born["kproxy_partitions_offline"] == {labels(cluster="default"): 0}


def test_what_a_group_does_is_in_its_series():
    cells = InsightCells()
    metrics = followed(cells)
    at_ns = metrics.now_ns()
    group = cells.group("g", at_ns)
    cells.rebalanced(group, "member_left", 3 * S)
    cells.rebalanced(group, "coordinator_moved", None)
    cells.rebalanced(group, "what nobody knows", 30 * S)
    cells.stands(group, "PreparingRebalance", 4, 17, "classic", "consumer")
    found = scrape(metrics)
    of_group = labels(cluster="default", group="g")
    assert found["kproxy_group_rebalances_total"] == {of_group: 3}
    assert found["kproxy_group_rebalance_seconds_count"] == {of_group: 2}
    assert found["kproxy_group_rebalance_seconds_sum"] == {of_group: 33}
    assert found["kproxy_group_coordinator_moves_total"] == {of_group: 1}
    assert found["kproxy_group_rebalancing"] == {of_group: 1} and found["kproxy_group_members"] == {of_group: 4}
    assert found["kproxy_group_generation"] == {of_group: 17}
    assert found["kproxy_rebalance_causes_total"][labels(cluster="default", cause="unknown")] == 1
    cells.stands(group, "Stable", 4, 18, "classic", "consumer")
    assert scrape(metrics)["kproxy_group_rebalancing"] == {of_group: 0}


def test_partitions_without_a_leader_or_replicas_are_counted_until_they_have_them():
    cells = InsightCells()
    cells.leadership("t", 0, "created", 1, 0)
    cells.leadership("t", 1, "isr_shrunk", 1, 1)
    cells.leadership("t", 0, "offline", None, 2)
    assert (cells.offline, cells.shrunk) == (1, 2)
    cells.leadership("t", 0, "elected", 2, 1)
    cells.leadership("t", 1, "deleted", None, 0)
    assert (cells.offline, cells.shrunk) == (0, 1)
    assert cells.changes == {**dict.fromkeys(CHANGES, 1), "isr_grown": 0, "moved": 0}


def test_a_client_that_invents_groups_moves_memory_and_scrape_up_to_the_caps():
    cells = InsightCells()
    metrics = followed(cells)
    at_ns = metrics.now_ns()
    sizes = []
    for number in range(20_000):
        group = cells.group("x" * 100 + str(number), at_ns + number)
        cells.rebalanced(group, "member_joined", S)
        cells.stands(group, "Stable", 1, 1, "classic", "t" * 30_000)
        group.failures["join"] += 1
        cells.leadership(f"topic-{number}", 0, "offline", None, 1)
        if number in (1000, 19_999):
            sizes.append((len(pickle.dumps(cells.groups)), len(render(registry_of(metrics))[0])))
    assert sizes[1][0] < 1.3 * sizes[0][0] and sizes[1][1] < 1.3 * sizes[0][1] < 1_500_000
    found = scrape(metrics)
    assert len(found["kproxy_group_rebalances_total"]) == MAX_GROUPS + 1
    assert sum(found["kproxy_group_rebalances_total"].values()) == 20_000
    assert len(found["kproxy_group_members"]) == MAX_GROUPS  # the others have no members together


def test_a_group_that_is_called_as_the_others_together_has_series_of_its_own():
    cells = InsightCells()
    metrics = followed(cells)
    for name in ("other", "=other", *(f"g{number}" for number in range(MAX_GROUPS))):
        cells.rebalanced(cells.group(name, metrics.now_ns()), "member_joined", S)
    text, _ = render(registry_of(metrics))
    lines = [line for line in text.decode().splitlines() if line.startswith("kproxy_group_rebalances_total")]
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines}) == MAX_GROUPS + 1
    found = scrape(metrics)["kproxy_group_rebalances_total"]
    assert [found[labels(cluster="default", group=name)] for name in ("other", "=other", "==other")] == [2, 1, 1]


def test_a_group_goes_when_it_has_been_empty_and_stays_while_it_has_members():
    cells = InsightCells()
    now_ns = 10**18
    for name, members in (("empty", 0), ("full", 2)):
        cells.stands(cells.group(name, now_ns), "Stable", members, 1, "share", "share")

    def shown(after_ns):
        return {name for name, _ in cells.groups.shown(now_ns + after_ns)}

    assert shown(EMPTY_EXPIRY_NS) == {"empty", "full"}
    assert shown(EMPTY_EXPIRY_NS + S) == {"full"} and shown(EXPIRY_NS + S) == set()
