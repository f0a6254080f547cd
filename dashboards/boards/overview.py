"""The board to open first: is traffic as it should be, and where to look if not."""

from dashboards.boards.model import (
    CLUSTER,
    WAITING,
    alike,
    board,
    grown,
    heatmap,
    of,
    quantile,
    rate,
    row,
    series,
    stat,
    table,
)

NOT_WAITING = f'api!~"{WAITING}"'
FAILURES = of("kproxy_dial_failures_total", *CLUSTER)
RED_FROM_1 = ((None, "green"), (1, "red"))

PARTS = (
    stat("Requests", "Requests per second, answered or not.", "reqps", rate("kproxy_requests_total", *CLUSTER)),
    stat("To brokers", "Bytes of requests a second.", "Bps", rate("kproxy_request_bytes_total", *CLUSTER)),
    stat("To clients", "Bytes of responses a second.", "Bps", rate("kproxy_response_bytes_total", *CLUSTER)),
    stat(
        "Errors",
        "Kafka error codes in responses, each partition's counted. A few are ordinary: see Errors by code.",
        "cps",
        f"{rate('kproxy_errors_total', *CLUSTER)} or vector(0)",
        thresholds=((None, "green"), (1, "orange"), (10, "red")),
    ),
    stat("Connections", "Client connections open now.", "none", f"sum({of('kproxy_open_connections', *CLUSTER)})"),
    stat(
        "In flight",
        "Requests without an answer yet, long polls included.",
        "none",
        f"sum({of('kproxy_inflight_requests', *CLUSTER)})",
    ),
    series(
        "Requests by API",
        "Requests per second by API.",
        "reqps",
        (rate("kproxy_requests_total", *CLUSTER, by="api"), "{{api}}"),
        stacked=True,
    ),
    series(
        "p99 by API",
        f"The broker's time without waits behind earlier requests. APIs that long-poll are left out ({WAITING}).",
        "s",
        (quantile(0.99, "kproxy_request_duration_seconds", *CLUSTER, by="api", where=NOT_WAITING), "{{api}}"),
        log=True,
        exemplars=True,
    ),
    series(
        "Errors by code",
        "Error codes in responses, each partition's counted. NOT_LEADER_OR_FOLLOWER and REBALANCE_IN_PROGRESS are "
        "part of normal operation; others need an explanation.",
        "cps",
        (rate("kproxy_errors_total", *CLUSTER, by="error"), "{{error}}"),
        stacked=True,
    ),
    heatmap(
        "Latency",
        "Number of responses by duration, without APIs that long-poll. A second band: one broker, one API or one "
        "topic is slower than the rest. Points are single slow exchanges (exemplars), with client and correlation id.",
        grown("kproxy_request_duration_seconds_bucket", *CLUSTER, by="le", where=NOT_WAITING),
    ),
    series(
        "Throttled",
        "Responses a second with a throttle time: a quota holds clients back.",
        "reqps",
        (rate("kproxy_throttled_responses_total", *CLUSTER, by="api"), "{{api}}"),
        width=6,
    ),
    series(
        "Rebalances",
        "Rebalances of consumer groups per second, by cause.",
        "ops",
        (rate("kproxy_rebalance_causes_total", *CLUSTER, by="cause"), "{{cause}}"),
        width=6,
        stacked=True,
        only='detail = "topics"',
    ),
    row(
        "Is anything wrong?",
        stat(
            "Not ready",
            "Clusters that kproxy cannot serve; /ready on its admin port has the reason.",
            "none",
            f"count({of('kproxy_ready', *CLUSTER)} == 0) or vector(0)",
            thresholds=RED_FROM_1,
        ),
        stat(
            "Accepts nobody",
            "Clusters that accept no new connections: their limit is reached, or they drain.",
            "none",
            f"count({of('kproxy_accepting', *CLUSTER)} == 0) or vector(0)",
            thresholds=RED_FROM_1,
        ),
        stat(
            "Unanswered",
            "Requests per second that were never answered because their connection ended first.",
            "reqps",
            f"{rate('kproxy_unanswered_requests_total', *CLUSTER)} or vector(0)",
            thresholds=((None, "green"), (0.1, "orange"), (1, "red")),
        ),
        stat(
            "Unreachable brokers",
            "Brokers that could not be dialled within the last five minutes.",
            "none",
            f"count(sum by (cluster, broker) (increase({FAILURES}[5m])) > 0) or vector(0)",
            thresholds=RED_FROM_1,
        ),
        stat(
            "Partitions offline",
            "Partitions without a leader, by the latest responses of brokers.",
            "none",
            f"sum({alike(of('kproxy_partitions_offline', *CLUSTER))})",
            thresholds=RED_FROM_1,
            only='detail = "topics"',
        ),
        stat(
            "Groups that rebalance",
            "Consumer groups that are rebalancing: their members may not be consuming.",
            "none",
            f"sum({alike(of('kproxy_group_rebalancing', *CLUSTER), 'group')})",
            thresholds=((None, "green"), (1, "orange")),
            only='detail = "topics", and a group is followed',
        ),
        table(
            "Brokers",
            "Requests a second by broker: a share far above the others is a hot leader.",
            "reqps",
            rate("kproxy_requests_total", *CLUSTER, by="cluster, broker"),
            ("cluster", "broker"),
            width=8,
            value="Requests",
        ),
        table(
            "Clients by software",
            "Number of client ids by library and version, as clients report it (KIP-511).",
            "none",
            f"count by (cluster, software_name, software_version) ({of('kproxy_client_info', *CLUSTER)})",
            ("cluster", "software_name", "software_version"),
            width=8,
            value="Clients",
        ),
        table(
            "kproxy",
            "Running versions of kproxy.",
            "none",
            f"count by (instance, version) ({of('kproxy_build_info', 'job', 'instance')})",
            ("instance", "version"),
            width=8,
            value="Processes",
        ),
    ),
)

BOARD = board(
    "kproxy-overview",
    "kproxy: overview",
    "Traffic through kproxy, latency of brokers, and errors.",
    (),
    PARTS,
)
