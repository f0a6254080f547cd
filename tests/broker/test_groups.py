"""kproxy reports a group of real consumers as its coordinator does."""

import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupState
from confluent_kafka.admin import AdminClient

from tests import chromium
from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.tools import create_topic

PARTITIONS = 4


@pytest.fixture
def following(cluster: Cluster, tmp_path: Path) -> Iterator[Kproxy]:
    with Kproxy(cluster.bootstrap, tmp_path, "--detail", "topics") as kproxy:
        wait_for("the process that follows groups", lambda: "are followed by process" in kproxy.log.read_text())
        yield kproxy


def group_of(kproxy: Kproxy, group_id: str) -> dict:  # type: ignore[type-arg]
    return next((each for each in json.loads(kproxy.get("/api/groups")) if each["group"] == group_id), {})


def polled_until(consumers: list[Consumer], counts: list[int]) -> None:
    """Poll with all consumers, as members of a group must, until each owns that many partitions."""

    def settled() -> bool:
        for consumer in consumers:
            consumer.poll(0.05)
        return [len(consumer.assignment()) for consumer in consumers] == counts

    wait_for(f"assignments of {counts} partitions", settled, 60)


def test_a_rebalancing_group_is_reported_as_its_coordinator_reports_it(following: Kproxy, cluster: Cluster) -> None:
    topic, group_id = create_topic(cluster.bootstrap, PARTITIONS), f"billing-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})

    def consumer(client_id: str) -> Consumer:
        settings = {"group.id": group_id, "client.id": client_id, "partition.assignment.strategy": "range"}
        settings |= {"bootstrap.servers": following.bootstrap, "auto.offset.reset": "earliest"}
        made = Consumer({**settings, "heartbeat.interval.ms": 500})
        made.subscribe([topic])
        return made

    def agrees(generation: int, cause: str) -> None:
        """Once the group is stable, kproxy and the coordinator describe it alike."""

        def stable() -> bool:
            found = group_of(following, group_id)
            last = found.get("last_rebalance")
            return found.get("state") == "Stable" and last is not None and last["generation"] == generation

        wait_for(f"generation {generation}", stable)
        found = group_of(following, group_id)
        described = admin.describe_consumer_groups([group_id])[group_id].result(30)
        assert described.state is ConsumerGroupState.STABLE
        assert {each["member_id"] for each in found["members"]} == {each.member_id for each in described.members}
        assert {each["client_id"] for each in found["members"]} == {each.client_id for each in described.members}
        assert (found["coordinator"], found["strategy"]) == (described.coordinator.id, "range")
        last = found["last_rebalance"]
        assert (last["generation"], last["cause"], last["members_after"]) == (generation, cause, len(described.members))
        assert last["started_ns"] < last["ended_ns"]

    first = consumer("one")
    try:
        polled_until([first], [PARTITIONS])
        agrees(1, "member_joined")
        second = consumer("two")
        polled_until([first, second], [PARTITIONS // 2] * 2)
        agrees(2, "member_joined")
        second.close()
        polled_until([first], [PARTITIONS])
        agrees(3, "member_left")
    finally:
        first.close()

    wait_for("an empty group", lambda: group_of(following, group_id)["member_count"] == 0)
    of_group = {"cluster": "default", "group": group_id}

    wait_for("three rebalances", lambda: following.metric("kproxy_group_rebalances_total", **of_group) == 3)
    assert following.metric("kproxy_group_rebalance_seconds_count", **of_group) == 3
    assert following.metric("kproxy_group_generation", **of_group) >= 3
    assert following.metric("kproxy_rebalance_causes_total", cause="member_left") >= 1
    assert following.metric("kproxy_leadership_changes_total", change="created") >= PARTITIONS
    assert following.metric("kproxy_partitions_offline") == 0
    assert following.metric("kproxy_insight_left_out_total") == 0
    shown = asked("ctl", "-a", following.admin, "groups", "--group", group_id)
    assert group_id in shown and "member_left" in shown


def asked(*command: str) -> str:
    return subprocess.run([KPROXY, *command], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.ring2
def test_the_type_of_a_group_is_shown_as_the_brokers_list_it(following: Kproxy, cluster: Cluster) -> None:
    """`ctl groups`, `top` and the page show it: for a group of the classic protocol and one of KIP-848."""
    topic, own = create_topic(cluster.bootstrap, 1), uuid.uuid4().hex[:8]
    names = {protocol: f"{protocol}-{own}" for protocol in ("classic", "consumer")}
    consumers = []
    for protocol, name in names.items():
        settings = {"group.id": name, "group.protocol": protocol, "auto.offset.reset": "earliest"}
        consumers.append(Consumer({"bootstrap.servers": following.bootstrap, **settings}))
        consumers[-1].subscribe([topic])
    try:
        polled_until(consumers, [1, 1])
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        listed = admin.list_consumer_groups().result(30).valid
        kinds = {each.group_id: each.type.name.lower() for each in listed if own in each.group_id}
        assert kinds == {name: protocol for protocol, name in names.items()}

        def rows(lines: str) -> list[list[str]]:
            return sorted(line.split() for line in lines.splitlines() if own in line)

        def is_shown() -> bool:
            found = rows(asked("top", following.admin, "--once", "--show", "groups", "--interval", "0.2"))
            return [row[:4] for row in found] == [[name, "Stable", kinds[name], "consumer"] for name in names.values()]

        wait_for("both in top", is_shown)
        told = rows(asked("ctl", "-a", following.admin, "groups", "--group", own))
        assert [row[1:5] for row in told] == [[name, kinds[name], "consumer", "Stable"] for name in names.values()]
        with chromium.opened(f"http://{following.admin}/") as browser:
            cells = "return [...document.querySelectorAll('#groups tbody tr')].map(row => row.innerText)"

            def on_page() -> bool:
                found = rows("\n".join(" ".join(text.split()) for text in browser.asked(cells)))
                return [row[:4] for row in found] == [
                    [name, kinds[name], "consumer", "Stable"] for name in names.values()
                ]

            wait_for("both on the page", on_page, 60)
    finally:
        for consumer in consumers:
            consumer.close()
