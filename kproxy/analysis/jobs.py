"""The jobs: tables -> answers to an operator's questions, each a plain function DataFrame -> DataFrame.

Duty: read only the columns of `kproxy.tables`, so that a job runs the same on what `kproxy convert`, `kproxy spark
ingest` and the live recorder wrote, in a notebook as from the command line:

    from kproxy.analysis import jobs
    from kproxy.spark import table
    jobs.latency(table(spark, "tables/", "exchanges"), by=["api", "client"], every="1 minute").show()

Durations are columns `_ns`, as in the tables. Percentiles are Spark's approximate ones, exact below 10,000 rows of a
group; so memory is bounded by the number of groups. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kproxy.protocol.schema import schema
from kproxy.wire.events import ANSWERED

MS = 1_000_000
GROUP_WAITS = ("JoinGroup", "SyncGroup")  # the broker answers when the other members have come

# What exchanges can be grouped by, beside any of their columns.
GROUPS: dict[str, Callable[[], Column]] = {
    "version": lambda: F.col("api_version"),
    "broker": lambda: F.concat_ws(":", "broker_address", "broker_port"),
    "client": lambda: F.coalesce(F.nullif("client_id", F.lit("")), "client_address"),
    "host": lambda: F.col("client_address"),
}


def latency(exchanges: DataFrame, by: Sequence[str] = ("api",), every: str | None = None) -> DataFrame:
    """How long answers take: percentiles by api, version, broker, client, and over time.

    `latency_ns` runs from the request's last byte to the answer's first; `queue_p99_ns` is how much of it was spent
    behind an earlier request or a throttle of the same connection. A Fetch may wait for data (see `fetching`).
    """
    answered = exchanges.where(F.col("latency_ns").isNotNull())
    groups = _groups(by, every)
    return (
        answered.groupBy(*groups)
        .agg(
            F.count("*").alias("exchanges"),
            *_percentiles("latency_ns", "", 0.5, 0.9, 0.99, 0.999),
            F.max("latency_ns").alias("max_ns"),
            *_percentiles("queue_ns", "queue_", 0.99),
        )
        .orderBy(*(["time"] if every else []), F.desc("p99_ns"))
    )


def slow(exchanges: DataFrame, connections: DataFrame, slower_than_ms: float = 100, top: int = 100) -> DataFrame:
    """The slowest exchanges, each explained: network, throttle, long poll, queue or broker.

    The total time is cut into parts, and the largest names the cause. network: sending the request, receiving the
    answer and one round trip. throttle: what the broker held back, this answer (before KIP-219) or by muting the
    connection after an earlier one. long_poll: what a Fetch may wait (max_wait_ms), and waiting for a group's members.
    queue: behind an earlier request of the connection, since a broker serves one at a time. broker: the rest.
    """
    after = _version_in(lambda api: api.throttled_after_answer)
    throttle_ns = F.coalesce(_ns("throttle_ms"), F.lit(0))
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
            .when(F.col("max_wait_ms") > 0, F.least(_ns("max_wait_ms"), "rest_ns"))
            .otherwise(0),
        )
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


def throttle(exchanges: DataFrame, by: Sequence[str] = ("client", "api")) -> DataFrame:
    """Who is throttled, how often and how long: quotas at work."""
    throttled = F.col("throttle_ms") > 0
    return (
        exchanges.groupBy(*_groups(by))
        .agg(
            F.count("*").alias("exchanges"),
            F.count_if(throttled).alias("throttled"),
            F.avg(F.when(throttled, 1).otherwise(0)).alias("share"),
            F.sum("throttle_ms").alias("throttle_ms"),
            F.max("throttle_ms").alias("max_throttle_ms"),
            F.min(F.when(throttled, F.col("time"))).alias("first"),
            F.max(F.when(throttled, F.col("time"))).alias("last"),
        )
        .where("throttled > 0")
        .orderBy(F.desc("throttle_ms"))
    )


def errors(exchanges: DataFrame, partitions: DataFrame, by: Sequence[str] = ("api", "error")) -> DataFrame:
    """What brokers refuse: by api and error, who met it, where and when.

    An answer that is fine as a whole and not in its parts stands under each error of its partitions, or `in_parts`
    where they are not in that table; `codes` counts the errors of the answers, at every level. Requests that never got
    an answer are here too, under what became of them.
    """
    keys = ["source", "connection", "number"]
    fine = (F.col("outcome") == ANSWERED) & (F.coalesce("error_code", F.lit(0)) == 0)
    failed = exchanges.where("errors > 0 or outcome in ('unanswered', 'lost')").withColumn("fine", fine)
    parts = partitions.where("error_code != 0 and direction = 'response'")
    inner = parts.select(*keys, F.col("error").alias("part_error"), F.lit(True).alias("fine")).distinct()
    error = F.when(F.col("fine"), F.coalesce("part_error", F.lit("in_parts"))).otherwise(
        F.when(F.col("outcome") == ANSWERED, F.col("error")).otherwise(F.col("outcome"))
    )
    return (
        failed.join(inner, [*keys, "fine"], "left")
        .withColumn("error", error)
        .groupBy(*_groups(by))
        .agg(
            F.count("*").alias("exchanges"),
            F.sum("errors").alias("codes"),
            F.count_distinct(GROUPS["client"]()).alias("clients"),
            F.count_distinct(GROUPS["broker"]()).alias("brokers"),
            F.min("time").alias("first"),
            F.max("time").alias("last"),
            F.max_by(GROUPS["client"](), "time").alias("last_client"),
        )
        .orderBy(F.desc("exchanges"), *by)
    )


def talkers(exchanges: DataFrame, by: Sequence[str] = ("client", "host")) -> DataFrame:
    """Who talks most: requests and bytes each way, and the share of all bytes."""
    total = exchanges.agg(F.sum(_bytes()).alias("all_bytes"))
    return (
        exchanges.crossJoin(F.broadcast(total))
        .groupBy(*_groups(by))
        .agg(
            F.sum(_bytes()).alias("bytes"),
            F.try_divide(F.sum(_bytes()), F.first("all_bytes")).alias("share"),
            F.sum("request_bytes").alias("request_bytes"),
            F.sum("response_bytes").alias("response_bytes"),
            F.count("*").alias("exchanges"),
            *_rate(),
            F.count_distinct("connection").alias("connections"),
        )
        .orderBy(F.desc("bytes"), *by)
    )


def skew(partitions: DataFrame) -> DataFrame:
    """Hot partitions: each one's part of its topic's bytes, written and read, against an even share.

    `times_even` is 1 where a partition has what it would have if all that were seen were alike; `excess_bytes` is what
    it has above that, the most first.
    """
    moved = partitions.where(
        ((F.col("api") == "Produce") & (F.col("direction") == "request"))
        | (F.col("api").isin("Fetch", "ShareFetch") & (F.col("direction") == "response"))
    )
    per_topic = Window.partitionBy("topic", "api")
    even = F.sum("bytes").over(per_topic) / F.count("*").over(per_topic)
    return (
        moved.groupBy(_topic(), "api", "partition")
        .agg(F.sum("bytes").alias("bytes"), F.sum("records").alias("records"), F.count("*").alias("exchanges"))
        .withColumn("share", F.try_divide("bytes", F.sum("bytes").over(per_topic)))
        .withColumn("times_even", F.try_divide("bytes", even))
        .withColumn("excess_bytes", F.round(F.col("bytes") - even).cast("bigint"))
        .orderBy(F.desc("excess_bytes"), "topic", "api", "partition")
    )


def batching(batches: DataFrame, exchanges: DataFrame) -> DataFrame:
    """How well producers batch: batches, records and bytes in them, and codec, by client and topic.

    `bytes_per_record` is as sent, compressed. `ratio` is how many times larger a record is where the same topic got
    batches without compression; null where it got none, since only then is the size before it known. `single_share` is
    the share of batches with one record, which cost as much as full ones: raise linger.ms and batch.size. Old batches
    (magic 0 and 1) do not tell their records when compressed, and count neither for these nor for `records`.
    """
    counted_bytes = F.sum(F.when(F.col("records").isNotNull(), F.col("bytes")))
    sent = batches.where("api = 'Produce' and direction = 'request' and not control").withColumn("topic", _topic())
    plain = (
        sent.where("codec = 'none'").groupBy("topic").agg(F.try_divide(counted_bytes, F.sum("records")).alias("plain"))
    )
    return (
        _with_client(sent, exchanges)
        .groupBy("client", "topic", "codec")
        .agg(
            F.count("*").alias("batches"),
            F.sum("records").alias("records"),
            F.sum("bytes").alias("bytes"),
            F.try_divide(counted_bytes, F.sum("records")).alias("bytes_per_record"),
            F.avg((F.col("records") <= 1).cast("int")).alias("single_share"),
            *_percentiles("records", "records_", 0.5, 0.99, unit=""),
            *_percentiles("bytes", "bytes_", 0.5, 0.99, unit=""),
        )
        .join(
            F.broadcast(plain.withColumnRenamed("topic", "of_topic")),
            F.col("topic").eqNullSafe(F.col("of_topic")),
            "left",
        )
        .withColumn("ratio", F.when(F.col("codec") != "none", F.try_divide("plain", "bytes_per_record")))
        .select(
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
        .orderBy(F.desc("batches"), "client", "topic", "codec")
    )


def fetching(exchanges: DataFrame, by: Sequence[str] = ("client", "broker")) -> DataFrame:
    """How well consumers fetch: empty fetches, polls per second, and how long the broker let them wait.

    An empty fetch that was answered at once (`hasty`) waited less than half of its max_wait_ms: over-polling. Where
    bodies were not read (`records` is null) a fetch counts neither as empty nor as hasty.
    """
    empty = F.col("records") == 0
    hasty = empty & (F.col("latency_ns") < _ns("max_wait_ms") / 2)
    return (
        exchanges.where("api in ('Fetch', 'ShareFetch') and outcome = 'answered'")
        .groupBy(*_groups(by))
        .agg(
            F.count("*").alias("fetches"),
            *_rate("fetches"),
            F.count_if(empty).alias("empty"),
            F.count_if(hasty).alias("hasty"),
            F.try_divide(F.count_if(empty), F.count_if(F.col("records").isNotNull())).alias("empty_share"),
            F.count_if(F.col("records").isNotNull()).alias("read"),
            F.sum("records").alias("records"),
            F.sum("response_bytes").alias("bytes"),
            F.max("max_wait_ms").alias("max_wait_ms"),
            *_percentiles("latency_ns", "", 0.5, 0.99),
        )
        .orderBy(F.desc("fetches"), *by)
    )


def lag(partitions: DataFrame, exchanges: DataFrame) -> DataFrame:
    """How far consumers are behind, as their fetches tell: by client, topic and partition; first, last and most."""
    fetched = partitions.where("api = 'Fetch' and direction = 'response' and lag_records is not null")
    return (
        _with_client(fetched, exchanges)
        .groupBy("client", _topic(), "partition")
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
        .orderBy(F.desc("last_lag_records"), F.desc("max_lag_records"), "client", "topic", "partition")
    )


def offsets(partitions: DataFrame, exchanges: DataFrame) -> DataFrame:
    """How groups commit: rate, the longest gap between two commits, offsets that went back, refusals."""
    commits = partitions.where("api = 'OffsetCommit'").withColumn("topic", _topic()).drop("group_id")
    asked = commits.where("direction = 'request'").join(
        exchanges.select("source", "connection", "number", "group_id"), ["source", "connection", "number"]
    )
    refused = commits.where("direction = 'response' and error_code != 0").select(
        "source", "connection", "number", "topic", "partition", F.lit(1).alias("refused")
    )
    before = Window.partitionBy("group_id", "topic", "partition").orderBy("time", "connection", "number")
    return (
        asked.join(refused, ["source", "connection", "number", "topic", "partition"], "left")
        .withColumn("gap_ns", (F.unix_micros("time") - F.unix_micros(F.lag("time").over(before))) * 1000)
        .withColumn("back", F.when(F.col("offset") < F.lag("offset").over(before), 1).otherwise(0))
        .groupBy("group_id", "topic", "partition")
        .agg(
            F.count("*").alias("commits"),
            *_rate("commits"),
            F.max("gap_ns").alias("longest_gap_ns"),
            F.min_by("offset", "time").alias("first_offset"),
            F.max_by("offset", "time").alias("last_offset"),
            F.sum("back").alias("went_back"),
            F.coalesce(F.sum("refused"), F.lit(0)).alias("refused"),
            F.max("time").alias("last"),
        )
        .orderBy("group_id", "topic", "partition")
    )


def clients(exchanges: DataFrame, connections: DataFrame, kafka: str = "4.1") -> DataFrame:
    """Which software talks which versions, and who breaks on a Kafka release.

    `verdict`: `too_old` if the highest version that the client used is older than all that the release serves (4.0
    dropped many, KIP-896), `gone` if the release has no such API, else `ok`. A client that chose an old version only
    because today's broker has no newer one is `too_old` here too: look at its software version.
    """
    release, served = _served_by(kafka)
    bounds = exchanges.sparkSession.createDataFrame(
        served, "api_key smallint, served_from smallint, served_to smallint"
    )
    software = connections.select("source", "connection", "software_name", "software_version")
    verdict = (
        F.when(F.col("served_from").isNull(), "gone")
        .when(F.col("highest") < F.col("served_from"), "too_old")
        .otherwise("ok")
    )
    return (
        exchanges.where("api_version is not null")
        .join(software.dropDuplicates(["source", "connection"]), ["source", "connection"], "left")
        .groupBy(GROUPS["client"]().alias("client"), "software_name", "software_version", "api_key", "api")
        .agg(
            F.min("api_version").alias("lowest"),
            F.max("api_version").alias("highest"),
            F.count("*").alias("exchanges"),
            F.count_distinct("client_address").alias("hosts"),
        )
        .join(F.broadcast(bounds), "api_key", "left")
        .withColumn("verdict", verdict)
        .orderBy(F.col("verdict") == "ok", "client", "api_key", "software_name", "software_version")
        .select(
            "client",
            "api",
            "verdict",
            "lowest",
            "highest",
            "served_from",
            "served_to",
            "exchanges",
            "software_name",
            "software_version",
            "hosts",
            F.lit(release).alias("kafka"),
        )
    )


def connections(connections: DataFrame, by: Sequence[str] = ("host", "broker")) -> DataFrame:
    """How connections live: churn, round-trip time, retransmissions, closed windows, resets.

    `per_minute` is churn: how many there were in a minute, from the first packet of all connections to the last.
    """
    life = F.col("end_ns") - F.col("start_ns")
    whole = connections.agg(((F.max("end_ns") - F.min("start_ns")) / 6e10).alias("minutes"))
    return (
        connections.crossJoin(F.broadcast(whole))
        .groupBy(*_groups(by))
        .agg(
            F.count("*").alias("connections"),
            F.try_divide(F.count("*"), F.first("minutes")).alias("per_minute"),
            F.percentile_approx(life, 0.5, _ACCURACY).alias("life_p50_ns"),
            *_percentiles("handshake_rtt_ns", "round_trip_", 0.5, 0.99),
            F.sum("retransmissions").alias("retransmissions"),
            F.sum("out_of_order").alias("out_of_order"),
            F.sum("zero_windows").alias("zero_windows"),
            F.count_if(F.col("close") == "reset").alias("resets"),
            F.count_if(F.col("requests") == 0).alias("unused"),
            F.sum("requests").alias("requests"),
            F.sum(F.col("client_bytes") + F.col("broker_bytes")).alias("bytes"),
            F.sum("gap_bytes").alias("gap_bytes"),
        )
        .orderBy(F.desc("connections"), *by)
    )


def compare(exchanges: DataFrame, other: DataFrame, by: Sequence[str] = ("api",)) -> DataFrame:
    """Two captures side by side: the same figures of `exchanges` and of `other` (`b_`), and how they changed."""
    groups = [column.alias(name) for name, column in _named_groups(by)]
    names = [name for name, _ in _named_groups(by)]

    def figures(table: DataFrame, mark: str) -> DataFrame:
        return table.groupBy(*groups).agg(
            F.count("*").alias(f"{mark}exchanges"),
            *_percentiles("latency_ns", mark, 0.5, 0.99),
            F.avg(F.when(F.col("errors") > 0, 1).otherwise(0)).alias(f"{mark}error_share"),
            F.sum("throttle_ms").alias(f"{mark}throttle_ms"),
            F.sum(_bytes()).alias(f"{mark}bytes"),
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


def quality(quality: DataFrame) -> DataFrame:
    """What a capture could not show, so that "slow" is told from "not captured"."""
    return (
        quality.groupBy("source", "kind")
        .agg(
            F.sum("count").alias("count"),
            F.sum("bytes").alias("bytes"),
            F.timestamp_micros(F.floor(F.min("first_ns") / 1000)).alias("first"),
            F.timestamp_micros(F.floor(F.max("last_ns") / 1000)).alias("last"),
            F.first("sentence").alias("sentence"),
        )
        .orderBy("source", "kind")
    )


@dataclass(frozen=True)
class Job:
    """A job, the tables that it takes, in order, and options to try."""

    run: Callable[..., DataFrame]
    tables: tuple[str, ...]
    example: str = ""


JOBS = {
    job.run.__name__: job
    for job in (
        Job(latency, ("exchanges",), " --by api,client --every '1 minute'"),
        Job(slow, ("exchanges", "connections"), " --slower-than-ms 500 --where \"api = 'Produce'\""),
        Job(throttle, ("exchanges",), " --by client"),
        Job(errors, ("exchanges", "partitions"), " --by api,error,client --format json"),
        Job(talkers, ("exchanges",), " --by host --limit 10"),
        Job(skew, ("partitions",), " --where \"topic = 'orders'\""),
        Job(batching, ("batches", "exchanges")),
        Job(fetching, ("exchanges",), " --by client"),
        Job(lag, ("partitions", "exchanges"), " --format parquet --out lag"),
        Job(offsets, ("partitions", "exchanges")),
        Job(clients, ("exchanges", "connections"), " --kafka 4.1 --format csv"),
        Job(connections, ("connections",), " --by host"),
        Job(compare, ("exchanges",), " --with tables-after --by api,broker"),
        Job(quality, ("quality",)),
    )
}


# --- what jobs share -------------------------------------------------------------------------------------------------

_ACCURACY = 10_000

# The parts of a total time, and how one is called beside a larger one; of equal ones the first is the cause.
_CAUSES = {
    "throttle": "throttled",
    "queue": "behind earlier requests",
    "long_poll": "waiting, as it should",
    "network": "on the way",
    "broker": "in the broker",
}


def _named_groups(by: Sequence[str], every: str | None = None) -> list[tuple[str, Column]]:
    groups = [("time", F.window("time", every)["start"])] if every else []
    return groups + [(name, GROUPS[name]() if name in GROUPS else F.col(name)) for name in by]


def _groups(by: Sequence[str], every: str | None = None) -> list[Column]:
    return [column.alias(name) for name, column in _named_groups(by, every)]


def _percentiles(column: str, prefix: str, *ranks: float, unit: str = "_ns") -> list[Column]:
    """p50_ns, p99_ns, ... of a column; null where all of it is."""
    return [
        F.percentile_approx(column, rank, _ACCURACY).alias(f"{prefix}p{f'{rank:g}'[2:].ljust(2, '0')}{unit}")
        for rank in ranks
    ]


def _ns(milliseconds: str) -> Column:
    return F.col(milliseconds).cast("bigint") * MS


def _bytes() -> Column:
    return F.coalesce("request_bytes", F.lit(0)) + F.coalesce("response_bytes", F.lit(0))


def _span_s() -> Column:
    return (F.max(F.unix_micros("time")) - F.min(F.unix_micros("time"))) / 1e6


def _rate(name: str = "exchanges") -> list[Column]:
    """How many a second, from the first of the group to its last; null for less than two."""
    return [F.try_divide(F.count("*") - 1, _span_s()).alias(f"{name}_per_second")]


def _topic() -> Column:
    """A topic by its name, or where no answer told it by its id."""
    return F.coalesce("topic", "topic_id").alias("topic")


def _with_client(rows: DataFrame, exchanges: DataFrame) -> DataFrame:
    keys = ["source", "connection", "number"]
    return rows.join(exchanges.select(*keys, GROUPS["client"]().alias("client")), keys, "left")


def _version_in(versions: Callable[[Any], range]) -> Column:
    """Whether an exchange's api and version are among those that a range of each API names."""
    pairs = [api.key * 1000 + version for api in schema().apis.values() for version in versions(api)]
    return F.coalesce((F.col("api_key") * 1000 + F.col("api_version")).isin(pairs), F.lit(False))


