"""Cells to Prometheus metric families, at scrape time.

Every name, help text and label of the exposition is defined here, in `collector_groups`, `collector_lag` and the
modules `*_families`: `kproxy watch` (passive), pushed metrics (telemetry) and ZooKeeper. Names are never removed. This
module converts nanoseconds to seconds and plain counts to cumulative buckets. Safe on any thread (see `cells`).

Refuses to know events, HTTP and text formats: prometheus_client has those.
"""

from collections.abc import Iterable, Iterator
from time import time_ns

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from kproxy import __version__
from kproxy.metrics.counters.bounds import (
    DURATION_NS,
    EXCESS_WAIT_NS,
    MUTE_NS,
    PROXY_NS,
    QUEUE_NS,
    SIZE_BYTES,
    THROTTLE_NS,
)
from kproxy.metrics.counters.cells import ApiCells, BrokerCells, ClusterCells
from kproxy.metrics.counters.named import OTHER, shown
from kproxy.metrics.process import Metrics
from kproxy.metrics.scrape.collector_groups import of_groups
from kproxy.metrics.scrape.collector_lag import of_lag
from kproxy.metrics.scrape.exemplars import exemplars
from kproxy.metrics.scrape.families import Exemplars
from kproxy.metrics.scrape.families import Histogram as _Histogram
from kproxy.metrics.scrape.families import Sum as _Sum
from kproxy.metrics.scrape.known import error_label
from kproxy.metrics.scrape.passive_families import OF_A_PROXY, passive_families
from kproxy.metrics.scrape.telemetry_families import telemetry_families
from kproxy.protocol.compression import codec_name

_CLUSTER = ("cluster",)
_BROKER = ("cluster", "broker")
_API = ("cluster", "api")
_LISTENER = ("cluster", "listener", "broker")
_API_BROKER = ("cluster", "api", "broker")


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """Return a registry with these cells and the process's own metrics; never the global registry."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CellCollector(metrics))
    ProcessCollector(registry=registry)
    return registry


class CellCollector(Collector):
    """The collector: each scrape walks once over the cells."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        passive = self._metrics.passive
        for family in self._families():
            if passive is None or family.name not in OF_A_PROXY:
                yield family
        if passive is not None:
            yield from passive_families(passive)

    def _families(self) -> Iterator[Metric]:
        metrics = self._metrics
        now_ns = metrics.now_ns()
        clusters = list(metrics.clusters.values())
        brokers = [broker for cluster in clusters for broker in list(cluster.brokers.values())]
        apis = [
            ((broker.cluster, api, broker.broker), version, cells)
            for broker in brokers
            for (api, version), cells in list(broker.apis.items())
        ]
        yield from _requests(apis, exemplars(metrics.slow))
        yield from _sizes(apis)
        yield from _brokers(brokers)
        yield from _connections(brokers)
        yield from _clusters(clusters)
        yield from _upstreams(clusters, metrics.connection_limit)
        yield from _tls(clusters)
        yield from _topics(clusters, now_ns)
        yield from of_lag(clusters, now_ns, time_ns())
        yield from _clients(clusters, now_ns)
        yield from of_groups(clusters, now_ns)
        yield from telemetry_families(clusters, now_ns)
        yield from _process(metrics)
        yield from _changes(metrics)
        if metrics.zookeeper:
            from kproxy.metrics.scrape.zookeeper_families import (
                zookeeper_families,  # a proxy without it needs no layouts
            )

            yield from zookeeper_families(metrics.zookeeper.copy())


_Cells = list[tuple[tuple[str, str, str], str, ApiCells]]  # (cluster, api, broker), version, cells


