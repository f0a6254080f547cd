"""Questions about time: how long answers take, which took longest and why, and how two captures differ.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kproxy.analysis.engine import F
from kproxy.analysis.shared import (
    GROUPS,
    MS,
    all_bytes,
    duration_of,
    groups,
    named_groups,
    ns,
    percentiles,
    version_in,
)
from kproxy.wire.events import ANSWERED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

GROUP_WAITS = ("JoinGroup", "SyncGroup")  # the broker answers when the other members have come

# The parts of a total time, and how one is called beside a larger one; of equal ones the first is the cause.
_CAUSES = {
    "throttle": "throttled",
    "queue": "behind earlier requests",
    "long_poll": "of expected wait (long poll)",
    "network": "on the network",
    "broker": "in the broker",
}


def latency(exchanges: "DataFrame", by: Sequence[str] = ("api",), every: str | None = None) -> "DataFrame":
    """How long answers take: percentiles by api, version, broker, client, and over time.

    `latency_ns` runs from the request's last byte to the answer's first; `queue_p99_ns` is how much of it was spent
    behind an earlier request of the same connection, `muted_p99_ns` while the broker had muted the connection after
    throttling it. A Fetch may wait for data (see `fetching`).
    """
    answered = exchanges.where(F.col("latency_ns").isNotNull())
    return (
        answered.groupBy(*groups(by, every))
        .agg(
            F.count("*").alias("exchanges"),
            *percentiles("latency_ns", "", 0.5, 0.9, 0.99, 0.999),
            F.max("latency_ns").alias("max_ns"),
            *percentiles("queue_ns", "queue_", 0.99),
            *percentiles("muted_ns", "muted_", 0.99),
        )
        .orderBy(*(["time"] if every else []), F.desc("p99_ns"))
    )


def slow(exchanges: "DataFrame", connections: "DataFrame", slower_than_ms: float = 100, top: int = 100) -> "DataFrame":
    """The slowest exchanges, each explained: network, throttle, long poll, queue or broker.

    The total time is cut into parts, and the largest names the cause. network: sending the request, receiving the
    answer and one round trip. throttle: what the broker held back, this answer (before KIP-219) or by muting the
    connection after earlier ones. long_poll: what a Fetch may wait (max_wait_ms), and waiting for a group's members.
    queue: behind an earlier request of the connection, since a broker serves one at a time. broker: the rest.
    """
    after = version_in(lambda api: api.throttled_after_answer)
    throttle_ns = F.coalesce(ns("throttle_ms"), F.lit(0))
    parts = (
        exchanges.where((F.col("outcome") == ANSWERED) & (F.col("total_ns") > slower_than_ms * MS))
        .join(
            connections.select("source", "connection", "handshake_rtt_ns").dropDuplicates(["source", "connection"]),
            ["source", "connection"],
            "left",
        )
        .withColumn("wait_ns", F.coalesce(F.col("latency_ns"), F.lit(0)))
        .withColumn("mute_ns", F.coalesce("muted_ns", F.lit(0)))
        .withColumn("queue_ns", F.coalesce("queue_ns", F.lit(0)))
        .withColumn("served_ns", F.col("wait_ns") - F.col("mute_ns") - F.col("queue_ns"))
        .withColumn("held_ns", F.when(after, 0).otherwise(F.least(throttle_ns, "served_ns")))
        .withColumn("rest_ns", F.col("served_ns") - F.col("held_ns"))
        .withColumn(
            "long_poll_ns",
            F.when(F.col("api").isin(*GROUP_WAITS), F.col("rest_ns"))
            .when(F.col("max_wait_ms") > 0, F.least(ns("max_wait_ms"), "rest_ns"))
            .otherwise(0),
        )
        .withColumn("allowed_ns", F.coalesce(ns("max_wait_ms"), F.lit(0)))
        .withColumn("work_ns", F.col("rest_ns") - F.col("long_poll_ns"))
        .withColumn("trip_ns", F.least(F.coalesce(F.col("handshake_rtt_ns"), F.lit(0)), "work_ns"))
        .withColumn("network_ns", F.col("total_ns") - F.col("wait_ns") + F.col("trip_ns"))
        .withColumn("throttle_ns", F.col("mute_ns") + F.col("held_ns"))
        .withColumn("broker_ns", F.col("work_ns") - F.col("trip_ns"))
    )
    most = F.greatest(*(f"{cause}_ns" for cause in _CAUSES))
    cause = F.coalesce(*(F.when(F.col(f"{cause}_ns") == most, cause) for cause in _CAUSES))
    return (
        parts.withColumn("cause", cause)
        .withColumn("explanation", _explanation())
        .select(
            "time",
            "total_ns",
            "cause",
            "api",
            GROUPS["client"]().alias("client"),
            GROUPS["broker"]().alias("broker"),
            "explanation",
            "api_version",
            *(f"{cause}_ns" for cause in _CAUSES),
            "retransmissions",
            "source",
            "connection",
            "number",
        )
        .orderBy(F.desc("total_ns"), "time", "connection", "number")
        .limit(top)
    )


def _explanation() -> "Column":
    again = F.when(
        F.col("retransmissions") > 0,
        F.format_string("; segments sent again meanwhile: %d, so the network has a part in it", "retransmissions"),
    ).otherwise("")
    cause = F.col("cause")
    lesser = {each: F.when(cause == each, 0).otherwise(F.col(f"{each}_ns")) for each in _CAUSES}
    most = F.greatest(*lesser.values())
    more = F.coalesce(
        *(
            F.when(
                (part == most) & (most * 4 >= F.col("total_ns")),
                F.concat(F.lit("; another "), duration_of(f"{each}_ns"), F.lit(f" {_CAUSES[each]}")),
            )
            for each, part in lesser.items()
        ),
        F.lit(""),
    )
    text = (
        F.when(
            (cause == "throttle") & (F.col("mute_ns") > F.col("held_ns")),
            F.format_string(
                "muted for %s after earlier answers that were throttled: the client is over a quota",
                duration_of("throttle_ns"),
            ),
        )
        .when(
            cause == "throttle",
            F.format_string("throttled for %s: the client is over a quota", duration_of("throttle_ns")),
        )
        .when(
            cause == "queue",
            F.format_string(
                "waited %s behind earlier requests of its connection%s; in flight when it came: %d",
                duration_of("queue_ns"),
                F.when(
                    F.col("muted_ns").isNull(), ", or muted by their throttles (tables of an older kproxy do not say)"
                ).otherwise(""),
                "in_flight",
            ),
        )
        .when(
            (cause == "long_poll") & F.col("api").isin(*GROUP_WAITS),
            F.format_string("expected wait of %s for other members of its group", duration_of("long_poll_ns")),
        )
        .when(
            cause == "long_poll",
            F.format_string(
                "expected wait (long poll): %s for data, of the %s that it allowed%s",
                duration_of("long_poll_ns"),
                duration_of("allowed_ns"),
                F.when(F.col("records") > 0, "; data came late")
                .when(F.col("records") == 0, "; nothing new to read")
                .otherwise(""),
            ),
        )
        .when(
            cause == "network",
            F.format_string(
                "%s on the network: %s bytes sent, %s received",
                duration_of("network_ns"),
                F.coalesce("request_bytes", F.lit(0)).cast("string"),
                F.coalesce("response_bytes", F.lit(0)).cast("string"),
            ),
        )
        .otherwise(
            F.concat(
                F.format_string("the broker took %s", duration_of("broker_ns")),
                F.when(
                    (F.col("api") == "Produce") & (F.col("acks") == -1), ", replication to the others included"
                ).otherwise(""),
            )
        )
    )
    return F.concat(text, more, again)


def compare(exchanges: "DataFrame", other: "DataFrame", by: Sequence[str] = ("api",)) -> "DataFrame":
    """Two captures side by side: the same figures of `exchanges` and of `other` (`b_`), and how they changed."""
    names = [name for name, _ in named_groups(by)]

    def figures(table: "DataFrame", mark: str) -> "DataFrame":
        return table.groupBy(*groups(by)).agg(
            F.count("*").alias(f"{mark}exchanges"),
            *percentiles("latency_ns", mark, 0.5, 0.99),
            F.avg(F.when(F.col("errors") > 0, 1).otherwise(0)).alias(f"{mark}error_share"),
            F.sum("throttle_ms").alias(f"{mark}throttle_ms"),
            F.sum(all_bytes()).alias(f"{mark}bytes"),
        )

    ours, theirs = figures(exchanges, "").alias("ours"), figures(other, "b_").alias("theirs")
    same = [F.col(f"ours.{name}").eqNullSafe(F.col(f"theirs.{name}")) for name in names]

    def both(*measures: str) -> Iterator[str]:
        return (name for measure in measures for name in (measure, f"b_{measure}"))

    return (
        ours.join(theirs, same, "full")
        .select(
            *(F.coalesce(f"ours.{name}", f"theirs.{name}").alias(name) for name in names),
            *both("exchanges", "p50_ns"),
            F.try_divide("b_p50_ns", "p50_ns").alias("p50_change"),
            *both("p99_ns"),
            F.try_divide("b_p99_ns", "p99_ns").alias("p99_change"),
            *both("error_share", "throttle_ms", "bytes"),
        )
        .orderBy(F.desc_nulls_first("p99_change"), *names)
    )
