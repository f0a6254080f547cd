"""Findings of a running kproxy: the same rules, applied to rows made from the metrics' cells between two moments.

Duty: `taken` copies the necessary cells (milliseconds, on any thread); `found_between` judges the changes from one copy
to a later one. Cells have less than tables: nothing about single clients, the mean number of records of batches, the
number of connections. Where the cells are ambiguous, the rows have lower bounds. Refuses to know
HTTP and processes.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kproxy.analysis.findings import balance, clients, consuming, groups, producing
from kproxy.analysis.findings.causes import folded
from kproxy.analysis.findings.finding import CRITICAL, NOTE, WARNING, Finding, found, ranked
from kproxy.analysis.findings.of_metrics_failures import Failed, counted_failures, found_since, gained, gained_each
from kproxy.analysis.findings.thresholds import Limits
from kproxy.analysis.questions.parties import served_by
from kproxy.analysis.questions.pieces import MS
from kproxy.metrics.counters.bounds import DURATION_NS, PROXY_NS, cell, quantile
from kproxy.metrics.counters.cells import BrokerCells, ClusterCells
from kproxy.metrics.process import Metrics
from kproxy.protocol.schema import schema

_PLAIN = 1  # the bit of codec none
Counts = dict[str, int]


@dataclass
class Api:
    """Of a broker's API."""

    requests: int = 0
    size: int = 0  # bytes, both ways
    throttled: int = 0
    throttle_ns: int = 0
    duration: list[int] = field(default_factory=lambda: cell(DURATION_NS))
    versions: Counts = field(default_factory=dict)

    def since(self, before: "Api") -> "Api":
        return Api(
            gained(self.requests, before.requests),
            gained(self.size, before.size),
            gained(self.throttled, before.throttled),
            gained(self.throttle_ns, before.throttle_ns),
            list(map(gained, self.duration, before.duration)),
            gained_each(self.versions, before.versions),
        )


@dataclass
class Taken:
    """Values of one cluster at one moment."""

    apis: dict[tuple[str, str], Api] = field(default_factory=dict)  # by broker and API
    open: int = 0
    accepted: int = 0  # without those that ended before the client sent anything
    topics: dict[str, tuple[int, ...]] = field(default_factory=dict)  # batches, plain ones, records, bytes
    # Rebalances, their nanoseconds, members, protocol.
    groups: dict[str, tuple[int, int, int, str | None]] = field(default_factory=dict)
    causes: Counts = field(default_factory=dict)
    lags: dict[tuple[str, str, str], int] = field(default_factory=dict)  # by kind, name and topic: records
    failed: Failed = field(default_factory=Failed)


@dataclass
class Moment:
    """The counters at that moment."""

    now_ns: int
    loop_lag: list[int]
    cpu_ns: Counts  # by process
    clusters: dict[str, Taken]


def began(metrics: Metrics) -> Moment:
    """The moment when counting began: all is 0."""
    return Moment(metrics.started_ns, cell(PROXY_NS), {}, {})


def taken(metrics: Metrics) -> Moment:
    """A copy of the data for findings."""
    now_ns = metrics.now_ns()
    usage = {worker: cpu_ns for worker, (cpu_ns, _) in metrics.worker_usage.copy().items()}
    return Moment(
        now_ns,
        list(metrics.loop_lag.counts),
        usage or ({"1": time.process_time_ns()} if metrics.passive is None else {}),  # no client waits for a watcher
        {name: _cluster(cells, now_ns) for name, cells in list(metrics.clusters.items())},
    )


def _cluster(cells: ClusterCells, now_ns: int) -> Taken:
    of = Taken(failed=counted_failures(cells))
    for name, broker in list(cells.brokers.items()):
        of.open += sum(broker.open.copy().values())
        of.accepted += sum(broker.accepted.copy().values()) - sum(broker.silent.copy().values())
        _broker(of, name, broker)
    if cells.topics is not None:
        for topic, each in cells.topics.top.shown(now_ns):
            carried = each.request
            counts = carried.batches.copy()
            numbers = sum(counts.values()), counts.get(_PLAIN, 0), carried.records, carried.bytes
            label = cells.topics.label(topic)  # the same for cells by the topic's name and by its id
            before = of.topics.get(label, (0, 0, 0, 0))
            of.topics[label] = tuple(map(sum, zip(before, numbers, strict=True)))
    if cells.lags is not None:
        for kind, consumers in cells.lags.shown(now_ns, time.time_ns()):
            known = {(kind, name, topic): lag.records for name, topic, lag in consumers}
            of.lags.update({consumer: records for consumer, records in known.items() if records is not None})
    insight = cells.insight() if cells.insight is not None else None
    if insight is not None:
        of.causes = dict(insight.causes)
        for group, each_group in insight.groups.shown(now_ns):
            if group is not None:
                counted = each_group.rebalances, each_group.duration_ns, each_group.members, each_group.protocol
                of.groups[group] = counted
    return of


