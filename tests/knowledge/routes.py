"""The tables of insight by two routes, fed directly and by `kproxy convert`, and whether they are the same."""

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

from kproxy.insight import rows
from tests.knowledge.exchanges import Told
from tests.knowledge.truth import Run

TABLES: dict[str, type] = {
    "group_events": rows.GroupEvent,
    "rebalances": rows.Rebalance,
    "assignments": rows.Assignment,
    "leadership": rows.Leadership,
    "topology": rows.Topology,
    "changes": rows.Change,
}
Table = list[dict[str, Any]]

# Names of sources, connections and addresses are each route's own.
OWN = {"source", "cluster", "time", "connection", "number", "client_address", "client_port"}


def fed(run: Run) -> dict[str, Table]:
    """What insight says, fed with every exchange."""
    found: dict[str, Table] = {name: [] for name in TABLES}
    kinds = {kind: name for name, kind in TABLES.items()}
    for row in Told(run).finish():
        found[kinds[type(row)]].append(row._asdict())
    return found


def read(folder: Path) -> dict[str, Table]:
    """The tables of a dataset."""
    return {name: ds.dataset(folder / name, format="parquet").to_table().to_pylist() for name in TABLES}


def different(name: str, one: Table, other: Table, but: Collection[str] = OWN) -> Iterator[tuple[str, Any]]:
    """(which of them has it, row) of the rows of a table that only one of two routes has."""
    columns = sorted((set(one[0]) & set(other[0])) - set(but)) if one and other else []
    first, second = (Counter(_key(name, row, columns) for row in rows) for rows in (one, other))
    for which, only in (("one", first - second), ("other", second - first)):
        for row in only.elements():
            yield which, row


def _key(name: str, row: dict[str, Any], columns: Collection[str]) -> tuple[Any, ...]:
    row = {column: tuple(value) if isinstance(value, list) else value for column, value in row.items()}
    if name == "group_events" and row["event"] == "expired":
        # How long ago its last request was: other routes than `fed` do not keep heartbeats without an error.
        row["reason"] = str(row["reason"]).partition("its last ")[0]
    return tuple((column, row[column]) for column in columns)
