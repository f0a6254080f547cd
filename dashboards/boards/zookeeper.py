"""Clients of ZooKeeper, as its listeners see them: how fast it answers, what fails, who is connected."""

from dashboards.boards.model import (
    CLUSTER,
    board,
    grown,
    heatmap,
    of,
    quantile,
    rate,
    row,
    series,
    stat,
    within_range,
)

PARTS = (
    stat(
        "Clients",
        "Clients of ZooKeeper that are connected: brokers of the old kind, their controllers, tools.",
        "none",
        f"sum({of('kproxy_zookeeper_open_connections', *CLUSTER)})",
    ),
    stat(
        "Sessions",
        "Sessions that are connected. Fewer than clients: some have yet to begin one.",
        "none",
        f"sum({of('kproxy_zookeeper_sessions', *CLUSTER)})",
    ),
    stat(
        "Operations",
        "Operations per second that have ended.",
        "reqps",
        rate("kproxy_zookeeper_requests_total", *CLUSTER),
    ),
    stat(
        "Unanswered",
        "Operations within the time range whose connection ended before their answer.",
        "none",
        within_range("kproxy_zookeeper_unanswered_total", *CLUSTER),
        thresholds=((None, "green"), (1, "orange")),
    ),
    stat(
        "Not connected",
        "Failed connections to servers in the time range; kproxy connected to the next server.",
        "none",
        within_range("kproxy_zookeeper_dial_failures_total", *CLUSTER),
        thresholds=((None, "green"), (1, "orange")),
    ),
    stat(
        "Not recorded",
        "Frames within the time range whose values were not kept for --record: large ones, too many at once.",
        "none",
        within_range("kproxy_zookeeper_values_left_out_total", *CLUSTER),
        thresholds=((None, "green"), (1, "orange")),
    ),
    row(
        "How fast, and how much",
        series(
            "Latency, p99",
            "ZooKeeper's time by operation. Writes wait for the disks of a majority, reads do not: slow reads mean "
            "that a server pauses, slow writes a slow disk.",
            "s",
            (quantile(0.99, "kproxy_zookeeper_latency_seconds", *CLUSTER, by="op"), "{{op}}"),
            log=True,
        ),
        heatmap(
            "Latency",
            "Number of operations by duration.",
            grown("kproxy_zookeeper_latency_seconds_bucket", *CLUSTER, by="le"),
            width=8,
        ),
        series(
            "Operations",
            "Operations by ZooKeeper's names; idle clients send ping.",
            "reqps",
            (rate("kproxy_zookeeper_requests_total", *CLUSTER, by="op"), "{{op}}"),
            stacked=True,
        ),
        series(
            "Bytes",
            "Bytes that clients (request) and servers (response) sent. Large responses are large znodes, or nodes "
            "with many children.",
            "Bps",
            (rate("kproxy_zookeeper_bytes_total", *CLUSTER, by="direction"), "{{direction}}"),
        ),
        series(
            "Watches fired",
            "Notifications that reached clients. A burst follows an election, or a broker that started or stopped.",
            "cps",
            (rate("kproxy_zookeeper_watches_fired_total", *CLUSTER, by="type"), "{{type}}"),
            stacked=True,
        ),
    ),
    row(
        "What fails",
        series(
            "Errors",
            "Answers with an error. NONODE and NODEEXISTS are normal results; SESSIONEXPIRED and CONNECTIONLOSS are "
            "failures.",
            "cps",
            (rate("kproxy_zookeeper_errors_total", *CLUSTER, by="op, error"), "{{op}} {{error}}"),
            only="operations failed",
        ),
        series(
            "Unanswered",
            "Operations whose connection ended before their answer, by operation.",
            "cps",
            (rate("kproxy_zookeeper_unanswered_total", *CLUSTER, by="op"), "{{op}}"),
            only="connections ended so",
        ),
        series(
            "Servers that are not reached",
            "Connections to a server that could not be made.",
            "cps",
            (rate("kproxy_zookeeper_dial_failures_total", *CLUSTER, by="server"), "{{server}}"),
        ),
        series(
            "Clients that come",
            "New connections. Many of them with few connected clients mean that clients keep reconnecting.",
            "cps",
            (rate("kproxy_zookeeper_connections_total", *CLUSTER, by="cluster"), "{{cluster}}"),
        ),
        series(
            "Clients and sessions",
            "A drop in sessions that recovers means that a server was lost.",
            "none",
            (f"sum by (cluster) ({of('kproxy_zookeeper_open_connections', *CLUSTER)})", "{{cluster}} clients"),
            (f"sum by (cluster) ({of('kproxy_zookeeper_sessions', *CLUSTER)})", "{{cluster}} sessions"),
        ),
        series(
            "Passed on unread",
            "Connections that are not decoded: four-letter commands, or bytes that are not a frame (fault).",
            "cps",
            (rate("kproxy_zookeeper_unread_connections_total", *CLUSTER, by="cause"), "{{cause}}"),
        ),
    ),
)

BOARD = board(
    "kproxy-zookeeper",
    "kproxy: ZooKeeper",
    "Latency, errors and clients of ZooKeeper. For [[zookeeper]] listeners.",
    (),
    PARTS,
    clusters="kproxy_zookeeper_open_connections",
)
