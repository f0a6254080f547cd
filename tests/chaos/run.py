"""One run: loads start, faults happen, loads stop, and the brokers' logs are held against the promises."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.broker.cluster import wait_for
from tests.chaos import load
from tests.chaos.faults import FAULTS, WITH_WORKERS, schedule
from tests.chaos.load import Group, JavaProducing, LibrdkafkaProducing, Load, Producing, PythonProducing, Transactions
from tests.chaos.stage import Stage

STUCK_AFTER_S = 90  # more than librdkafka's longest wait, on a busy machine
_SETTLED = 5  # records, or transactions, of each load
_RSS_MARGIN = 64 << 20
_FD_MARGIN = 16


@dataclass
class Tally:
    """What happened, and what contradicts the promises. Empty `violations` are success."""

    seed: int
    workers: int
    stuck_after_s: float  # since a fault ended: then a load that makes no progress is stuck
    seconds: float = 0
    faults: dict[str, int] = field(default_factory=dict)
    recovery_s: dict[str, float] = field(default_factory=dict)  # the longest of each fault, for all loads to go on
    acknowledged: dict[str, int] = field(default_factory=dict)
    in_log: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    received_again: dict[str, int] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    kproxy_mib: dict[str, float] = field(default_factory=dict)
    kproxy_descriptors: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def json(self) -> str:
        """One object; the names are those above."""
        return json.dumps(asdict(self), indent=2)


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    workers: int = 1,
    stuck_after_s: float = STUCK_AFTER_S,
    say: Callable[[str], None] = print,
) -> Tally:
    """A run of about so many seconds of faults. Its logs are left in `folder`."""
    tally = Tally(seed, workers, stuck_after_s)
    start = time.monotonic()
    with Stage(folder, workers=workers) as stage:
        say(f"three brokers and kproxy run after {time.monotonic() - start:.0f} s")
        stage.create_topics("idempotent", "retried", "java", "kafka-python", "transactions")
        loads, groups = _loads(stage, seed)
        for one in loads:
            one.start()
        sampling = _Sampling(stage)
        try:
            _settle(loads, tally, "start", say)
            _faults(stage, loads, tally, seconds, seed, workers, say)
        finally:
            sampling.stop()
            for one in loads:
                if not isinstance(one, Group):
                    one.stop()
        _finish(stage, loads, groups, tally, say)
    tally.seconds = round(time.monotonic() - start)
    return tally


def _loads(stage: Stage, seed: int) -> tuple[list[Load], dict[str, tuple[str, Counter[int]]]]:
    """All clients, and of each group its topic and what it received. Half of each kind speaks TLS."""
    plain = {"bootstrap.servers": stage.kproxy.bootstrap}
    tls = {
        "bootstrap.servers": stage.kproxy.tls_bootstrap,
        "security.protocol": "ssl",
        "ssl.ca.location": str(stage.security.authority.bundle),
    }
    groups: dict[str, tuple[str, Counter[int]]] = {
        "classic": ("idempotent", Counter()),
        "consumer": ("retried", Counter()),
        "committed": ("transactions", Counter()),
    }
    members: list[Load] = []
    for name, (topic, received) in groups.items():
        protocol = {"group.protocol": "consumer"} if name == "consumer" else {"session.timeout.ms": 6000}
        for number in (1, 2):
            own = {"group.id": name, **protocol}
            way = plain if number == 1 else tls
            members.append(Group(way, topic, received, name=f"member {number} of {name}", **own))
    return [
        LibrdkafkaProducing(tls, "idempotent", idempotent=True, per_s=100),
        LibrdkafkaProducing(plain, "retried", idempotent=False, per_s=100),
        JavaProducing(
            {"bootstrap.servers": stage.kproxy.tls_bootstrap, **stage.security.java("SSL")},
            "java",
            stage.folder,
            per_s=50,
        ),
        PythonProducing({"bootstrap_servers": stage.kproxy.bootstrap}, "kafka-python", per_s=30),
        Transactions(tls, "transactions", seed),
        *members,
    ], groups


class _Sampling:
    """Notes every second what kproxy uses."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopping.wait(1):
            self._stage.kproxy.sample()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def _settle(loads: Sequence[Load], tally: Tally, name: str, say: Callable[[str], None]) -> None:
    """Waits until every load goes on. The members of a group together: one of them may have no partition."""
    start = time.monotonic()
    teams: dict[str, list[Load]] = {}
    for one in loads:
        teams.setdefault(one.name.split(" of ", 1)[-1] if isinstance(one, Group) else one.name, []).append(one)
    before = {team: sum(one.progress for one in members) for team, members in teams.items()}

    def stuck() -> list[str]:
        return [
            team for team, members in teams.items() if sum(one.progress for one in members) < before[team] + _SETTLED
        ]

    while stuck() and not any(one.faults for one in loads):
        if time.monotonic() - start > tally.stuck_after_s:
            tally.violations.append(f"after '{name}': no progress of {stuck()} within {tally.stuck_after_s:.0f} s")
            return
        time.sleep(0.1)
    took = time.monotonic() - start
    tally.recovery_s[name] = max(tally.recovery_s.get(name, 0), round(took, 1))
    say(f"{name}: all go on after {took:.1f} s")


