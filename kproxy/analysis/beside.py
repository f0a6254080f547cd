"""Two datasets side by side: answers whose rows have common keys, for a report that compares.

Duty: define the answers to compare, their keys and their figures; pair the rows. Changes of latencies are another job
(`compare`); single exchanges and moments have no counterpart. Refuses to know formats of output.

Bounds: ROWS rows of each answer are read; SHOWN rows of each dataset are paired with those of the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kproxy.analysis.engine import Frame, ask, first_rows
from kproxy.analysis.jobs import JOBS
from kproxy.analysis.questions import sections

ROWS = 2000
SHOWN = 12

Row = dict[str, Any]
Tables = Mapping[str, Frame]


@dataclass(frozen=True)
class Compared:
    """An answer whose rows are compared: its query, the keys of a row, its figures, and the tables that it reads."""

    ask: Callable[[Tables], Frame]
    keys: tuple[str, ...]
    numbers: tuple[str, ...]
    tables: tuple[str, ...] = sections.TABLES


@dataclass(frozen=True)
class Beside:
    """Pairs of rows with the same keys, of this dataset and of the other; None where one has no such row.

    First the first SHOWN rows of this dataset, in its order, then those of the other that are not among them.
    """

    keys: tuple[str, ...]
    numbers: tuple[str, ...]
    pairs: list[tuple[Row | None, Row | None]]


def _job(name: str, keys: tuple[str, ...], numbers: tuple[str, ...], **options: Any) -> Compared:
    job = JOBS[name]
    return Compared(
        lambda tables: job.run(*(tables[table] for table in job.tables), **options), keys, numbers, job.tables
    )


def _kinds(tables: Tables) -> Frame:
    """The flaws of all captures of a dataset together."""
    return ask(
        {"quality": tables["quality"]},
        answer="""
            select kind, cast(sum(`count`) as bigint) as `count`, cast(sum(bytes) as bigint) as bytes from quality
            group by kind order by kind""",
    )


COMPARED = {
    "batching": _job(
        "batching",
        ("client", "topic", "codec"),
        ("batches", "records", "bytes_per_record", "ratio", "single_share", "records_p50"),
    ),
    "errors": _job("errors", ("api", "error"), ("exchanges", "codes", "clients")),
    "throttle": _job("throttle", ("client",), ("throttled", "share", "throttle_ms"), by=["client"]),
    "topics": Compared(
        sections.topics,
        ("topic",),
        (
            "partitions",
            "written_bytes",
            "written_records",
            "failed_attempts",
            "lost_batches",
            "read_bytes",
            "read_records",
        ),
    ),
    "group_lag": _job("group-lag", ("group_id", "topic", "partition"), ("lag_records", "commits")),
    "groups": Compared(
        sections.groups,
        ("group_id",),
        ("members", "rebalances", "rebalancing_ns", "longest_ns", "expired", "commits_failed"),
    ),
    "leaders": Compared(sections.leaders, ("topic",), ("elections", "shrunk", "grown", "moved", "offline")),
    "connections": _job(
        "connections",
        ("broker",),
        ("connections", "round_trip_p50_ns", "round_trip_p99_ns", "retransmissions", "zero_windows", "resets"),
        by=["broker"],
    ),
    "brokers": Compared(sections.brokers, ("broker",), ("exchanges", "request_bytes", "response_bytes", "p99_ns")),
    "clients": Compared(sections.clients, ("client", "software"), ("hosts", "exchanges", "bytes")),
    "quality": Compared(_kinds, ("kind",), ("count", "bytes"), ("quality",)),
}
TABLES = tuple(dict.fromkeys(table for compared in COMPARED.values() for table in compared.tables))


def beside(name: str, ours: Tables, theirs: Tables) -> Beside:
    """The rows of one answer of COMPARED, of both datasets."""
    compared = COMPARED[name]
    found = [first_rows(compared.ask(tables), ROWS).arrow().to_pylist() for tables in (ours, theirs)]
    # Names of clusters are the captors' own: they are part of the key only where a dataset has several.
    has_clusters = any(len({row.get("cluster") for row in rows}) > 1 for rows in found)
    keys = ("cluster", *compared.keys) if has_clusters else compared.keys
    mine, other = ({_key(row, keys): row for row in rows} for rows in found)
    shown = dict.fromkeys(_key(row, keys) for rows in found for row in rows[:SHOWN])
    return Beside(keys, compared.numbers, [(mine.get(key), other.get(key)) for key in shown])


def _key(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in keys)
