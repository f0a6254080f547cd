"""Questions about topics and their consumers: hot partitions, batches, fetches, lag, commits.

Brokers that replicate fetch and list offsets too: they are left out unless `replicas` asks for them. Topics of
different clusters are never counted together. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kproxy.analysis.engine import F, Window
from kproxy.analysis.shared import (
    KEYS,
    groups,
    is_replica,
    ns,
    of_consumers,
    percentiles,
    rate,
    topic,
    with_client,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def skew(
    partitions: "DataFrame", exchanges: "DataFrame", replicas: bool = False, where: str | None = None
) -> "DataFrame":
    """Hot partitions: each one's part of its topic's bytes, written and read, against an even share.

    `partitions` is how many the topic has at least: the highest number in any request or answer, and one. `times_even`
    is 1 where a partition has what it would have if all of those were alike; `excess_bytes` is what it has above that,
    the most first; `idle` is how many of them got nothing.
    """
    seen = partitions.groupBy("cluster", topic()).agg((F.max("partition") + 1).alias("partitions"))
    moved = partitions.where(
        ((F.col("api") == "Produce") & (F.col("direction") == "request"))
        | (F.col("api").isin("Fetch", "ShareFetch") & (F.col("direction") == "response"))
    )
    per_topic = Window.partitionBy("cluster", "topic", "api")
    even = F.sum("bytes").over(per_topic) / F.col("partitions")
    answer = (
        of_consumers(moved, exchanges, replicas)
        .groupBy("cluster", topic(), "api", "partition")
        .agg(F.sum("bytes").alias("bytes"), F.sum("records").alias("records"), F.count("*").alias("exchanges"))
        .join(seen.withColumnsRenamed({"cluster": "of_cluster", "topic": "of_topic"}), _same_topic())
        .withColumn("share", F.try_divide("bytes", F.sum("bytes").over(per_topic)))
        .withColumn("times_even", F.try_divide("bytes", even))
        .withColumn("excess_bytes", F.round(F.col("bytes") - even).cast("bigint"))
        .withColumn("idle", F.col("partitions") - F.count_if(F.col("bytes") > 0).over(per_topic))
        .drop("of_cluster", "of_topic")
    )
    if where is not None:
        answer = answer.where(where)
    return answer.select(
        "cluster",
        "topic",
        "api",
        "partition",
        "bytes",
        "records",
        "exchanges",
        "share",
        "times_even",
        "excess_bytes",
        "partitions",
        "idle",
    ).orderBy(F.desc("excess_bytes"), "cluster", "topic", "api", "partition")


def _same_topic() -> "list[Column]":
    return [F.col(name).eqNullSafe(F.col(f"of_{name}")) for name in ("cluster", "topic")]


def batching(batches: "DataFrame", exchanges: "DataFrame") -> "DataFrame":
    """How well producers batch: batches, records and bytes in them, and codec, by client and topic.

    `bytes_per_record` is as sent, compressed. `ratio` is how many times larger a record is where the same topic got
    batches without compression; null where it got none, since only then is the size before it known. `single_share` is
    the share of batches with one record, which cost as much as full ones: raise linger.ms and batch.size. Old batches
    (magic 0 and 1) hide their number of records when compressed, and count neither for these nor for `records`.
    """
    counted_bytes = F.sum(F.when(F.col("records").isNotNull(), F.col("bytes")))
    sent = batches.where("api = 'Produce' and direction = 'request' and not control").withColumn("topic", topic())
    plain = (
        sent.where("codec = 'none'")
        .groupBy(F.col("cluster").alias("of_cluster"), F.col("topic").alias("of_topic"))
        .agg(F.try_divide(counted_bytes, F.sum("records")).alias("plain"))
    )
    return (
        with_client(sent, exchanges)
        .groupBy("cluster", "client", "topic", "codec")
        .agg(
            F.count("*").alias("batches"),
            F.sum("records").alias("records"),
            F.sum("bytes").alias("bytes"),
            F.try_divide(counted_bytes, F.sum("records")).alias("bytes_per_record"),
            F.avg((F.col("records") <= 1).cast("int")).alias("single_share"),
            *percentiles("records", "records_", 0.5, 0.99, unit=""),
            *percentiles("bytes", "bytes_", 0.5, 0.99, unit=""),
        )
        .join(F.broadcast(plain), _same_topic(), "left")
        .withColumn("ratio", F.when(F.col("codec") != "none", F.try_divide("plain", "bytes_per_record")))
        .select(
            "cluster",
            "client",
            "topic",
            "codec",
            "batches",
            "records",
            "bytes",
            "bytes_per_record",
            "ratio",
            "single_share",
            "records_p50",
            "records_p99",
            "bytes_p50",
            "bytes_p99",
        )
        .orderBy(F.desc("batches"), "cluster", "client", "topic", "codec")
    )


def fetching(exchanges: "DataFrame", by: Sequence[str] = ("client", "broker"), replicas: bool = False) -> "DataFrame":
    """How well consumers fetch: empty fetches, polls per second, and how long the broker let them wait.

    An empty fetch that was answered at once (`hasty`) waited less than half of its max_wait_ms: over-polling. Where
    bodies were not read (`records` is null) a fetch counts neither as empty nor as hasty.
    """
    empty = F.col("records") == 0
    hasty = empty & (F.col("latency_ns") < ns("max_wait_ms") / 2)
    fetches = exchanges.where("api in ('Fetch', 'ShareFetch') and outcome = 'answered'")
    return (
        (fetches if replicas else fetches.where(~is_replica()))
        .groupBy(*groups(by))
        .agg(
            F.count("*").alias("fetches"),
            *rate("fetches"),
            F.count_if(empty).alias("empty"),
            F.count_if(hasty).alias("hasty"),
            F.try_divide(F.count_if(empty), F.count_if(F.col("records").isNotNull())).alias("empty_share"),
            F.count_if(F.col("records").isNotNull()).alias("read"),
            F.sum("records").alias("records"),
            F.sum("response_bytes").alias("bytes"),
            F.max("max_wait_ms").alias("max_wait_ms"),
            *percentiles("latency_ns", "", 0.5, 0.99),
        )
        .orderBy(F.desc("fetches"), *by)
    )


def lag(partitions: "DataFrame", exchanges: "DataFrame", replicas: bool = False) -> "DataFrame":
    """How far consumers are behind, as their fetches say: by client, topic and partition; first, last and most."""
    fetched = partitions.where("api = 'Fetch' and direction = 'response' and lag_records is not null")
    return (
        with_client(of_consumers(fetched, exchanges, replicas), exchanges)
        .groupBy("cluster", "client", topic(), "partition")
        .agg(
            F.count("*").alias("fetches"),
            F.min_by("lag_records", "time").alias("first_lag_records"),
            F.max_by("lag_records", "time").alias("last_lag_records"),
            F.max("lag_records").alias("max_lag_records"),
            F.max_by("lag_ns", "time").alias("last_lag_ns"),
            F.max_by("high_watermark", "time").alias("high_watermark"),
            F.max("time").alias("last"),
        )
        .withColumn("growing", F.col("last_lag_records") > F.col("first_lag_records"))
        .orderBy(F.desc("last_lag_records"), F.desc("max_lag_records"), "cluster", "client", "topic", "partition")
    )


def offsets(partitions: "DataFrame", exchanges: "DataFrame", where: str | None = None) -> "DataFrame":
    """How groups commit: rate, the longest gap between two commits, offsets that went back, refusals.

    Commits of transactions (TxnOffsetCommit) are among them. A condition leaves commits out once the gaps between all
    of them are known.
    """
    commits = partitions.where("api in ('OffsetCommit', 'TxnOffsetCommit')").withColumn("topic", topic())
    asked = (
        commits.where("direction = 'request'").drop("group_id").join(exchanges.select(*KEYS, "group_id"), list(KEYS))
    )
    refused = commits.where("direction = 'response' and error_code != 0").select(
        *KEYS, "topic", "partition", F.lit(1).alias("refused")
    )
    before = Window.partitionBy("cluster", "group_id", "topic", "partition").orderBy("time", "connection", "number")
    rows = (
        asked.join(refused, [*KEYS, "topic", "partition"], "left")
        .withColumn("gap_ns", (F.unix_micros("time") - F.unix_micros(F.lag("time").over(before))) * 1000)
        .withColumn("back", F.when(F.col("offset") < F.lag("offset").over(before), 1).otherwise(0))
    )
    if where is not None:
        rows = rows.where(where)
    return (
        rows.groupBy("cluster", "group_id", "topic", "partition")
        .agg(
            F.count("*").alias("commits"),
            *rate("commits"),
            F.max("gap_ns").alias("longest_gap_ns"),
            F.min_by("offset", "time").alias("first_offset"),
            F.max_by("offset", "time").alias("last_offset"),
            F.sum("back").alias("went_back"),
            F.coalesce(F.sum("refused"), F.lit(0)).alias("refused"),
            F.max("time").alias("last"),
        )
        .orderBy("cluster", "group_id", "topic", "partition")
    )
