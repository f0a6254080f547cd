"""Brokers and APIs: which broker or which request is slow, why, and what fails."""

from dashboards.boards.model import CLUSTER, WAITING, board, grown, heatmap, of, quantile, rate, row, series

BROKER = (*CLUSTER, "broker")
BOTH = (*BROKER, "api")
API = (*CLUSTER, "api")


def _heat(title: str, description: str, api: str) -> dict:  # type: ignore[type-arg]
    return heatmap(
        title, description, grown("kproxy_request_duration_seconds_bucket", *BROKER, by="le", where=f'api="{api}"')
    )


PARTS = (
    row(
        "Latency: the broker's time, waits behind earlier requests left out",
        series(
            "p99 by API",
            f"One request in a hundred takes longer. Without APIs that long-poll ({WAITING}).",
            "s",
            (
                quantile(0.99, "kproxy_request_duration_seconds", *BOTH, by="api", where=f'api!~"{WAITING}"'),
                "{{api}}",
            ),
            log=True,
            exemplars=True,
        ),
        series(
            "p50 by API",
            "The median. If it stays while p99 grows, a few requests are slow, not the broker.",
            "s",
            (
                quantile(0.5, "kproxy_request_duration_seconds", *BOTH, by="api", where=f'api!~"{WAITING}"'),
                "{{api}}",
            ),
            log=True,
        ),
        series(
            "Produce p99 by broker",
            "If one broker is above the others: its disk or its followers are slow, or it has more load.",
            "s",
            (
                quantile(0.99, "kproxy_request_duration_seconds", *BROKER, by="broker", where='api="Produce"'),
                "broker {{broker}}",
            ),
            log=True,
            exemplars=True,
        ),
        _heat(
            "Produce",
            "Number of writes by duration. Points are single slow ones, with client and correlation id.",
            "Produce",
        ),
        _heat(
            "Fetch",
            "A Fetch waits for data up to its max_wait_ms (500 ms by default): a band there means idle consumers.",
            "Fetch",
        ),
    ),
    row(
        "Waiting",
        series(
            "Fetch: longer than allowed, p99",
            "Time of a Fetch beyond its max_wait_ms: the broker reads from disk, or has too few request handlers.",
            "s",
            (quantile(0.99, "kproxy_fetch_excess_wait_seconds", *BROKER, by="broker"), "broker {{broker}}"),
            threshold=1,
        ),
        series(
            "Whole wait by API, p99",
            "From the first byte of a request to the last byte of its response, including queue and mute, as the "
            "client waits. "
            f"Without APIs that long-poll ({WAITING}).",
            "s",
            (
                quantile(0.99, "kproxy_request_wait_seconds", *BOTH, by="api", where=f'api!~"{WAITING}"'),
                "{{api}}",
            ),
            log=True,
        ),
        series(
            "Between first and last byte",
            "Seconds per second spent receiving requests and sending responses. High: a slow client, or its network.",
            "s",
            (rate("kproxy_request_sending_seconds_total", *BOTH, by="broker"), "broker {{broker}}, requests"),
            (rate("kproxy_response_receiving_seconds_total", *BOTH, by="broker"), "broker {{broker}}, answers"),
        ),
        series(
            "Queue, p99",
            "Time that requests waited behind earlier ones of their connection: a broker serves one at a time.",
            "s",
            (quantile(0.99, "kproxy_queue_seconds", *BROKER, by="broker"), "broker {{broker}}"),
        ),
        series(
            "Requests in flight",
            "Requests that are unanswered now, long polls included.",
            "none",
            (f"sum by (broker) ({of('kproxy_inflight_requests', *BROKER)})", "broker {{broker}}"),
        ),
        series(
            "Throttle time, p99",
            "Throttle times in brokers' responses: a quota is exceeded.",
            "s",
            (quantile(0.99, "kproxy_throttle_seconds", *BOTH, by="api"), "{{api}}"),
            only="a quota throttles clients",
        ),
        series(
            "Mute, p99",
            "Time that requests waited while their connection was muted after a throttled response (KIP-219). It is "
            "part of neither the broker's time nor the queue.",
            "s",
            (quantile(0.99, "kproxy_mute_seconds", *BROKER, by="broker"), "broker {{broker}}"),
            only="a quota throttles clients",
        ),
        series(
            "Requests muted",
            "Requests per second that waited for the end of a mute.",
            "reqps",
            (rate("kproxy_mute_seconds_count", *BROKER, by="broker"), "broker {{broker}}"),
        ),
    ),
    row(
        "Traffic",
        series(
            "Requests by API",
            "Requests per second by API.",
            "reqps",
            (rate("kproxy_requests_total", *BOTH, by="api"), "{{api}}"),
            stacked=True,
        ),
        series(
            "To brokers by API",
            "Bytes of requests.",
            "Bps",
            (rate("kproxy_request_bytes_total", *BOTH, by="api"), "{{api}}"),
            stacked=True,
        ),
        series(
            "To clients by API",
            "Bytes of responses.",
            "Bps",
            (rate("kproxy_response_bytes_total", *BOTH, by="api"), "{{api}}"),
            stacked=True,
        ),
        series(
            "Requests by broker",
            "Uneven shares mean that leaders are unbalanced, or that a few partitions have most of the traffic.",
            "reqps",
            (rate("kproxy_requests_total", *BOTH, by="broker"), "broker {{broker}}"),
            stacked=True,
        ),
        series(
            "Versions in use",
            "API versions that clients use. Before a broker upgrade, look for versions that it removes.",
            "reqps",
            (rate("kproxy_requests_total", *BOTH, by="api, version"), "{{api}} v{{version}}"),
            stacked=True,
        ),
        series(
            "Sizes, p99",
            "Frames of requests and of responses, size prefix included.",
            "bytes",
            (quantile(0.99, "kproxy_request_size_bytes", *API, by="api"), "{{api}} request"),
            (quantile(0.99, "kproxy_response_size_bytes", *API, by="api"), "{{api}} response"),
            log=True,
        ),
    ),
    row(
        "Errors and ends",
        series(
            "Errors by code",
            "Every error code in responses, counted for each partition.",
            "cps",
            (rate("kproxy_errors_total", *BOTH, by="api, error"), "{{error}} in {{api}}"),
            stacked=True,
        ),
        series(
            "Unanswered requests by cause",
            "Requests that were forwarded and never answered, by the cause of their connection's end.",
            "reqps",
            (f"{rate('kproxy_unanswered_requests_total', *API, by='api, cause')} > 0", "{{api}}: {{cause}}"),
            only="connections ended with requests in flight",
        ),
        series(
            "Disconnects by cause",
            "Ends of client connections. client_closed is ordinary; docs/metrics.md has the meaning of each cause.",
            "cps",
            (f"{rate('kproxy_disconnects_total', *BROKER, by='broker, cause')} > 0", "broker {{broker}}: {{cause}}"),
            only="connections ended",
        ),
        series(
            "Connections opened",
            "Client connections accepted per second, by listener. A high rate means that clients connect for each "
            "request.",
            "cps",
            (rate("kproxy_connections_total", *BROKER, by="listener"), "{{listener}}"),
            stacked=True,
        ),
        series(
            "Dials of brokers, p99",
            "Time to connect to a broker, name resolution included, without failed attempts.",
            "s",
            (quantile(0.99, "kproxy_dial_seconds", *BROKER, by="broker"), "broker {{broker}}"),
        ),
        series(
            "Dials that failed",
            "Failed connections to brokers, including those refused because they lead back to kproxy.",
            "cps",
            (rate("kproxy_dial_failures_total", *BROKER, by="broker, cause"), "broker {{broker}}: {{cause}}"),
            (rate("kproxy_loops_refused_total", *CLUSTER, by="cluster"), "{{cluster}}: loop"),
        ),
    ),
)

BOARD = board(
    "kproxy-brokers",
    "kproxy: brokers and APIs",
    "Brokers and requests that are slow or fail, with the cause.",
    ("broker", "api"),
    PARTS,
)
