"""Consumer groups and partitions: who rebalances, why and for how long; leaders and replicas."""

from dashboards.boards.model import (
    CLUSTER,
    RATE,
    alike,
    board,
    grown,
    heatmap,
    largest,
    of,
    rate,
    row,
    series,
    stat,
    table,
    within_range,
)

GROUP = (*CLUSTER, "group")
ONLY = 'detail = "topics", and groups are seen'
TOPICS = 'detail = "topics"'
RISEN = f"increase({of('kproxy_group_rebalances_total', *GROUP)}[$__range])"
SPLIT = f"increase({of('kproxy_group_split_brains_total', *GROUP)}[$__range])"


def _largest(metric: str, legend: str) -> tuple[str, str]:
    total = of(metric, *GROUP)
    ranking = f"sum by (cluster, group) (increase({total}[$__range] @ end()))"
    return largest(rate(metric, *GROUP, by="cluster, group"), "cluster, group", ranking), legend


PARTS = (
    stat(
        "Rebalances",
        "Rebalances within the time range.",
        "none",
        f"sum({alike(RISEN, 'group')}) or vector(0)",
    ),
    stat(
        "Groups that rebalance",
        "Consumer groups that are rebalancing: their members may not be consuming.",
        "none",
        f"sum({alike(of('kproxy_group_rebalancing', *GROUP), 'group')})",
        thresholds=((None, "green"), (1, "orange")),
        only=ONLY,
    ),
    stat(
        "Members",
        "Members of all groups.",
        "none",
        f"sum({alike(of('kproxy_group_members', *GROUP), 'group')})",
        only=ONLY,
    ),
    stat(
        "Failed commits",
        "Commits that coordinators refused in the time range: those records are processed twice.",
        "none",
        within_range("kproxy_group_failures_total", *GROUP, where='operation="commit"'),
        thresholds=((None, "green"), (1, "orange")),
    ),
    stat(
        "Split brain",
        "Partitions that two members consumed at once in the time range.",
        "none",
        f"sum({alike(SPLIT, 'group')}) or vector(0)",
        thresholds=((None, "green"), (1, "red")),
    ),
    stat(
        "Not followed",
        "Exchanges, groups and partitions that kproxy did not follow in the time range; docs/limits.md has the limits.",
        "none",
        within_range("kproxy_insight_left_out_total", *CLUSTER),
        thresholds=((None, "green"), (1, "orange")),
    ),
    row(
        "Rebalances",
        series(
            "By group",
            "Rebalances of the groups that rebalanced most in the time range; members do not consume meanwhile.",
            "ops",
            _largest("kproxy_group_rebalances_total", "{{group}}"),
            stacked=True,
            only=ONLY,
        ),
        series(
            "By cause",
            "Causes of rebalances; docs/groups.md has each cause and its fix. Repeated session_expired and "
            "member_left: members poll too slowly, or crash.",
            "ops",
            (rate("kproxy_rebalance_causes_total", *CLUSTER, by="cause"), "{{cause}}"),
            stacked=True,
            only=TOPICS,
        ),
        series(
            "Share of time in rebalances",
            "Share of time that each group spends in rebalances. 0.1 means six seconds of every minute.",
            "percentunit",
            (
                alike(f"rate({of('kproxy_group_rebalance_seconds_sum', *GROUP)}[{RATE}])", "group"),
                "{{group}}",
            ),
            threshold=0.1,
            only=f"{ONLY} to end a rebalance",
        ),
        heatmap(
            "How long they take",
            "From the start of a rebalance until the last member had its assignment. A long one waits for a member "
            "that does not poll, up to max.poll.interval.ms.",
            grown("kproxy_group_rebalance_seconds_bucket", *GROUP, by="le"),
        ),
        series(
            "Members of each group",
            "Members that join and leave show as steps.",
            "none",
            (alike(of("kproxy_group_members", *GROUP), "group"), "{{group}}"),
            width=6,
            only=ONLY,
        ),
        table(
            "Generations",
            "Generation of the group: the number of its rebalances (for the newer protocols, its epoch).",
            "none",
            f"max by (cluster, group) ({of('kproxy_group_generation', *GROUP)})",
            ("cluster", "group"),
            width=6,
            value="Generation",
            only=ONLY,
        ),
        series(
            "Refused by coordinators",
            "Requests of members that were answered with an error, without errors that are part of every rebalance.",
            "ops",
            (rate("kproxy_group_failures_total", *GROUP, by="group, operation"), "{{group}} {{operation}}"),
            width=12,
            only=ONLY,
        ),
        series(
            "Coordinators that moved, and split brain",
            "Rebalances caused by a moved coordinator, and partitions that two members consumed at once.",
            "ops",
            (alike(f"rate({of('kproxy_group_coordinator_moves_total', *GROUP)}[{RATE}])", "group"), "{{group}} moved"),
            (alike(f"rate({of('kproxy_group_split_brains_total', *GROUP)}[{RATE}])", "group"), "{{group}} split"),
            width=12,
            only=ONLY,
        ),
    ),
    row(
        "Partitions: leaders and replicas",
        series(
            "Leaders and replicas change",
            "Changes of leaders and replicas, as clients learned them. elected and moved are normal while brokers "
            "restart.",
            "ops",
            (rate("kproxy_leadership_changes_total", *CLUSTER, by="change"), "{{change}}"),
            stacked=True,
            only=TOPICS,
        ),
        series(
            "Partitions without a leader",
            "No client can write to them or read them.",
            "none",
            (alike(of("kproxy_partitions_offline", *CLUSTER)), "{{cluster}}"),
            threshold=1,
            only=TOPICS,
        ),
        series(
            "Partitions with replicas that are not in sync",
            "A broker is down or too slow to follow. One more failure may take them offline.",
            "none",
            (alike(of("kproxy_partitions_isr_shrunk", *CLUSTER)), "{{cluster}}"),
            threshold=1,
            only=TOPICS,
        ),
    ),
)

BOARD = board(
    "kproxy-groups",
    "kproxy: groups and partitions",
    "Rebalances of consumer groups with causes and durations; changes of leaders and replicas.",
    ("group",),
    PARTS,
)
