"""What a dataset says at first sight: when, who, how much, how slow, what failed. Shown after `kproxy convert`.

Duty: one pass over six columns of `exchanges` in the files of `kproxy convert`, each of which is of one source; times
come from the files' statistics, brokers from `connections`, groups and leaders from a column of their tables.
Percentiles come from histograms with STEPS buckets per doubling, so they are off by 2.2 % at most. It costs 0.12 µs of
CPU for each exchange. Refuses to know how it is shown.

Memory: a row group, a histogram of BUCKETS counts per API, MAX_NAMES names of each kind.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kproxy.tables import arrays

STEPS = 16
BUCKETS = 63 * STEPS
MAX_NAMES = 10_000
SLOWEST = 3
_NULL = -1  # no time, duration, number or port is negative

# The answer comes when the other members of the group have come: no exchange of these is slow by itself.
_GROUP_WAITS = ("JoinGroup", "SyncGroup")
_WORDS = ("api", "error", "client_id")
_NUMBERS = ("latency_ns", "total_ns", "max_wait_ms")
_OF_SLOW = ("source", "connection", "number", "muted_ns")
_TIMES = ("request_start_ns", "response_start_ns", "response_end_ns")


@dataclass
class Api:
    """The exchanges of one API. Durations are nanoseconds, of `latency_ns`; None where none was answered."""

    exchanges: int = 0
    errors: int = 0
    max_ns: int | None = None
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))

    def quantile_ns(self, q: float) -> int | None:
        """The latency that a share `q` of the answers did not exceed."""
        counts = np.cumsum(self.histogram)
        if self.max_ns is None or not counts[-1]:
            return None
        bucket = int(np.searchsorted(counts, q * counts[-1]))
        return min(self.max_ns, round(2 ** ((bucket + 0.5) / STEPS)))


@dataclass(frozen=True)
class Slow:
    """An exchange that took long. `beyond_ns` is its total time less what it allowed the broker to wait."""

    beyond_ns: int
    total_ns: int
    muted_ns: int  # of it, while an earlier throttle muted the connection
    api: str
    client: str
    source: str
    connection: int
    number: int


@dataclass
class Overview:
    """Times are nanoseconds since the epoch; None where there is no exchange."""

    first_ns: int | None = None
    last_ns: int | None = None
    apis: dict[str, Api] = field(default_factory=dict)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)  # (error, API): exchanges
    brokers: Counter[tuple[str, int | None]] = field(default_factory=Counter)  # (HOST:PORT, id): requests
    clients: Counter[str] = field(default_factory=Counter)  # client id, which may be empty: exchanges
    slowest: list[Slow] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)  # consumer groups that anything happened in, MAX_NAMES at most
    rebalances: Counter[str] = field(default_factory=Counter)  # by cause
    leadership: Counter[str] = field(default_factory=Counter)  # by change; without partitions that were first seen

    @property
    def exchanges(self) -> int:
        return sum(api.exchanges for api in self.apis.values())


def overview(folder: Path, sources: Collection[str]) -> Overview:
    """An overview of the exchanges of these sources, in the dataset `folder`."""
    found = Overview()
    for path in sorted((folder / "connections").glob("**/*.parquet")):
        with pq.ParquetFile(path) as file:
            if _source(file) in sources:
                _add_brokers(found, file.read(columns=["broker_address", "broker_port", "broker_id", "requests"]))
    for path in sorted((folder / "exchanges").glob("**/*.parquet")):
        with pq.ParquetFile(path, read_dictionary=_WORDS) as file:
            if _source(file) in sources:
                for number in range(file.num_row_groups):
                    _add(found, file, number)
    for value in _values(folder, sources, "group_events", "group_id"):
        if len(found.groups) < MAX_NAMES:
            found.groups.update(value)
    for value in _values(folder, sources, "rebalances", "cause"):
        found.rebalances.update(value)
    for value in _values(folder, sources, "leadership", "change"):
        found.leadership.update(value)
    del found.leadership["created"]
    return found


def _values(folder: Path, sources: Collection[str], table: str, column: str) -> Iterator[dict[str, int]]:
    """How often each value of a column is there, by row group."""
    for path in sorted((folder / table).glob("**/*.parquet")):
        with pq.ParquetFile(path, read_dictionary=[column]) as file:
            if _source(file) in sources:
                for number in range(file.num_row_groups):
                    counts = pc.value_counts(file.read_row_group(number, columns=[column])[column].combine_chunks())
                    yield {each["values"]: each["counts"] for each in counts.to_pylist()}


def _source(file: pq.ParquetFile) -> str | None:
    """Whose rows a file has; None if it has none."""
    if not file.num_row_groups:
        return None
    statistics = _statistics(file, 0, "source")
    return None if statistics is None else str(statistics.min)


def _statistics(file: pq.ParquetFile, row_group: int, column: str) -> Any:
    """min and max of a column; None where it has no value."""
    statistics = file.metadata.row_group(row_group).column(file.schema_arrow.get_field_index(column)).statistics
    return statistics if statistics is not None and statistics.has_min_max else None


def _add_brokers(found: Overview, rows: pa.Table) -> None:
    for row in rows.to_pylist():
        _count(found.brokers, (f"{row['broker_address']}:{row['broker_port']}", row["broker_id"]), row["requests"])


def _count(counter: Counter[Any], key: Any, count: int) -> None:
    if count and (key in counter or len(counter) < MAX_NAMES):
        counter[key] += count


class _Rows:
    """The columns of a row group as numpy arrays."""

    def __init__(self, rows: pa.Table) -> None:
        self.numbers = {name: arrays.numbers(rows[name], _NULL) for name in _NUMBERS}
        self.codes: dict[str, np.ndarray] = {}
        self.words: dict[str, list[str | None]] = {}  # what codes mean; the last is null
        for name in _WORDS:
            column = rows[name].combine_chunks()
            self.words[name] = [*column.dictionary.to_pylist(), None]
            self.codes[name] = arrays.numbers(column.indices, len(self.words[name]) - 1)

    def counts(self, name: str) -> Iterator[tuple[str | None, int]]:
        """The different values of a column, and how many rows have each; null, where it is, last."""
        yield from zip(self.words[name], np.bincount(self.codes[name]).tolist(), strict=False)


def _add(found: Overview, file: pq.ParquetFile, row_group: int) -> None:
    for name in _TIMES:
        if (times := _statistics(file, row_group, name)) is not None:
            found.first_ns = times.min if found.first_ns is None else min(found.first_ns, times.min)
            found.last_ns = times.max if found.last_ns is None else max(found.last_ns, times.max)
    rows = _Rows(file.read_row_group(row_group, columns=[*_WORDS, *_NUMBERS]))
    _add_apis(found, rows)
    for client, count in rows.counts("client_id"):
        _count(found.clients, client or "", count)
    _add_slowest(found, rows, file, row_group)


def _add_apis(found: Overview, rows: _Rows) -> None:
    words, codes = rows.words["api"], rows.codes["api"]
    failed = np.isin(rows.codes["error"], [i for i, error in enumerate(rows.words["error"]) if error in (None, "NONE")])
    wide = len(rows.words["error"])
    failures = np.bincount(codes[~failed] * wide + rows.codes["error"][~failed])
    known = rows.numbers["latency_ns"] != _NULL
    latency, mine = rows.numbers["latency_ns"][known], codes[known].astype(np.int64)
    buckets = np.minimum((np.log2(np.maximum(latency, 1)) * STEPS).astype(np.int64), BUCKETS - 1)
    histograms = np.bincount(mine * BUCKETS + buckets, minlength=len(words) * BUCKETS).reshape(-1, BUCKETS)
    largest = np.full(len(words), _NULL)
    np.maximum.at(largest, mine, latency)
    for code, (name, count) in enumerate(rows.counts("api")):
        if count and name is not None:
            api = found.apis.setdefault(name, Api())
            api.exchanges += count
            api.histogram += histograms[code]
            if largest[code] != _NULL:
                api.max_ns = max(api.max_ns or 0, int(largest[code]))
    for key in np.flatnonzero(failures).tolist():
        name, error, count = words[key // wide] or "", rows.words["error"][key % wide] or "", int(failures[key])
        found.apis[name].errors += count
        _count(found.errors, (error, name), count)


def _add_slowest(found: Overview, rows: _Rows, file: pq.ParquetFile, row_group: int) -> None:
    """Keep the SLOWEST exchanges beyond the waits that they allowed."""
    total, wait = rows.numbers["total_ns"], rows.numbers["max_wait_ms"]
    beyond = total - np.maximum(wait, 0) * np.int64(1_000_000)
    groups = [code for code, name in enumerate(rows.words["api"]) if name in _GROUP_WAITS]
    beyond[np.isin(rows.codes["api"], groups) | (total == _NULL)] = _NULL
    least = found.slowest[-1].beyond_ns if len(found.slowest) == SLOWEST else 0
    if beyond.max() <= least:
        return
    largest = np.argsort(-beyond, kind="stable")[:SLOWEST]
    others = file.read_row_group(row_group, columns=list(_OF_SLOW)).take(arrays.array(pa.int64(), largest)).to_pylist()
    for row, other in zip(largest.tolist(), others, strict=True):
        if beyond[row] > 0 and other["number"] is not None:
            api, client = (rows.words[name][rows.codes[name][row]] or "" for name in ("api", "client_id"))
            muted = other["muted_ns"] or 0
            slow = Slow(
                *(int(beyond[row]), int(total[row]), muted, api, client),
                *(other["source"], other["connection"], other["number"]),
            )
            found.slowest.append(slow)
    found.slowest = sorted(found.slowest, key=lambda slow: -slow.beyond_ns)[:SLOWEST]