def _requests(apis: _Cells, named: Exemplars) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "kproxy_requests",
        "Completed requests: answered, unanswered, or without an answer by design.",
        labels=("cluster", "api", "version", "broker"),
    )
    duration = _Histogram(
        "kproxy_request_duration_seconds",
        "The broker's time: from the send of the request's last byte, or the end of the previous answer, to the "
        "arrival of the answer's first byte; if answers arrive in one read, the first is charged the whole time.",
        _API_BROKER,
        DURATION_NS,
    )
    waits = _Histogram(
        "kproxy_request_wait_seconds",
        "The client's whole wait: from the first byte of a request to the last byte of its answer.",
        _API_BROKER,
        DURATION_NS,
    )
    sending = _Sum(
        "kproxy_request_sending_seconds",
        "Time between the first and the last byte of requests, neither behind earlier requests nor muted.",
        _API_BROKER,
    )
    receiving = _Sum(
        "kproxy_response_receiving_seconds", "Time between the first and the last byte of answers.", _API_BROKER
    )
    excess = _Histogram(
        "kproxy_fetch_excess_wait_seconds",
        "Time of a Fetch beyond its max_wait_ms.",
        _BROKER,
        EXCESS_WAIT_NS,
    )
    throttle = _Histogram(
        "kproxy_throttle_seconds", "Throttle times above zero that brokers imposed.", _API_BROKER, THROTTLE_NS
    )
    throttled = _Sum("kproxy_throttled_responses", "Responses with a throttle time above zero.", _API_BROKER)
    errors = _Sum(
        "kproxy_errors",
        "Error codes in responses, every level of them.",
        ("cluster", "api", "error", "broker"),
    )
    for labels, version, cells in apis:
        cluster, api, broker = labels
        requests.add_metric((cluster, api, version, broker), cells.requests)
        if any(cells.duration):
            duration.add(labels, cells.duration, cells.duration_ns)
            waits.add(labels, cells.waits, cells.waits_ns)
            sending.add(labels, cells.sending_ns / 1e9)
            receiving.add(labels, cells.receiving_ns / 1e9)
        if any(cells.excess_wait):
            excess.add((cluster, broker), cells.excess_wait, cells.excess_wait_ns)
        throttled.add(labels, sum(cells.throttle))
        if any(cells.throttle):
            throttle.add(labels, cells.throttle, cells.throttle_ns)
        for code, count in cells.errors.copy().items():
            errors.add((cluster, api, error_label(code), broker), count)
    yield requests
    yield duration.family(named)
    yield from (family.family() for family in (waits, sending, receiving, excess, throttle, throttled, errors))


def _sizes(apis: _Cells) -> Iterator[Metric]:
    for side in ("request", "response"):
        total = _Sum(f"kproxy_{side}_bytes", f"Bytes of whole {side} frames, size prefix included.", _API_BROKER)
        sizes = _Histogram(
            f"kproxy_{side}_size_bytes", f"Size of {side} frames, size prefix included.", _API, SIZE_BYTES, unit=1
        )
        for labels, _, cells in apis:
            count = getattr(cells, f"{side}_bytes")
            total.add(labels, count)
            sizes.add(labels[:2], getattr(cells, f"{side}_size"), count)
        yield total.family()
        yield sizes.family()


def _brokers(brokers: list[BrokerCells]) -> Iterator[Metric]:
    queue = _Histogram(
        "kproxy_queue_seconds",
        "Time of requests, from their first byte on, behind earlier requests of the same connection: a broker serves "
        "one at a time.",
        _BROKER,
        QUEUE_NS,
    )
    mute = _Histogram(
        "kproxy_mute_seconds",
        "Waits above zero of requests while the throttle of an earlier answer kept the broker from reading (KIP-219).",
        _BROKER,
        MUTE_NS,
    )
    inflight = GaugeMetricFamily("kproxy_inflight_requests", "Requests that wait for an answer now.", labels=_BROKER)
    for broker in brokers:
        labels = (broker.cluster, broker.broker)
        queued = broker.queue.copy()
        answered = sum(sum(cells.duration) for cells in list(broker.apis.values()))
        queued[0] += max(0, answered - sum(queued))  # all other requests queued for 0 s
        queue.add(labels, queued, broker.queue_ns)
        mute.add(labels, broker.mute, broker.mute_ns)
        inflight.add_metric(labels, broker.inflight)
    yield queue.family()
    yield mute.family()
    yield inflight


def _connections(brokers: list[BrokerCells]) -> Iterator[Metric]:
    open_now = GaugeMetricFamily("kproxy_open_connections", "Client connections open now.", labels=_LISTENER)
    accepted = CounterMetricFamily("kproxy_connections", "Client connections since the start.", labels=_LISTENER)
    ended = CounterMetricFamily(
        "kproxy_disconnects", "Ends of client connections, by cause.", labels=(*_LISTENER, "cause")
    )
    for broker in brokers:
        for listener, count in broker.open.copy().items():
            open_now.add_metric((broker.cluster, listener, broker.broker), count)
        for listener, count in broker.accepted.copy().items():
            accepted.add_metric((broker.cluster, listener, broker.broker), count)
        for (listener, cause), count in broker.disconnects.copy().items():
            ended.add_metric((broker.cluster, listener, broker.broker, cause), count)
    yield open_now
    yield accepted
    yield ended