def _faults(
    stage: Stage,
    loads: Sequence[Load],
    tally: Tally,
    seconds: float,
    seed: int,
    workers: int,
    say: Callable[[str], None],
) -> None:
    end = time.monotonic() + seconds
    for name, fault, chance in schedule(seed, FAULTS | (WITH_WORKERS if workers > 1 else {})):
        if time.monotonic() > end or tally.violations or any(one.faults for one in loads):
            return
        pause_s = chance.uniform(0, 3)
        time.sleep(pause_s)
        tally.faults[name] = tally.faults.get(name, 0) + 1
        try:
            fault(stage, chance)
        except Exception as failure:
            tally.violations.append(f"'{name}' did not end well: {failure!r}")
            return
        _settle(loads, tally, name, say)


def _finish(
    stage: Stage,
    loads: Sequence[Load],
    groups: dict[str, tuple[str, Counter[int]]],
    tally: Tally,
    say: Callable[[str], None],
) -> None:
    """Stops the producers, then the groups once they have read all; then every promise is held against the logs."""
    producing = [one for one in loads if isinstance(one, Producing)]
    (transactions,) = (one for one in loads if isinstance(one, Transactions))
    members = [one for one in loads if isinstance(one, Group)]
    for one in (*producing, transactions):
        one.join(180)
    settings = {"bootstrap.servers": stage.direct}
    logs = {one.topic: load.dump(settings, one.topic, committed=False) for one in producing}
    logs[transactions.topic] = load.dump(settings, transactions.topic, committed=True)
    there = {topic: {number for partition in log for number in partition} for topic, log in logs.items()}
    deadline = time.monotonic() + tally.stuck_after_s
    while time.monotonic() < deadline and any(there[topic] - seen.keys() for topic, seen in groups.values()):
        time.sleep(0.5)
    for member in members:
        member.stop()
    for member in members:
        member.join(60)
    for one in producing:
        tally.acknowledged[one.topic] = len(one.acknowledged)
        tally.violations += load.producer_violations(one, logs[one.topic])
    tally.violations += load.transaction_violations(transactions, logs[transactions.topic])
    tally.transactions = {
        "committed": len(transactions.committed),
        "aborted": len(transactions.aborted),
        "uncertain": len(transactions.uncertain),
        "producers": transactions.producers,
    }
    tally.in_log = {topic: sum(map(len, log)) for topic, log in logs.items()}
    for name, (topic, received) in groups.items():
        tally.received[name] = len(received)
        tally.received_again[name] = received.total() - len(received)
        tally.violations += load.group_violations(f"group {name}", received, logs[topic])
    for one in loads:
        tally.violations += one.faults
    _kproxy(stage, tally)
    say("verified")


def _kproxy(stage: Stage, tally: Tally) -> None:
    """What kproxy itself must show: no exception, no fault of its own, nothing kept once its clients are gone."""
    tally.violations += [f"kproxy logged: {text}" for text in stage.tracebacks()]
    kproxy = stage.kproxy
    try:
        wait_for("kproxy's connections to end", lambda: kproxy.metric("kproxy_open_connections") == 0, 30)
    except (AssertionError, OSError) as fault:
        tally.violations.append(str(fault))
        return
    for name in ("kproxy_address_leaks_total", "kproxy_unbound_brokers_total"):
        if count := kproxy.metric(name):
            tally.violations.append(f"{name} is {count:.0f}")
    kproxy.sample()
    life = kproxy.samples
    if len(life) < 2:
        return
    descriptors = {"first": life[0][2], "most": max(count for _, _, count in life), "last": life[-1][2]}
    tally.kproxy_descriptors = descriptors
    if descriptors["last"] > descriptors["first"] + _FD_MARGIN:
        tally.violations.append(f"kproxy keeps descriptors once its clients are gone: {descriptors}")
    lives = [one for one in kproxy.lives if one]
    most = [max(rss for _, rss, _ in one) for one in lives]
    tally.kproxy_mib = {
        "lives": len(lives),
        "first": round(lives[0][0][1] / 2**20, 1),
        "most": round(max(most) / 2**20, 1),
        "last": round(life[-1][1] / 2**20, 1),
    }
    if max(most) > lives[0][0][1] + tally.workers * _RSS_MARGIN:
        tally.violations.append(f"kproxy's memory grew: {tally.kproxy_mib}")