def _served_by(kafka: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The release that `kafka` names, and (api key, first, last version) of what it serves."""
    apis = schema().apis.values()
    releases = sorted({release for api in apis for release in api.releases})
    for release in releases:
        if release == kafka or release.startswith(kafka + "."):
            return release, [
                (api.key, api.releases[release].start, api.releases[release][-1])
                for api in apis
                if api.releases.get(release)
            ]
    raise ValueError(f"Kafka {kafka} is not known here; known are {', '.join(releases)}")


def _explanation() -> Column:
    def ms(column: str) -> Column:
        return F.format_number(F.col(column) / MS, 1)

    again = F.when(
        F.col("retransmissions") > 0,
        F.format_string("; segments sent again meanwhile: %d, so the network has a part in it", "retransmissions"),
    ).otherwise("")
    cause = F.col("cause")
    lesser = {each: F.when(cause == each, 0).otherwise(F.col(f"{each}_ns")) for each in _CAUSES}
    most = F.greatest(*lesser.values())
    more = F.when(
        most * 4 >= F.col("total_ns"),
        F.concat(
            F.lit("; another "),
            F.format_number(most / MS, 1),
            F.lit(" ms "),
            F.coalesce(*(F.when(part == most, _CAUSES[each]) for each, part in lesser.items())),
        ),
    ).otherwise("")
    text = (
        F.when(
            cause == "throttle",
            F.format_string("throttled for %s ms: the client is over a quota", ms("throttle_ns")),
        )
        .when(
            cause == "queue",
            F.format_string(
                "waited %s ms behind earlier requests of its connection; under way when it came: %d",
                ms("queue_ns"),
                "in_flight",
            ),
        )
        .when(
            (cause == "long_poll") & F.col("api").isin(*GROUP_WAITS),
            F.format_string("waited %s ms for other members of its group, as it should", ms("long_poll_ns")),
        )
        .when(
            cause == "long_poll",
            F.format_string(
                "waited %s ms for data, of the %d ms that it allowed%s",
                ms("long_poll_ns"),
                "max_wait_ms",
                F.when(F.col("records") > 0, ": not slow, data came late")
                .when(F.col("records") == 0, ": not slow, nothing new to read")
                .otherwise(""),
            ),
        )
        .when(
            cause == "network",
            F.format_string(
                "%s ms on the way: %s bytes sent, %s received",
                ms("network_ns"),
                F.coalesce("request_bytes", F.lit(0)).cast("string"),
                F.coalesce("response_bytes", F.lit(0)).cast("string"),
            ),
        )
        .otherwise(
            F.concat(
                F.format_string("the broker took %s ms", ms("broker_ns")),
                F.when(
                    (F.col("api") == "Produce") & (F.col("acks") == -1), ", replication to the others included"
                ).otherwise(""),
            )
        )
    )
    return F.concat(text, more, again)