def _clusters(clusters: list[ClusterCells]) -> Iterator[Metric]:
    """Yield the counters of clusters as a whole; a new counter is a new line here."""
    for name, text, labels, counts_of in (
        (
            "unanswered_requests",
            "Requests forwarded and never answered.",
            ("api", "cause"),
            lambda cluster: cluster.unanswered,
        ),
        (
            "protocol_faults",
            "Violations of the protocol in received bytes.",
            ("side", "kind"),
            lambda cluster: cluster.faults,
        ),
        (
            "paused_reads",
            "Pauses in reading one side because the other side's buffer was full.",
            ("side",),
            lambda cluster: cluster.paused,
        ),
        (
            "rewritten_addresses",
            "Broker addresses replaced by proxy addresses.",
            ("api",),
            lambda cluster: cluster.rewritten,
        ),
        (
            "neutralised_addresses",
            "Broker addresses at the end of large answers, made unreadable.",
            ("api",),
            lambda cluster: cluster.neutralised,
        ),
        (
            "own_answers",
            "Requests that kproxy answered itself, without a broker: requests that the "
            "policy refused, logins, metrics that clients push, and ApiVersions of unsupported versions.",
            ("api",),
            lambda cluster: cluster.own_answers,
        ),
        (
            "address_leaks",
            "Answers with a broker's own address, with which clients would bypass kproxy.",
            ("api",),
            lambda cluster: cluster.leaks,
        ),
        (
            "limits_reached",
            "Connections that a limit of their listener refused, ended or slowed down, by limit.",
            ("limit",),
            lambda cluster: cluster.limits,
        ),
        (
            "policy_refusals",
            "Requests that the policy refused, with an error or by closing the connection.",
            ("api", "reason"),
            lambda cluster: cluster.refusals,
        ),
        (
            "unbound_brokers",
            "Brokers named in answers for which kproxy has no open port: clients cannot reach them.",
            (),
            lambda cluster: {(): cluster.unbound},
        ),
        (
            "authentications",
            "SASL logins: of clients, checked by kproxy, and of kproxy at brokers.",
            ("side", "mechanism", "outcome"),
            lambda cluster: cluster.authentications,
        ),
    ):
        family = CounterMetricFamily(f"kproxy_{name}", text, labels=(*_CLUSTER, *labels))
        for cluster in clusters:
            for key, count in counts_of(cluster).copy().items():
                family.add_metric((cluster.cluster, *((key,) if isinstance(key, str) else key)), count)
        yield family


def _upstreams(clusters: list[ClusterCells], connection_limit: int) -> Iterator[Metric]:
    """Yield the families of a proxy's clusters: their state, and connections to their brokers."""
    ready = GaugeMetricFamily("kproxy_ready", "1 while clients of this cluster can be served, else 0.", labels=_CLUSTER)
    accepting = GaugeMetricFamily(
        "kproxy_accepting", "1 while new connections are accepted, 0 at a limit or while draining.", labels=_CLUSTER
    )
    limit = GaugeMetricFamily(
        "kproxy_connection_limit",
        "Maximum number of open connections of the process, shared by its clusters.",
        labels=_CLUSTER,
    )
    listeners = GaugeMetricFamily("kproxy_listeners", "Open ports: of brokers, and for bootstrap.", labels=_CLUSTER)
    dials = _Histogram(
        "kproxy_dial_seconds",
        "Time to connect to a broker, with the name lookup, without failed attempts.",
        _BROKER,
        DURATION_NS,
    )
    failures = CounterMetricFamily("kproxy_dial_failures", "Failed connections to brokers.", labels=(*_BROKER, "cause"))
    loops = CounterMetricFamily(
        "kproxy_loops_refused", "Connections refused or closed because they lead back to this kproxy.", labels=_CLUSTER
    )
    for cluster in clusters:
        upstream = cluster.upstream
        if upstream is None:
            continue
        name = (cluster.cluster,)
        state = upstream.state()
        ready.add_metric(name, state.ready)
        accepting.add_metric(name, state.accepting)
        limit.add_metric(name, connection_limit)
        listeners.add_metric(name, state.listeners)
        loops.add_metric(name, upstream.loops)
        for broker, cells in upstream.dials.copy().items():
            if any(cells.duration):
                dials.add((*name, broker), cells.duration, cells.duration_ns)
            for cause, count in cells.failures.copy().items():
                failures.add_metric((*name, broker, cause), count)
    yield from (ready, accepting, limit, listeners, dials.family(), failures, loops)


