"""What jobs share: groups, percentiles, rates, who is a replica, and one way to write a duration.

Duty: columns and frames that several jobs are made of. Refuses to know a single question.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from kproxy.analysis.engine import F
from kproxy.protocol.schema import schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MS = 1_000_000
ACCURACY = 10_000  # of approximate percentiles: exact below as many rows of a group
KEYS = ("source", "connection", "number")  # of an exchange
_FETCHERS = "^(broker-[0-9]+-fetcher-[0-9]+|ReplicaFetcherThread-[0-9]+-[0-9]+)$"  # client ids, of today and before 2.3

# What exchanges can be grouped by, beside any of their columns; and the columns that each is made of.
GROUPS: dict[str, "Callable[[], Column]"] = {
    "version": lambda: F.col("api_version"),
    "broker": lambda: F.concat_ws(":", "broker_address", "broker_port"),
    "client": lambda: F.coalesce(F.nullif("client_id", F.lit("")), "client_address"),
    "host": lambda: F.col("client_address"),
}
GROUP_COLUMNS = {
    "version": ("api_version",),
    "broker": ("broker_address", "broker_port"),
    "client": ("client_id", "client_address"),
    "host": ("client_address",),
}


_DURATIONS = (
    (7200e9, 3600e9, "h"),
    (120e9, 60e9, "min"),
    (999.5e6, 1e9, "s"),
    (999.5e3, 1e6, "ms"),
    (999.5, 1e3, "µs"),
)  # as those of `views.units`: a test holds them to the same texts


def duration_of(name: str) -> "Column":
    """A column of nanoseconds, none of them negative, for people: three digits and a unit, "3.42 s"."""
    column = F.col(name)
    text = F.when(column == 0, "0").otherwise(F.concat(column.cast("bigint").cast("string"), F.lit(" ns")))
    for least, size, unit in reversed(_DURATIONS):
        amount = column / size
        digits = F.when(amount < 9.995, F.format_number(amount, 2)).when(amount < 99.95, F.format_number(amount, 1))
        written = F.concat(digits.otherwise(F.format_number(amount, 0)), F.lit(f" {unit}"))
        text = F.when(column >= least, written).otherwise(text)
    return text


def named_groups(by: Sequence[str], every: str | None = None) -> "list[tuple[str, Column]]":
    """Names and columns to group by, over time too where `every` is given, like "1 minute"."""
    groups = [("time", F.window("time", every)["start"])] if every else []
    return groups + [(name, GROUPS[name]() if name in GROUPS else F.col(name)) for name in by]


def groups(by: Sequence[str], every: str | None = None) -> "list[Column]":
    """The same as columns with their names."""
    return [column.alias(name) for name, column in named_groups(by, every)]


def percentiles(column: str, prefix: str, *ranks: float, unit: str = "_ns") -> "list[Column]":
    """Columns p50_ns, p99_ns, ... of a column; null where all of it is."""
    return [
        F.percentile_approx(column, rank, ACCURACY).alias(f"{prefix}p{f'{rank:g}'[2:].ljust(2, '0')}{unit}")
        for rank in ranks
    ]


def ns(milliseconds: str) -> "Column":
    """A column of milliseconds in nanoseconds."""
    return F.col(milliseconds).cast("bigint") * MS


def all_bytes() -> "Column":
    """The bytes of an exchange, both ways."""
    return F.coalesce("request_bytes", F.lit(0)) + F.coalesce("response_bytes", F.lit(0))


def rate(name: str = "exchanges") -> "list[Column]":
    """How many a second, from the first of the group to its last; null for less than two."""
    span_s = (F.max(F.unix_micros("time")) - F.min(F.unix_micros("time"))) / 1e6
    return [F.try_divide(F.count("*") - 1, span_s).alias(f"{name}_per_second")]


def topic() -> "Column":
    """A topic by its name, or by its id where no answer named it."""
    return F.coalesce("topic", "topic_id").alias("topic")


def is_replica() -> "Column":
    """Whether an exchange is a broker's own, replicating: by its replica id, else by the client id of its fetchers.

    Where a Fetch v15 or newer was read without its body the replica id is not known.
    """
    fetcher = F.coalesce(F.col("client_id").rlike(_FETCHERS), F.lit(False))
    return F.when(F.col("replica_id").isNotNull(), F.col("replica_id") >= 0).otherwise(fetcher)


def of_consumers(rows: "DataFrame", exchanges: "DataFrame", replicas: bool) -> "DataFrame":
    """Rows of `partitions` or `batches`, without those of replicas unless `replicas` asks for them."""
    if replicas:
        return rows
    fetched = exchanges.where(F.col("api").isin("Fetch", "ListOffsets")).where(is_replica())
    return rows.join(fetched.select(*KEYS), list(KEYS), "left_anti")


def with_client(rows: "DataFrame", exchanges: "DataFrame") -> "DataFrame":
    """Rows with the client of their exchange."""
    return rows.join(exchanges.select(*KEYS, GROUPS["client"]().alias("client")), list(KEYS), "left")


def version_in(versions: Callable[[Any], range]) -> "Column":
    """Whether an exchange's api and version are among those that a range of each API names."""
    pairs = [api.key * 1000 + version for api in schema().apis.values() for version in versions(api)]
    return F.coalesce((F.col("api_key") * 1000 + F.col("api_version")).isin(pairs), F.lit(False))


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of a message about a name that is not known."""
    near = get_close_matches(name, known, 3, 0.7) or [each for each in known if name and name in each][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
