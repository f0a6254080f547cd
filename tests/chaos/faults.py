"""The faults, and the schedule of them that follows from a seed.

A fault is a function of the stage and a source of chance. It ends when what it broke works again, except for clients'
connections, whose recovery is measured by who calls it. One broker is down at a time: three replicas of which two must
be in sync bear no more.
"""

import json
import random
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
from confluent_kafka import ElectionType, KafkaException, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from tests.broker.cluster import wait_for
from tests.chaos.load import PARTITIONS
from tests.chaos.stage import Stage

_SET = AlterConfigOpType.SET

Fault = Callable[[Stage, random.Random], None]


def broker_killed(stage: Stage, chance: random.Random) -> None:
    """A broker dies, and is back a few seconds later."""
    _restart_broker(stage, chance, kill=True)


def broker_stopped(stage: Stage, chance: random.Random) -> None:
    """A broker hands its partitions over, ends, and is back a few seconds later."""
    _restart_broker(stage, chance, kill=False)


def _restart_broker(stage: Stage, chance: random.Random, *, kill: bool) -> None:
    broker = chance.choice(stage.cluster.brokers)
    broker.stop(kill=kill)
    time.sleep(chance.uniform(1, 5))
    broker.start()
    broker.wait_until_started()
    wait_for("replicas in sync after a broker's restart", stage.in_sync, 120, pause_s=0.5)


def leaders_elected(stage: Stage, chance: random.Random) -> None:
    """Leadership goes back to the first replica of every partition."""
    del chance
    partitions = [TopicPartition(topic, number) for topic in _topics(stage) for number in range(PARTITIONS)]
    with suppress(KafkaException):  # where it is with the first already
        stage.admin().elect_leaders(ElectionType.PREFERRED, partitions).result(30)


def partitions_reassigned(stage: Stage, chance: random.Random) -> None:
    """Every partition gets its replicas in another order, and so leaders move."""
    moved = []
    for topic in _topics(stage):
        for number in range(PARTITIONS):
            replicas = chance.sample((1, 2, 3), 3)
            moved.append({"topic": topic, "partition": number, "replicas": replicas})
    stage.reassign(json.dumps({"version": 1, "partitions": moved}))
    leaders_elected(stage, chance)
    wait_for("replicas in sync after a reassignment", stage.in_sync, 120, pause_s=0.5)


def kproxy_killed(stage: Stage, chance: random.Random) -> None:
    stage.kproxy.stop(kill=True)
    time.sleep(chance.uniform(0, 2))
    stage.kproxy.start()


def kproxy_drained(stage: Stage, chance: random.Random) -> None:
    stage.kproxy.stop()
    time.sleep(chance.uniform(0, 2))
    stage.kproxy.start()


def cut_before(stage: Stage, chance: random.Random) -> None:
    """Connections of clients end at random bytes."""
    stage.before.do(do="cut", share=chance.uniform(0.2, 1), seed=chance.randrange(1 << 30))


def cut_behind(stage: Stage, chance: random.Random) -> None:
    """Connections to brokers end at random bytes."""
    stage.behind.do(do="cut", share=chance.uniform(0.2, 1), seed=chance.randrange(1 << 30))


def stalled_before(stage: Stage, chance: random.Random) -> None:
    stage.before.do(do="stall", seconds=chance.uniform(1, 6))


def stalled_behind(stage: Stage, chance: random.Random) -> None:
    stage.behind.do(do="stall", seconds=chance.uniform(1, 6))


def slow_before(stage: Stage, chance: random.Random) -> None:
    stage.before.do(do="slow", seconds=chance.uniform(3, 8), bytes_per_s=chance.randrange(20_000, 200_000))


def slow_behind(stage: Stage, chance: random.Random) -> None:
    stage.behind.do(do="slow", seconds=chance.uniform(3, 8), bytes_per_s=chance.randrange(20_000, 200_000))


def refused_behind(stage: Stage, chance: random.Random) -> None:
    """Brokers take no new connections for a while, and old ones end."""
    stage.behind.do(do="cut", share=0.7, seed=chance.randrange(1 << 30))
    stage.behind.do(do="refuse", seconds=chance.uniform(1, 3))


def certificate_rotated(stage: Stage, chance: random.Random) -> None:
    """The files of kproxy's certificate change; it shows the new one soon, and keeps its connections."""
    del chance
    leaf = _leaf(stage.kproxy.rotate().certificate.read_text().strip())
    host, port = stage.kproxy.tls_bootstrap.split(":")
    wait_for("kproxy to show its new certificate", lambda: _shows(host, int(port), leaf), 60)