def _broker(of: Taken, name: str, broker: BrokerCells) -> None:
    for (api, version), cells in list(broker.apis.items()):
        into = of.apis.setdefault((name, api), Api())
        requests = cells.requests
        into.requests += requests
        into.size += cells.request_bytes + cells.response_bytes
        into.throttled += sum(cells.throttle)
        into.throttle_ns += cells.throttle_ns
        into.duration = [one + more for one, more in zip(into.duration, cells.duration, strict=True)]
        into.versions[version] = into.versions.get(version, 0) + requests


def found_between(before: Moment, now: Moment, limits: Limits) -> list[Finding]:
    """The findings between two moments, the most severe first."""
    times = before.now_ns // 1000, now.now_ns // 1000
    span_s = max((now.now_ns - before.now_ns) / 1e9, 1e-3)
    found_all = list(_core(before, now, limits, span_s, times))
    for name, cells in now.clusters.items():
        then = before.clusters.get(name, Taken())
        apis = {key: api.since(then.apis.get(key, Api())) for key, api in cells.apis.items()}
        requests: Counts = {}
        for (_, api), each in apis.items():
            requests[api] = requests.get(api, 0) + each.requests
        found_all += found_since(name, then.failed, cells.failed, requests, limits, times)
        found_all += _throttled(name, apis, limits, times, cells.open)
        for judge in (_old_versions, _brokers):
            found_all += judge(name, apis, limits, times)
        found_all += _topics(name, then, cells, limits, times)
        found_all += _connections(name, then, cells, limits, times)
        found_all += _groups(name, then, cells, limits, times)
        found_all += _lags(name, then, cells, limits, times)
    return ranked(folded([(one, ()) for one in found_all]), limits)


Times = tuple[int, int]
Apis = dict[tuple[str, str], Api]


def _core(before: Moment, now: Moment, limits: Limits, span_s: float, times: Times) -> Iterator[Finding]:
    """Whether kproxy itself is why clients wait."""
    lag = list(map(gained, now.loop_lag, before.loop_lag))
    lag_ns = quantile(PROXY_NS, lag, 0.99)
    share = max(
        (gained(cpu, before.cpu_ns[each]) / 1e9 / span_s for each, cpu in now.cpu_ns.items() if each in before.cpu_ns),
        default=0.0,
    )
    waits = lag_ns is not None and lag_ns >= limits.loop_lag_ms * MS
    if waits or share >= limits.core_share:
        evidence = {"loop_lag_ns": None if lag_ns is None else round(lag_ns), "core_share": share}
        severity = CRITICAL if waits and share >= limits.core_share else WARNING
        yield found("core_full", severity, share, None, "kproxy", {}, times, evidence)


def _throttled(cluster: str, apis: Apis, limits: Limits, times: Times, connections: int) -> Iterator[Finding]:
    sums: dict[str, Api] = {}
    for (_, name), api in apis.items():
        into = sums.setdefault(name, Api())
        into.requests += api.requests
        into.throttled += api.throttled
        into.throttle_ns += api.throttle_ns
    for name, api in sums.items():
        if api.throttled:
            # The counters may have restarted at different moments: this is the minimum of answers.
            counts = max(api.requests, api.throttled), api.throttled, api.throttle_ns // MS
            open_us = (times[1] - times[0]) * max(connections, 1)
            row = clients.Throttled(cluster, None, name, *counts, None, *times, open_us)
            yield from clients.judge_throttled(row, limits)


def _old_versions(cluster: str, apis: Apis, limits: Limits, times: Times) -> Iterator[Finding]:
    keys = {api.name: api.key for api in schema().apis.values()}
    served = {key: first for key, first, _ in served_by(clients.newest())[1]}
    used: dict[str, dict[int, int]] = {}
    for (_, name), api in apis.items():
        for version, count in api.versions.items():
            if name in keys and version.isdecimal() and count > 0 and name != "WriteTxnMarkers":
                versions = used.setdefault(name, {})
                versions[int(version)] = versions.get(int(version), 0) + count
    dropped, requests, offered = [], 0, 0
    for name, versions in used.items():
        first = served.get(keys[name])
        old = {version: count for version, count in versions.items() if first is None or version < first}
        if old:
            dropped.append(f"{name} v{max(old)}")
            requests += sum(old.values())
            offered += first is not None and max(versions) >= first
    if dropped:
        row = clients.OldVersions(cluster, None, 0, ", ".join(sorted(dropped)), requests, None, offered, 0, *times)
        yield from clients.judge_old_versions(row, limits)


