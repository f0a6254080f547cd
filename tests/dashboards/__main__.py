"""`./dev dashboards`: a real Prometheus scrapes a real kproxy and a real Kafka: boards show data, alerts fire.

Two Prometheus servers scrape the same kproxy. The first runs the rules FAST times as fast as written: alerts fire
within seconds of their cause. The second runs them SLOW times as fast, so that a restart of this small broker, which
takes seconds, lasts as long as that of a large one: no alert without a cause may fire there, even during a rolling
restart of all brokers. That kproxy (job "kproxy", load.py) has two workers, a ZooKeeper listener, telemetry pushed by
clients and its own pushes to a collector; a `kproxy watch` sees the same traffic. A second kproxy (job "troubled",
trouble.py) provokes every other alert. It needs root, takes four minutes and 2,500 connections. CI runs a short form
with the demo's cluster (test_dashboards.py).
"""

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import click
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.cluster import Cluster, wait_for
from tests.broker.jvm import tool
from tests.broker.kproxy import Kproxy
from tests.broker.tools import CONFIGS
from tests.dashboards import trouble
from tests.dashboards.load import Keeper, Load, Watched
from tests.dashboards.trouble import Trouble, Troubled
from tests.otlp import collector
from tests.prometheus import Prometheus

FAST, SLOW = 60, 6
# Alerts that clients and restarts provoke on purpose. Job "broken" is a kproxy without a cluster; job "troubled" gets
# every fault in trouble.PROVOKED.
PROVOKED = {
    "KproxyErrors": "a client asks for a topic that does not exist",
    "KproxyClientsThrottled": "a producer above its quota",
    "KproxyGroupBehind": "a group that has committed and then stops reading a topic of old records",
    "KproxyGroupFallsBehind": "the same group: producers continue",
    "KproxyProtocolFaults": "a client that uses TLS on a plain port",
    "KproxyRebalanceStorm": "a member that leaves and rejoins again and again",
    "KproxyMemberNeverJoins": "a member with an assignor that its group does not support",
    "KproxyPartitionOffline": "a topic with its only replica on the broker that is restarted",
}
# Alerts about the machine: they rightly fire if other work uses its cores.
OF_A_BUSY_MACHINE = {"KproxyLoopLate", "KproxySlow"}
OF_AN_OUTAGE = {"KproxyBrokerUnreachable", "KproxyIsrShrunk"}
OF_A_PROCESS = {"KproxyNotReady", "KproxyDown"}

# Alerts that are not provoked here.
UNPROVOKED = {
    "KproxyCoordinatorMoved": "a group survives a move of its coordinator: tests/insight/membership/test_groups.py",
}

# Queries without data here, and what they would need.
EMPTY = {
    "kproxy_watch_copied_connections_total": "interfaces that show the same packets twice: tests/watch/test_copies.py",
}


def run(cluster: Cluster, folder: Path) -> None:
    """Raise AssertionError naming empty queries, alerts that did not fire, and alerts that fired without a cause."""
    names = ("orders", "archive", "alone", "troubled", "quiet")
    topic, old, alone, troubled_topic, quiet = (f"{name}-{uuid.uuid4().hex[:6]}" for name in names)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    third = cluster.brokers[2]
    topics = [
        *(NewTopic(topic, 3, 3), NewTopic(old, 1, 3)),
        *(NewTopic(name, 1, replica_assignment=on) for name, on in ((troubled_topic, [[1]]), (quiet, [[2, 1]]))),
        NewTopic(alone, 1, replica_assignment=[[third.node_id]]),
    ]
    for done in admin.create_topics(topics).values():
        done.result(60)
    quota = ("--entity-type", "clients", "--entity-name", "throttled", "--add-config", "producer_byte_rate=8000")
    tool(CONFIGS, "--bootstrap-server", cluster.bootstrap, "--alter", *quota)
    for name in ("watched", "broken", "watching", "keeper", "troubled"):
        (folder / name).mkdir()
    broken = Kproxy("127.0.0.1:1", folder / "broken")
    watching = Kproxy.watching({broker.port for broker in cluster.brokers}, folder / "watching", "--detail", "topics")
    try:
        with (
            collector() as pushed,
            Keeper(folder / "keeper") as keeper,
            Watched(cluster, folder / "watched", keeper.port, pushed.port) as watched,
            watching,
            Troubled(cluster, folder / "troubled") as troubled,
        ):
            broken.start(waits_until_ready=False)
            wait_for("the broken kproxy", broken.is_alive, 60)
            wait_for(
                "the process that follows groups", lambda: "are followed by process" in watched.log.read_text(), 60
            )
            targets = {"kproxy": watched.admin, "broken": broken.admin, "watch": watching.admin}
            targets["troubled"] = troubled.admin
            with (
                Prometheus(folder / "fast", targets, FAST) as fast,
                Prometheus(folder / "slow", targets, SLOW) as slow,
                Load(watched, topic, old, alone),
                Trouble(troubled, troubled_topic, quiet, alone) as troubles,
            ):
                _observe(cluster, broken, fast, slow, troubles)
                assert pushed.series(), "nothing was pushed"
    finally:
        broken.stop(kill=True)