def _tls(clusters: list[ClusterCells]) -> Iterator[Metric]:
    """Yield the families of TLS with clients and brokers: handshakes, and the certificates in use."""
    labels = ("cluster", "side")
    handshakes = CounterMetricFamily(
        "kproxy_tls_handshakes", "TLS handshakes that ended, by result.", labels=(*labels, "result")
    )
    durations = _Histogram(
        "kproxy_tls_handshake_seconds",
        "Time of TLS handshakes that succeeded, the peer's included.",
        labels,
        DURATION_NS,
    )
    expiries = GaugeMetricFamily(
        "kproxy_certificate_expiry_timestamp_seconds",
        "Earliest expiry of a certificate in a file in use, in seconds since the epoch.",
        labels=(*labels, "file"),
    )
    reloads = CounterMetricFamily(
        "kproxy_certificate_reloads",
        "Reloads of changed certificate files, by result: in use, or not valid.",
        labels=(*labels, "result"),
    )
    for cluster in clusters:
        for side, cells in cluster.tls.copy().items():
            of = (cluster.cluster, side)
            for result, count in cells.results.items():
                handshakes.add_metric((*of, result), count)
            if any(cells.duration):
                durations.add(of, cells.duration, cells.duration_ns)
            for file, expiry in cells.expiries().items():
                expiries.add_metric((*of, file), expiry)
            for result, count in cells.reloads.items():
                reloads.add_metric((*of, result), count)
    yield from (handshakes, durations.family(), expiries, reloads)


def _flight(metrics: Metrics) -> Iterator[Metric]:
    if not metrics.flight_dumps:
        return
    dumps = CounterMetricFamily(
        "kproxy_flight_dumps", "Dumps of the flight recorder, by cause.", labels=("cause", "outcome")
    )
    for cause, outcomes in metrics.flight_dumps.copy().items():
        for outcome, count in outcomes.items():
            dumps.add_metric((cause, outcome), count)
    yield dumps
    held = GaugeMetricFamily("kproxy_flight_bytes", "Memory of the flight recorder.", labels=("kind",))
    for kind, count in zip(("frames", "headers"), metrics.flight_bytes(), strict=True):
        held.add_metric((kind,), count)
    yield held


def _otlp(metrics: Metrics) -> Iterator[Metric]:
    if not metrics.otlp_pushes:
        return
    pushes = CounterMetricFamily(
        "kproxy_otlp_pushes", "Pushes of metrics to an OpenTelemetry collector.", labels=("outcome",)
    )
    for outcome, count in metrics.otlp_pushes.copy().items():
        pushes.add_metric((outcome,), count)
    yield pushes
    yield GaugeMetricFamily(
        "kproxy_otlp_last_success_timestamp_seconds",
        "Time of the last push that an OpenTelemetry collector accepted, in seconds since the epoch; 0: none.",
        value=metrics.otlp_pushed_ns / 1e9,
    )


def _topics(clusters: list[ClusterCells], now_ns: int) -> Iterator[Metric]:
    sums = {
        name: _Sum(f"kproxy_topic_{name}", text, ("cluster", "topic", "direction", *more))
        for name, text, more in (
            ("bytes", "Bytes of records in requests (produced) and responses (fetched), as on the wire.", ()),
            ("records", "Records without control records, if the format contains their number.", ()),
            ("batches", "Record batches, and messages of message sets, by codec.", ("codec",)),
        )
    }
    for cluster in clusters:
        topics = cluster.topics
        if topics is None:
            continue
        for topic, cells in topics.top.shown(now_ns):
            for direction, carried in (("request", cells.request), ("response", cells.response)):
                labels = (cluster.cluster, topics.label(topic), direction)
                if carried.bytes:
                    sums["bytes"].add(labels, carried.bytes)
                    sums["records"].add(labels, carried.records)
                for codecs, count in carried.batches.copy().items():
                    sums["batches"].add((*labels, _codec(codecs)), count)
    yield from (family.family() for family in sums.values())


def _clients(clusters: list[ClusterCells], now_ns: int) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "kproxy_client_info",
        "Clients and the software that they report (KIP-511).",
        labels=("cluster", "client_id", "software_name", "software_version"),
    )
    for cluster in clusters:
        for client, _ in cluster.clients.top.shown(now_ns):
            labels = (OTHER, OTHER, OTHER) if client is None else (shown(client[0]), *client[1:])
            family.add_metric((cluster.cluster, *labels), 1)
    yield family


