"""What a dataset says at first sight: when, who, how much, how slow, what failed. Shown after `kproxy convert`.

Duty: one pass over some columns of `exchanges`, for chosen sources, in batches. Percentiles come from histograms with
STEPS buckets per doubling, so they are off by 2.2 % at most. Refuses to know how it is shown; needs no Spark.

Memory: BATCH_ROWS rows, a histogram of BUCKETS counts per API, MAX_NAMES names of each kind.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

BATCH_ROWS = 64 * 1024
STEPS = 16
BUCKETS = 63 * STEPS
MAX_NAMES = 10_000
SLOWEST = 3

# The answer comes when the other members of the group have come: no exchange of these is slow by itself.
_GROUP_WAITS = ("JoinGroup", "SyncGroup")
_COLUMNS = (
    *("source", "connection", "number", "request_start_ns", "response_start_ns", "response_end_ns"),
    *("latency_ns", "total_ns", "muted_ns", "max_wait_ms", "api", "error", "client_id", "client_address"),
    *("broker_address", "broker_port", "broker_id"),
)


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
    brokers: Counter[tuple[str, int | None]] = field(default_factory=Counter)  # (HOST:PORT, id): exchanges
    clients: Counter[str] = field(default_factory=Counter)  # client id, or address without one: exchanges
    slowest: list[Slow] = field(default_factory=list)

    @property
    def exchanges(self) -> int:
        return sum(api.exchanges for api in self.apis.values())


def overview(folder: Path, sources: Collection[str]) -> Overview:
    """An overview of the exchanges of these sources, in the dataset `folder`."""
    found = Overview()
    table = folder / "exchanges"
    if not table.is_dir() or not sources:
        return found
    dataset = ds.dataset(table, format="parquet", partitioning=None)
    chosen = pc.field("source").isin(list(sources))
    for batch in dataset.to_batches(columns=list(_COLUMNS), filter=chosen, batch_size=BATCH_ROWS):
        if batch.num_rows:
            _add(found, batch)
    return found


def _add(found: Overview, batch: pa.RecordBatch) -> None:
    times = [pc.min_max(batch[name]).as_py() for name in ("request_start_ns", "response_start_ns", "response_end_ns")]
    starts = [time["min"] for time in times if time["min"] is not None]
    ends = [time["max"] for time in times if time["max"] is not None]
    if starts:
        found.first_ns = min(starts) if found.first_ns is None else min(found.first_ns, *starts)
        found.last_ns = max(ends) if found.last_ns is None else max(found.last_ns, *ends)
    _add_apis(found, batch)
    rows = pa.Table.from_batches([batch])
    failed = rows.filter(pc.not_equal(rows["error"], "NONE"))
    for row in failed.group_by(["error", "api"]).aggregate([([], "count_all")]).to_pylist():
        found.apis[row["api"]].errors += row["count_all"]
        _count(found.errors, (row["error"], row["api"]), row["count_all"])
    for row in rows.group_by(["client_id", "client_address"]).aggregate([([], "count_all")]).to_pylist():
        _count(found.clients, row["client_id"] or row["client_address"], row["count_all"])
    for row in rows.group_by(["broker_address", "broker_port", "broker_id"]).aggregate([([], "count_all")]).to_pylist():
        _count(found.brokers, (f"{row['broker_address']}:{row['broker_port']}", row["broker_id"]), row["count_all"])
    _add_slowest(found, rows)


def _count(counter: Counter[Any], key: Any, count: int) -> None:
    if key in counter or len(counter) < MAX_NAMES:
        counter[key] += count


def _add_apis(found: Overview, batch: pa.RecordBatch) -> None:
    names = pc.dictionary_encode(batch["api"])
    words = names.dictionary.to_pylist()
    codes = names.indices.to_numpy(zero_copy_only=False)
    counts = np.bincount(codes, minlength=len(words))
    known = pc.is_valid(batch["latency_ns"]).to_numpy(zero_copy_only=False)
    latency = pc.fill_null(batch["latency_ns"], 0).to_numpy(zero_copy_only=False)[known]
    buckets = np.minimum((np.log2(np.maximum(latency, 1)) * STEPS).astype(np.int64), BUCKETS - 1)
    histograms = np.bincount(codes[known] * BUCKETS + buckets, minlength=len(words) * BUCKETS)
    for code, name in enumerate(words):
        api = found.apis.setdefault(name, Api())
        api.exchanges += int(counts[code])
        api.histogram += histograms[code * BUCKETS : (code + 1) * BUCKETS]
        mine = latency[codes[known] == code]
        if len(mine):
            api.max_ns = max(api.max_ns or 0, int(mine.max()))


def _add_slowest(found: Overview, rows: pa.Table) -> None:
    """Keep the SLOWEST exchanges beyond the waits that they allowed."""
    rows = rows.filter(
        pc.and_(
            pc.and_(pc.is_valid(rows["total_ns"]), pc.is_valid(rows["number"])),
            pc.invert(pc.is_in(rows["api"], value_set=pa.array(_GROUP_WAITS))),
        )
    )
    waits = pc.multiply(pc.fill_null(rows["max_wait_ms"], 0).cast(pa.int64()), 1_000_000)
    beyond = pc.subtract(rows["total_ns"], waits)
    rows = rows.append_column("beyond_ns", beyond)
    largest = pc.select_k_unstable(rows, k=SLOWEST, sort_keys=[("beyond_ns", "descending")])
    new = [
        Slow(
            row["beyond_ns"],
            row["total_ns"],
            row["muted_ns"] or 0,
            row["api"],
            row["client_id"] or row["client_address"],
            row["source"],
            row["connection"],
            row["number"],
        )
        for row in rows.take(largest).to_pylist()
        if row["beyond_ns"] > 0
    ]
    found.slowest = sorted([*found.slowest, *new], key=lambda slow: -slow.beyond_ns)[:SLOWEST]