def _brokers(cluster: str, apis: Apis, limits: Limits, times: Times) -> Iterator[Finding]:
    sums: dict[str, Api] = {}
    p99s: dict[str, tuple[int, int]] = {}  # number of Produce, their p99
    for (broker, name), api in apis.items():
        into = sums.setdefault(broker, Api())
        into.requests += api.requests
        into.size += api.size
        if name == "Produce":
            p99_ns = quantile(DURATION_NS, api.duration, 0.99)
            if p99_ns is not None:
                p99s[broker] = sum(api.duration), round(p99_ns)
    asked = {
        broker: api
        for broker, api in sums.items()
        if broker != "bootstrap" and api.requests >= limits.broker_requests_min
    }
    fast = {broker: p99 for broker, (count, p99) in p99s.items() if count >= limits.produces_min}
    for broker in sorted(asked.keys() | fast.keys()):
        count, p99 = p99s.get(broker, (0, None))
        others = sorted(value for name, value in fast.items() if name != broker)
        row = balance.Broker(
            cluster,
            broker,
            None,
            sums[broker].requests,
            sums[broker].size,
            count,
            p99,
            len(asked),
            sum(api.size for api in asked.values()),
            others[(len(others) - 1) // 2] if others else None,
            1 + sum(value > (p99 or 0) for value in others),
            *times,
            _slow_ones(apis, broker, others, limits),
        )
        yield from balance.judge_broker(row, limits)


def _slow_ones(apis: Apis, broker: str, others: list[int], limits: Limits) -> int:
    """Produce requests above the limit for a slow broker: those in buckets entirely above it."""
    api = apis.get((broker, "Produce"))
    if api is None:
        return 0
    than_others = limits.slow_broker_times * others[(len(others) - 1) // 2] if others else math.inf
    bound = min(limits.very_slow_produce_ms * MS, max(limits.slow_produce_ms * MS, than_others))
    lower = (0, *DURATION_NS)
    return sum(count for least, count in zip(lower, api.duration, strict=False) if least >= bound * 0.5)


def _topics(cluster: str, then: Taken, now: Taken, limits: Limits, times: Times) -> Iterator[Finding]:
    active_s = (times[1] - times[0]) / 1e6
    for topic, counts in now.topics.items():
        batches, plain, records, size = map(gained, counts, then.topics.get(topic, (0, 0, 0, 0)))
        plain = min(plain, batches)  # the counters may have restarted at different moments
        if batches <= 0:
            continue
        row = producing.Produced(
            cluster,
            None,
            topic,
            batches,
            batches,
            max(0, min(batches, 2 * batches - records)),  # at least so many have one: the others have two or more
            records,
            size,
            plain,
            size if plain == batches else 0,  # bytes are not counted by codec
            active_s * max(now.open, 1),  # as if all connections wrote: the rate of each is at least this
            now.open,
            *times,
        )
        yield from producing.judge_produced(row, limits)


def _connections(cluster: str, then: Taken, now: Taken, limits: Limits, times: Times) -> Iterator[Finding]:
    count = gained(now.accepted, then.accepted)
    if count < max(1, limits.connections_min):
        return
    # Little's law: as many are open as come in the time that one lives.
    life_ns = round((now.open + then.open) / 2 * (times[1] - times[0]) * 1000 / count)
    row = clients.Churning(cluster, None, count, None, None, None, 0, *times, life_ns)
    yield from clients.judge_churning(row, limits)


def _groups(cluster: str, then: Taken, now: Taken, limits: Limits, times: Times) -> Iterator[Finding]:
    causes = gained_each(now.causes, then.causes)
    cause = max(causes, key=causes.__getitem__, default=None)
    if expired := causes.get("session_expired", 0):  # how long nobody read is not counted
        yield found("session_expired", NOTE, expired / 1e4, cluster, "all groups", {}, times, {"rebalances": expired})
    for group, (rebalances, took_ns, members, protocol) in now.groups.items():
        old = then.groups.get(group, (0, 0, 0, None))
        count = gained(rebalances, old[0])
        if count > 0:
            row = groups.Restless(
                cluster,
                group,
                protocol,
                count,
                2 * max(0, members - old[2]),
                gained(took_ns, old[1]),
                cause,
                causes.get(cause or "", 0),
                members,
                None,
                0,
                None,
                *times,
                times[1] - times[0],
            )
            yield from groups.judge_restless(row, limits)


def _lags(cluster: str, then: Taken, now: Taken, limits: Limits, times: Times) -> Iterator[Finding]:
    for (kind, name, topic), records in now.lags.items():
        first = then.lags.get((kind, name, topic))
        if first is None or records - first < limits.lag_records_min or times[0] == times[1]:
            continue
        by = "group" if kind == "group" else "client"
        row = consuming.Lagging(
            cluster, name, topic, 0, 0, first, records, records, None, *times, times[1] - times[0], by
        )
        yield from consuming.judge_lagging(row, limits)