def _process(metrics: Metrics) -> Iterator[Metric]:
    inside = _Histogram(
        "kproxy_proxy_duration_seconds",
        "Time from the arrival of a frame's last byte at kproxy to the send that took it, waiting included.",
        ("direction",),
        PROXY_NS,
    )
    for direction, cells in metrics.directions.items():
        inside.add((direction,), cells.counts, cells.total_ns)
    yield inside.family()
    lag = _Histogram(
        "kproxy_loop_lag_seconds",
        "Time that bytes waited at kproxy before it read them: it was busy with something else.",
        (),
        PROXY_NS,
    )
    lag.add((), metrics.loop_lag.counts, metrics.loop_lag.total_ns)
    yield lag.family()
    dropped = sum(metrics.recorder_dropped.copy().values()) + metrics.insight_dropped
    what = "Events, and rows of insight, that --record could not write."
    yield CounterMetricFamily("kproxy_recorder_dropped", what, value=dropped)
    written, lost = metrics.audit_lines()
    yield CounterMetricFamily("kproxy_audit_lines", "Lines written to the audit.", value=written)
    yield CounterMetricFamily("kproxy_audit_lines_dropped", "Lines of the audit that could not be written.", value=lost)
    yield from _flight(metrics)
    yield from _otlp(metrics)
    unread = metrics.log_lines_dropped()
    yield CounterMetricFamily(
        "kproxy_log_lines_dropped", "Log lines dropped because nothing read the log.", value=unread
    )
    yield CounterMetricFamily(
        "kproxy_epoll_refusals",
        "Failed attempts to watch a socket, because epoll had no room. Such sockets are slow; raise "
        "fs.epoll.max_user_watches.",
        value=metrics.epoll_refusals(),
    )
    yield GaugeMetricFamily("kproxy_workers", "Processes that relay; 1: a single process.", value=metrics.workers)
    yield CounterMetricFamily(
        "kproxy_worker_restarts",
        "Workers that ended unexpectedly and were replaced.",
        value=metrics.worker_restarts,
    )
    restarts = CounterMetricFamily(
        "kproxy_insight_restarts",
        "Restarts of the process that follows groups and leaders, by reason.",
        labels=("why",),
    )
    for why, count in metrics.insight_restarts.items():
        restarts.add_metric((why,), count)
    yield restarts
    cpu = CounterMetricFamily(
        "kproxy_worker_cpu_seconds", "CPU time of a worker and those it replaced.", labels=("worker",)
    )
    memory = GaugeMetricFamily(
        "kproxy_worker_resident_memory_bytes",
        "Memory of a worker, shared pages included.",
        labels=("worker",),
    )
    for worker, (cpu_ns, resident_bytes) in metrics.worker_usage.items():
        cpu.add_metric((worker,), cpu_ns / 1e9)
        memory.add_metric((worker,), resident_bytes)
    yield cpu
    yield memory
    build = InfoMetricFamily("kproxy_build", "The version of kproxy, and its core: native or python.")
    build.add_metric((), {"version": __version__, "core": metrics.core})
    yield build
    start = GaugeMetricFamily(
        "kproxy_start_time_seconds", "Time at which the counters began, in seconds since the epoch."
    )
    start.add_metric((), metrics.started_ns / 1e9)
    yield start


def _changes(metrics: Metrics) -> Iterator[Metric]:
    reloads = CounterMetricFamily(
        "kproxy_config_reloads", "Reloads of the configuration, by outcome.", labels=("outcome",)
    )
    for outcome, count in metrics.reloads.outcomes.items():
        reloads.add_metric((outcome,), count)
    yield reloads
    yield GaugeMetricFamily(
        "kproxy_config_last_reload_successful",
        "1 if the last reload was not refused; 0: the running settings differ from the file.",
        value=metrics.reloads.last_successful,
    )
    yield GaugeMetricFamily(
        "kproxy_config_last_reload_success_timestamp_seconds",
        "When the running settings were loaded or confirmed, in seconds since the epoch.",
        value=metrics.reloads.loaded_ns / 1e9,
    )
    yield CounterMetricFamily(
        "kproxy_failed_upgrades",
        "Upgrades in place that failed and left this process serving.",
        value=metrics.upgrades["failed"],
    )
    yield GaugeMetricFamily(
        "kproxy_predecessor_connections",
        "Open connections of the previous process after an upgrade in place, which counts and drains them.",
        value=metrics.predecessor_connections,
    )


def _codec(codecs: int) -> str:
    """Return the name of the codec in a set of bits; "mixed": several."""
    return codec_name(codecs.bit_length() - 1) if codecs.bit_count() == 1 else "mixed"
