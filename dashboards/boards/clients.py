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
        "Clients whose metrics have series of their own.",
        "none",
        f"sum({of('kproxy_telemetry_clients', *CLUSTER)})",
        width=8,
        only="a cluster has [cluster.telemetry]",
    ),
    stat(
        "Refused",
        "Requests of these clients within the time range that were answered with an error; docs/telemetry.md has each.",
        "none",
        within_range("kproxy_telemetry_answers_total", *CLUSTER, where=REFUSED),
        width=8,
        thresholds=ORANGE_FROM_1,
    ),
    stat(
        "Left out",
        "Data points within the time range that have no series: more clients, or more series of one, than the settings "
        "allow.",
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
            "Mean time from send to answer, to the slowest broker. What kproxy and brokers do not explain of it is the "
            "network between client and kproxy, or the client's own machine.",
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
            "By producers, each second. Steady: connections end again and again, or a producer is made for each.",
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
            "Share of time in poll(), the least of each client's instances. Near 0: the consumer's own code is what is "
            "slow, and max.poll.interval.ms is near.",
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
            "By consumers, each second.",
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
            "Data points without a series, by why: clients beyond max_clients, series beyond max_series_per_client.",
            "cps",
            (rate("kproxy_telemetry_points_left_out_total", *CLUSTER, by="why"), "{{why}}"),
            only="a cluster has [cluster.telemetry]",
        ),
        table(
            "Who pushes",
            "Instances of clients whose requests are known, by client and software.",
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
    "What clients measure themselves and push to kproxy (KIP-714).",
    ("client_id",),
    PARTS,
)
