"""Questions about who talks: clients and their software, quotas, errors, connections.

Durations are columns `_ns`, as in the tables. Refuses to know files, sessions and formats of output.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kproxy.analysis.engine import F
from kproxy.analysis.shared import ACCURACY, GROUPS, KEYS, all_bytes, groups, percentiles, rate
from kproxy.protocol.schema import served_versions
from kproxy.wire.events import ANSWERED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AT_END = "in_flight_at_end"


def throttle(exchanges: "DataFrame", by: Sequence[str] = ("client", "api")) -> "DataFrame":
    """Who is throttled, how often and how long: quotas at work."""
    throttled = F.col("throttle_ms") > 0
    return (
        exchanges.groupBy(*groups(by))
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


def errors(
    exchanges: "DataFrame", partitions: "DataFrame", connections: "DataFrame", by: Sequence[str] = ("api", "error")
) -> "DataFrame":
    """What brokers refuse: by api and error, who met it, where and when.

    An answer that is fine as a whole and not in its parts stands under each error of its partitions, or `in_parts`
    where they are not in that table; `codes` counts the errors of the answers, at every level. Requests that never got
    an answer are here too, under what became of them. Those that waited when the capture ended, on connections that
    were still open, are `in_flight_at_end` and come last: long polls, mostly, and no error.
    """
    fine = (F.col("outcome") == ANSWERED) & (F.coalesce("error_code", F.lit(0)) == 0)
    failed = exchanges.where("errors > 0 or outcome in ('unanswered', 'lost')").withColumn("fine", fine)
    parts = partitions.where("error_code != 0 and direction = 'response'")
    inner = parts.select(*KEYS, F.col("error").alias("part_error"), F.lit(True).alias("fine")).distinct()
    open_ = connections.where("close = 'open'").select("source", "connection", F.lit(True).alias("still_open"))
    waiting = F.col("still_open") & (F.col("outcome") == "unanswered")
    error = (
        F.when(waiting, AT_END)
        .when(F.col("fine"), F.coalesce("part_error", F.lit("in_parts")))
        .otherwise(F.when(F.col("outcome") == ANSWERED, F.col("error")).otherwise(F.col("outcome")))
    )
    return (
        failed.join(inner, [*KEYS, "fine"], "left")
        .join(open_.distinct(), ["source", "connection"], "left")
        .withColumn("error", error)
        .withColumn("waits", F.coalesce(waiting, F.lit(False)).cast("int"))
        .groupBy(*groups(by))
        .agg(
            F.count("*").alias("exchanges"),
            F.sum("errors").alias("codes"),
            F.count_distinct(GROUPS["client"]()).alias("clients"),
            F.count_distinct(GROUPS["broker"]()).alias("brokers"),
            F.min("time").alias("first"),
            F.max("time").alias("last"),
            F.max_by(GROUPS["client"](), "time").alias("last_client"),
            F.min("waits").alias("only_waits"),
        )
        .orderBy("only_waits", F.desc("exchanges"), *by)
        .drop("only_waits")
    )


def talkers(exchanges: "DataFrame", by: Sequence[str] = ("client", "host")) -> "DataFrame":
    """Who talks most: requests and bytes each way, and the share of all bytes."""
    total = exchanges.agg(F.sum(all_bytes()).alias("all_bytes"))
    return (
        exchanges.crossJoin(F.broadcast(total))
        .groupBy(*groups(by))
        .agg(
            F.sum(all_bytes()).alias("bytes"),
            F.try_divide(F.sum(all_bytes()), F.first("all_bytes")).alias("share"),
            F.sum("request_bytes").alias("request_bytes"),
            F.sum("response_bytes").alias("response_bytes"),
            F.count("*").alias("exchanges"),
            *rate(),
            F.count_distinct("connection").alias("connections"),
        )
        .orderBy(F.desc("bytes"), *by)
    )


def clients(exchanges: "DataFrame", connections: "DataFrame", kafka: str = "4.1") -> "DataFrame":
    """Which software talks which versions, and who breaks on a Kafka release.

    `verdict`: `too_old` if the highest version that the client used is older than all that the release serves (4.0
    dropped many, KIP-896), `gone` if the release has no such API, else `ok`. A client that chose an old version only
    because today's broker has no newer one is `too_old` here too: look at its software version. Versions above
    `served_to` are `ok`: clients choose theirs by ApiVersions, which brokers answer since 0.10.0. Each line of Kafka
    since 0.8.0 is known by its last release, which the column `kafka` names: 3.7 and 3.7.1 are judged as 3.7.2.
    """
    release, served = served_by(kafka)
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


def served_by(kafka: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The release that stands for `kafka`, and (api key, first, last version) of what it serves.

    One release of each line is known, the last: "3.7" and "3.7.1" are both 3.7.2, and "3" is the newest 3. Raises
    ValueError for a line that is not known, with the list of those that are.
    """
    releases = served_versions()
    line, _, patch = kafka.rpartition(".")
    for release in reversed(releases):
        known = _line(release)
        if f"{known}.".startswith(f"{kafka}.") or (line == known and patch.isdecimal()):
            return release, [(key, versions[0], versions[-1]) for key, versions in releases[release].items()]
    raise ValueError(
        f"Kafka {kafka} is not known here; known are {', '.join(map(_line, releases))}, from whose official jars "
        "kproxy's layouts are made: name one of them"
    )


def _line(release: str) -> str:
    """3.7 of 3.7.2, and 0.8.2 of 0.8.2.2: before 1.0 a line had three numbers."""
    return ".".join(release.split(".")[: 3 if release.startswith("0.") else 2])


def connections(connections: "DataFrame", by: Sequence[str] = ("host", "broker")) -> "DataFrame":
    """How connections live: churn, round-trip time, retransmissions, closed windows, resets.

    `per_minute` is churn: how many there were in a minute, from the first packet of all connections to the last.
    """
    life = F.col("end_ns") - F.col("start_ns")
    whole = connections.agg(((F.max("end_ns") - F.min("start_ns")) / 6e10).alias("minutes"))
    return (
        connections.crossJoin(F.broadcast(whole))
        .groupBy(*groups(by))
        .agg(
            F.count("*").alias("connections"),
            F.try_divide(F.count("*"), F.first("minutes")).alias("per_minute"),
            F.percentile_approx(life, 0.5, ACCURACY).alias("life_p50_ns"),
            *percentiles("handshake_rtt_ns", "round_trip_", 0.5, 0.99),
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


def quality(quality: "DataFrame") -> "DataFrame":
    """What a capture could not show, so that "slow" is not taken for "not captured"."""
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
