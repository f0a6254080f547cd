"""What clients measure themselves and push to kproxy (KIP-714): producers, consumers, and how the pushes go."""

from dashboards.boards.model import CLUSTER, board, of, rate, row, series, stat, table, within_range

CLIENT = (*CLUSTER, "client_id")
ONLY = "a cluster has [cluster.telemetry], and such clients push"
ORANGE_FROM_1 = ((None, "green"), (1, "orange"))
REFUSED = 'error!="NONE"'


def _of_client(metric: str, how: str = "max") -> tuple[str, str]:
    """A gauge of clients, one curve for each client id; its instances and brokers as `how` says."""
    return f"{how} by (cluster, client_id) ({of(f'kproxy_client_telemetry_{metric}', *CLIENT)})", "{{client_id}}"


PARTS = (
    stat(
        "Clients that push",
        "Clients whose pushed metrics have series.",
        "none",
        f"sum({of('kproxy_telemetry_clients', *CLUSTER)})",
        width=8,
        only="a cluster has [cluster.telemetry]",
    ),
    stat(
        "Refused",
        "Telemetry requests in the time range that were answered with an error; docs/telemetry.md explains each.",
        "none",
        within_range("kproxy_telemetry_answers_total", *CLUSTER, where=REFUSED),
        width=8,
        thresholds=ORANGE_FROM_1,
    ),
    stat(
        "Left out",
        "Data points in the time range without a series: there are more clients, or more series per client, than the "
        "settings allow.",
        "none",
        within_range("kproxy_telemetry_points_left_out_total", *CLUSTER),
        width=8,
        thresholds=ORANGE_FROM_1,
    ),
    row(
        "Producers",
        series(
            "Records wait in the producer",
            "Mean time that batches spend in the buffer, the slowest instance of each client. Well above linger.ms: "
            "brokers or the network do not keep up.",
            "ms",
            _of_client("producer_record_queue_time_avg"),
            only=ONLY,
        ),
        series(
            "Requests, as producers see them",
            "Mean time from send to response, for the slowest broker. The part that is not in kproxy's own latencies "
            "is the network between client and kproxy, or the client's machine.",
            "ms",
            _of_client("producer_node_request_latency_avg"),
            only=ONLY,
        ),
        series(
            "Throttled",
            "Mean time for which brokers throttled producers: a quota.",
            "ms",
            _of_client("producer_produce_throttle_time_avg"),
            only=ONLY,
        ),
        series(
            "Connections made",
            "By producers, per second. A steady rate means that connections keep ending, or that the application "
            "creates a producer for each send.",
            "cps",
            (
                rate("kproxy_client_telemetry_producer_connection_creation_total", *CLIENT, by="cluster, client_id"),
                "{{client_id}}",
            ),
            only=ONLY,
        ),
    ),
    row(
        "Consumers",
        series(
            "Waiting for records",
            "Share of time in poll(), for the slowest instance of each client. Near 0, the application itself is "
            "slow and may exceed max.poll.interval.ms.",
            "percentunit",
            _of_client("consumer_poll_idle_ratio_avg", "min"),
            maximum=1,
            only=ONLY,
        ),
        series(
            "Fetches, as consumers see them",
            "Mean time of a Fetch, which waits for data up to fetch.max.wait.ms.",
            "ms",
            _of_client("consumer_fetch_manager_fetch_latency_avg"),
            only=ONLY,
        ),
        series(
            "Commits",
            "Mean time of a commit.",
            "ms",
            _of_client("consumer_coordinator_commit_latency_avg"),
            only=ONLY,
        ),
        series(
            "Rebalances",
            "Mean time of a rebalance, as members see it.",
            "ms",
            _of_client("consumer_coordinator_rebalance_latency_avg"),
            only=ONLY,
        ),
        series(
            "Assigned partitions",
            "Of all instances of a client. Steps are rebalances.",
            "none",
            _of_client("consumer_coordinator_assigned_partitions", "sum"),
            only=ONLY,
        ),
        series(
            "Connections made",
            "By consumers, per second.",
            "cps",
            (
                rate("kproxy_client_telemetry_consumer_connection_creation_total", *CLIENT, by="cluster, client_id"),
                "{{client_id}}",
            ),
            only=ONLY,
        ),
    ),
    row(
        "The pushes",
        series(
            "Answers",
            "How kproxy answered requests for subscriptions and pushes.",
            "reqps",
            (rate("kproxy_telemetry_answers_total", *CLUSTER, by="api, error"), "{{api}} {{error}}"),
            only="a cluster has [cluster.telemetry]",
        ),
        series(
            "Left out",
            "Data points without a series, by reason: clients beyond max_clients, series beyond max_series_per_client.",
            "cps",
            (rate("kproxy_telemetry_points_left_out_total", *CLUSTER, by="why"), "{{why}}"),
            only="a cluster has [cluster.telemetry]",
        ),
        table(
            "Who pushes",
            "Client instances that push metrics, by client and software.",
            "none",
            "count by (client_id, software_name, software_version) "
            f"({of('kproxy_client_telemetry_producer_connection_creation_total', *CLIENT)} or "
            f"{of('kproxy_client_telemetry_consumer_connection_creation_total', *CLIENT)})",
            ("client_id", "software_name", "software_version"),
            width=8,
            value="Instances",
            only=ONLY,
        ),
        collapsed=True,
    ),
)

BOARD = board(
    "kproxy-clients",
    "kproxy: clients",
    "Metrics that clients measure and push to kproxy (KIP-714).",
    ("client_id",),
    PARTS,
)