def _observe(cluster: Cluster, broken: Kproxy, fast: Prometheus, slow: Prometheus, troubles: Trouble) -> None:
    """Run every check, then raise AssertionError with all failures."""
    start = time.monotonic()
    faults: list[str] = []

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - start:5.0f} s  {text}")

    def check(done: str, step: Callable[[], object]) -> None:
        try:
            step()
            say(done)
        except AssertionError as fault:
            faults.append(str(fault) or f"not so: {done}")
            say(f"WRONG: {faults[-1]}")

    def fire(wanted: set[str], timeout_s: float, job: str = "") -> None:
        def missing() -> set[str]:
            return wanted - {name for name, _, of in fast.fired() if not job or of == job}

        try:
            wait_for("alerts", lambda: not missing(), timeout_s)
        except AssertionError:
            raise AssertionError(f"these did not fire: {', '.join(sorted(missing()))}") from None

    check("every query of every panel has data", lambda: _boards_show_data(fast))
    check("every rule is evaluated", fast.check_rules)
    check("exemplars name clients", lambda: _exemplars_name_clients(fast))
    check("KproxyNotReady fired for a kproxy without a cluster", lambda: fire({"KproxyNotReady"}, 60))
    broken.stop(kill=True)
    provoked = {*PROVOKED, "KproxyDown"} - {"KproxyPartitionOffline"}
    check(f"these fired, as provoked: {', '.join(sorted(provoked))}", lambda: fire(provoked, 90))
    for broker in reversed(cluster.brokers):
        broker.stop()
        broker.start()
        broker.wait_until_started()
        say(f"broker {broker.node_id} was restarted")
    offline = "sum(kproxy_partitions_offline) > 0"
    check("no partition is offline", lambda: wait_for("sound partitions", lambda: not fast.query(offline), 60))

    def silent() -> None:
        fired = {name for name, severity, job in slow.fired() if severity != "info" and job == "kproxy"}
        unprovoked = sorted(fired - PROVOKED.keys() - OF_A_BUSY_MACHINE)
        if fired & OF_A_BUSY_MACHINE:
            say(f"fired where the machine is busy: {', '.join(sorted(fired & OF_A_BUSY_MACHINE))}")
        assert not unprovoked, f"these fired through the restarts, unprovoked: {', '.join(unprovoked)}"

    check(f"nothing unprovoked fired through the restarts, in 1/{SLOW} of the rules' times", silent)
    cluster.brokers[2].stop()
    outage = OF_AN_OUTAGE | {"KproxyPartitionOffline"}
    check(f"these fired in an outage: {', '.join(sorted(outage))}", lambda: fire(outage, 60))
    cluster.brokers[2].start()
    cluster.brokers[2].wait_until_started()
    troubles.stand_still(cluster.brokers[0])
    troubles.crowd()
    ours = trouble.PROVOKED.keys()
    check(f"these fired where trouble is: {', '.join(sorted(ours))}", lambda: fire(set(ours), 60, "troubled"))
    assert not faults, "\n".join(faults)


def _boards_show_data(prometheus: Prometheus) -> None:
    """Every query of every panel has series with numbers, and the labels that its legend names."""

    def empty() -> list[str]:
        return [line for line in prometheus.empty_panels() if not any(name in line for name in EMPTY)]

    try:
        wait_for("data in every panel", lambda: not empty(), 60, pause_s=1)
    except AssertionError:
        raise AssertionError("\n".join(empty())) from None


def _exemplars_name_clients(prometheus: Prometheus) -> None:
    named = prometheus.exemplars("kproxy_request_duration_seconds_bucket")
    assert named
    assert all(each["correlation_id"].lstrip("-").isdigit() for each in named)
    assert {each["client"] for each in named} == {"127.0.0.1"}
    assert {each.get("client_id") for each in named} & {"shop", "throttled", "billing", "lost"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for all logs. Default: a new one in /tmp.")
def main(keep: Path | None) -> None:
    """Run Prometheus on a kproxy with three brokers: boards, rules, alerts, a rolling restart."""
    if os.geteuid() != 0:
        raise click.ClickException("it needs root, for kproxy watch and for a small disk: run it with sudo")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = keep or Path(tempfile.mkdtemp(prefix="dashboards-"))
    folder.mkdir(exist_ok=True)
    click.echo(f"logs in {folder}")
    (folder / "kafka").mkdir()
    cluster = Cluster(folder / "kafka")
    try:
        cluster.start()
        run(cluster, folder)
    except AssertionError as fault:
        raise click.ClickException(str(fault)) from None
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