def brokers_certificates_rotated(stage: Stage, chance: random.Random) -> None:
    """Brokers show other certificates of the same CA, one after the other, to connections that kproxy then makes."""
    hosts = [f"{host}" for fronts in stage.fronts.values() for host in {one.split(":")[0] for one in fronts.values()}]
    admin = stage.admin()
    for broker in stage.cluster.brokers:
        name = f"rotated-{broker.node_id}-{chance.randrange(1 << 30)}"
        certificate = stage.security.authority.server("localhost", *hosts, file=name)
        keystore = str(stage.security.keystore(certificate))
        entry = ConfigEntry("listener.name.ssl.ssl.keystore.location", keystore, incremental_operation=_SET)
        resource = ConfigResource(ConfigResource.Type.BROKER, str(broker.node_id), incremental_configs=[entry])
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(30)
        host, port = broker.address_of("SSL").split(":")
        leaf = _leaf(certificate.certificate.read_text())
        wait_for("a broker to show its new certificate", lambda: _shows(host, int(port), leaf), 60)  # noqa: B023
    stage.behind.do(do="cut", share=0.7, seed=chance.randrange(1 << 30))


def _leaf(pem: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + 25].strip())


def _shows(host: str, port: int, leaf: bytes) -> bool:
    with suppress(OSError):
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=5)) == leaf
    return False


def worker_killed(stage: Stage, chance: random.Random) -> None:
    """One of several workers dies; the parent starts another."""
    wait_for("the workers of one kproxy", lambda: len(_childless(stage)) == stage.kproxy.workers, 60)
    victim = chance.choice(sorted(_childless(stage)))
    psutil.Process(victim).kill()

    def replaced() -> bool:
        return victim not in _childless(stage) and len(_childless(stage)) == stage.kproxy.workers

    wait_for("another worker", replaced, 30)


def _childless(stage: Stage) -> set[int]:
    """Its processes that have started none: workers, and what is left of a kproxy that another one follows."""
    found = set()
    for one in stage.kproxy.processes():
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE and not one.children():
                found.add(one.pid)
    return found


def reloaded(stage: Stage, chance: random.Random) -> None:
    """The settings change, then are wrong, then right again; none of it costs a connection."""
    kproxy = stage.kproxy
    ended = _broken(stage)
    good = chance.randrange(500, 5000)
    for limit, outcome in ((good, "applied"), (0, "refused"), (good + 1, "applied")):
        before = kproxy.metric("kproxy_config_reloads_total", outcome=outcome)
        kproxy.configure(max_connections=limit)
        stage.signal_kproxy(signal.SIGHUP)
        wait_for(
            f"a reload: {outcome}",
            lambda: kproxy.metric("kproxy_config_reloads_total", outcome=outcome) > before,  # noqa: B023
            30,
        )
    if lost := _broken(stage) - ended:
        raise AssertionError(f"{lost:.0f} connections ended with three reloads")


def _broken(stage: Stage) -> float:
    """Connections that kproxy itself ended: a cut from before may still strike one of them meanwhile."""
    causes = ("drained", "drain_timeout", "fault", "defect", "limit", "operator", "worker_lost")
    return sum(stage.kproxy.metric("kproxy_disconnects_total", cause=cause) for cause in causes)


def upgraded(stage: Stage, chance: random.Random) -> None:
    """Another kproxy takes over the sockets; the one before it drains."""
    del chance
    before = stage.kproxy.start_time()
    stage.signal_kproxy(signal.SIGUSR2)
    wait_for("another kproxy to take over", lambda: stage.kproxy.start_time() > before, 90)
    wait_for("the one before it to end", lambda: stage.kproxy.relaying() == 1, 60)


FAULTS: dict[str, Fault] = {
    "broker killed": broker_killed,
    "broker stopped": broker_stopped,
    "leaders elected": leaders_elected,
    "partitions reassigned": partitions_reassigned,
    "kproxy killed": kproxy_killed,
    "kproxy drained": kproxy_drained,
    "clients' connections cut": cut_before,
    "brokers' connections cut": cut_behind,
    "clients' links stalled": stalled_before,
    "brokers' links stalled": stalled_behind,
    "clients' links slow": slow_before,
    "brokers' links slow": slow_behind,
    "brokers refuse": refused_behind,
    "certificate rotated": certificate_rotated,
    "brokers' certificates rotated": brokers_certificates_rotated,
    "kproxy reloaded": reloaded,
    "kproxy upgraded": upgraded,
}
WITH_WORKERS: dict[str, Fault] = {"worker killed": worker_killed}


def schedule(seed: int, faults: dict[str, Fault]) -> Iterator[tuple[str, Fault, random.Random]]:
    """Endless: each fault once in every round, in an order and with a chance of its own that follow from the seed."""
    chance = random.Random(seed)
    while True:
        names = sorted(faults)
        chance.shuffle(names)
        for name in names:
            yield name, faults[name], random.Random(chance.randrange(1 << 30))


def _topics(stage: Stage) -> list[str]:
    topics: Any = stage.admin().list_topics(timeout=10).topics
    return sorted(name for name in topics if not name.startswith("__"))
