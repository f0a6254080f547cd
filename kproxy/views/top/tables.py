"""The tables of `kproxy top`: their columns, the place that a row opens, and the text of a cell; also as plain text.

Duty: fits columns to a width, sorts, filters. `plain` escapes text of peers. Bounded: TEXT characters of a value.
"""

import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from kproxy.views import units
from kproxy.views.operator import age
from kproxy.views.top import explanations
from kproxy.views.top.figures import AtLeast, Figures, Row
from kproxy.views.top.source import Source

TEXT = 300
ROWS = 500  # on the screen; the filter finds further rows
LARGEST = 100  # rows of a list of /api/live, at most
GAP = 2
WRAP = 56  # characters of a line of details, which fits 80 columns
MOST = 4000  # characters of a value in the details
_TURNS = {"R", "AL", "AN"}  # bidirectional classes after which a terminal may write from right to left


def plain(value: Any) -> str:
    """Return a value as text that stays in its cell: no control, combining or right-to-left characters."""
    text = str(value)
    if text.isascii() and text.isprintable() and len(text) <= TEXT:
        return text
    cut = len(text) > TEXT
    parts = []
    for each in text[:TEXT]:
        odd = not each.isprintable() or unicodedata.combining(each) or unicodedata.bidirectional(each) in _TURNS
        parts.append(each.encode("unicode_escape").decode() if odd else each)
    return "".join(parts) + ("…" if cut else "")


def _text(value: Any) -> str:
    return "–" if value is None or value == "" else plain(value)


def _figure(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "–" if value is None else show(value) if isinstance(value, int | float) else plain(value)


_count = _figure(lambda value: f"{value:,}")
_least_count = _figure(lambda value: f"≥ {value:,}" if isinstance(value, AtLeast) else f"{value:,}")
_rate = _figure(units.number)
_seconds = _figure(lambda value: units.duration(value * 1e9))
_milliseconds = _figure(lambda value: units.duration(value * 1e6))
_bytes = _figure(units.size)
_byte_rate = _figure(units.rate)
_age = _figure(age)
_BARS = "▁▂▃▄▅▆▇█"


def _bars(values: Sequence[float] | None) -> str:
    """Return a bar for each value; the largest value has the highest bar."""
    most = max(values or (), default=0)
    return "".join(_BARS[min(7, int(8 * value / most))] if most else _BARS[0] for value in (values or ())[-10:])


_BY_ENDING = {
    "_s": _seconds,
    "_ms": _milliseconds,
    "_ns": _figure(units.duration),
    "bytes": _bytes,
    "_share": _figure(lambda value: f"{value:.1%}"),
}
_clock = _figure(lambda value: units.time(int(value) * 1000)[11:])


@dataclass(frozen=True)
class Column:
    """A column. key: of its value in a row. rank: the highest ranks are left out first. missing: see `text`."""

    key: str
    title: str
    show: Callable[[Any], str] = _text
    rank: int = 0
    least: int = 8  # cells of a text column
    is_bad: bool = False  # a value above 0 stands out
    missing: str = ""  # key of the number of parts that the value lacks

    @property
    def is_figure(self) -> bool:
        return self.show is not _text

    def text(self, row: Row) -> str:
        """Return the cell of a row; "unknown" if there is no value because all its parts are missing."""
        value = row.get(self.key)
        return "unknown" if value is None and row.get(self.missing) else self.show(value)

    def rank_of(self, row: Row) -> Any:
        """Return the sort key of a row; None without a value. A value of 0 with missing parts sorts above 0."""
        return row.get(self.key) or (0.5 if row.get(self.missing) else row.get(self.key))


@dataclass(frozen=True)
class Place:
    """A place on the screen: a table, and the arguments of its `rows`."""

    table: str
    of: tuple[Any, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table. rows(source, *of): may raise KproxyError. sort: the initial column. opens(row): the place for Enter."""

    name: str
    columns: tuple[Column, ...]
    rows: Callable[..., list[Row]]
    sort: str
    opens: Callable[[Row], Place | None] = lambda row: None
    nothing: str = "nothing yet"
    key: tuple[str, ...] = ()


_MAX_LAG = Column("max_lag_records", "max lag", _least_count, 1, missing="lag_unknown_partitions")
_CLUSTER = Column("cluster", "cluster", rank=3, least=7)
_TRAFFIC = (
    Column("requests_per_s", "req/s", _rate),
    Column("p50_s", "p50", _seconds, 1),
    Column("p99_s", "p99", _seconds),
    Column("wait_p99_s", "wait p99", _seconds, 1),
    Column("errors_per_s", "errors/s", _rate, 1, is_bad=True),
    Column("request_bytes_per_s", "to broker", _byte_rate, 2),
    Column("response_bytes_per_s", "to client", _byte_rate, 2),
    Column("recent_requests_per_s", "last 10 s", _bars, 3),
)
_SO_FAR = (
    Column("requests", "requests", _count, 4),
    Column("errors", "errors", _count, 4, is_bad=True),
    Column("throttled", "throttled", _count, 5, is_bad=True),
)


def _values(row: Row) -> Place:
    return Place("details", (tuple(row.items()),), "details")


def _help(source: Source, name: str) -> list[Row]:
    """Return the help of a table: the keys, and the meaning of its columns."""
    shown = [column for column in TABLES[name].columns if column.rank != _HIDDEN]
    return _wrapped(explanations.of((column.key, column.title) for column in shown))


def _details(source: Source, pairs: Sequence[tuple[str, Any]]) -> list[Row]:
    lines = []
    for name, value in pairs:
        inner = value.items() if isinstance(value, Mapping) else ()
        shown = ", ".join(f"{_bare(key)} {_detail(key, one)}" for key, one in inner) if inner else _detail(name, value)
        lines.append((_title(name), shown))
    return _wrapped(lines)


def _wrapped(lines: Iterable[tuple[str, str]]) -> list[Row]:
    """Return rows of names and texts; a text longer than WRAP takes several rows."""
    rows: list[Row] = []
    for name, text in lines:
        for number, line in enumerate(textwrap.wrap(text[:MOST], WRAP) or ["–"]):
            rows.append({"at": len(rows), "name": " " if number else name, "value": line})
    return rows


def _title(name: str) -> str:
    """Return the title of a value's column, or its name without the unit if it has no column."""
    for table in TABLES.values():
        for column in table.columns:
            if column.key == name and column.rank != _HIDDEN:
                return column.title
    return _bare(name)


def _bare(name: str) -> str:
    """Return a name without its unit, which the value shows."""
    return plain(name.removesuffix("_ns").removesuffix("_us").removesuffix("_ms").removesuffix("_s").replace("_", " "))


def _detail(name: str, value: Any) -> str:
    """Return a value as text; the suffix of its name is the unit."""
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "–"
    if value is None or isinstance(value, bool | str):
        return "–" if value in (None, "") else str(value)
    if name.endswith(("_us", "_ns")) and value > 1e15:
        return f"{units.time(int(value) * (1000 if name.endswith('_us') else 1))} UTC"
    for ending, show in _BY_ENDING.items():
        if name.endswith(ending) and isinstance(value, int | float):
            return show(value)
    return units.number(value) if isinstance(value, float) else str(value)


def _finding(row: Row) -> Place:
    """Return the place with all fields of a finding, in reading order; the command for details is last."""
    names = ("title", "severity", "cluster", "where", "since_ns", "until_ns", "evidence", "why", "change", "settings")
    fields = {name: row.get(name) for name in names}
    return _values(fields | {"ask_a_recording": f"kproxy analyze {row.get('job')} TABLES"})


def _findings(source: Source) -> list[Row]:
    order = {"critical": 0, "warning": 1, "note": 2}
    rows = source.findings()
    return [row | {"rank": order.get(str(row.get("severity")), 3)} for row in rows]


TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        Table(
            "apis",
            (_CLUSTER, Column("api", "api", least=12), *_TRAFFIC, *_SO_FAR),
            lambda source: source.figures.traffic(("cluster", "api"), of="apis"),
            "requests_per_s",
            lambda row: Place("api_brokers", (row["cluster"], row["api"]), f"{row['api']} by broker"),
            "no requests yet",
        ),
        Table(
            "brokers",
            (
                *(_CLUSTER, Column("broker", "broker", least=9), *_TRAFFIC),
                Column("in_flight", "in flight", _count, 1),
                Column("connections", "conns", _count, 3),
                Column("disconnects", "disconnects", _count, 5),
                *_SO_FAR,
            ),
            lambda source: source.figures.brokers(),
            "requests_per_s",
            lambda row: Place("broker_apis", (row["cluster"], row["broker"]), f"broker {row['broker']} by API"),
            "no brokers yet",
        ),
        Table(
            "topics",
            (
                *(_CLUSTER, Column("topic", "topic", least=14)),
                Column("produced_bytes_per_s", "written", _byte_rate),
                Column("produced_records_per_s", "records/s", _rate, 2),
                Column("fetched_bytes_per_s", "read", _byte_rate),
                Column("fetched_records_per_s", "records/s", _rate, 2),
                _MAX_LAG,
                Column("produced_bytes", "written so far", _bytes, 4),
                Column("fetched_bytes", "read so far", _bytes, 4),
            ),
            lambda source: source.figures.topics(),
            "produced_bytes_per_s",
            lambda row: Place("lags", (row["cluster"], row["topic"]), f"consumers of {row['topic']}"),
            'no topics: they need detail = "topics" (--detail topics)',
        ),
        Table(
            "clients",
            (
                *(_CLUSTER, Column("client_id", "client id", least=16), Column("software", "software", least=12)),
                Column("version", "version", rank=2, least=7),
                Column("connections", "conns", _count),
            ),
            lambda source: source.figures.clients(),
            "connections",
            lambda row: Place(
                "client_connections", (row["client_id"],), f"connections of {row['client_id'] or 'no client id'}"
            ),
            "no clients yet",
        ),
        Table(
            "groups",
            (
                *(_CLUSTER, Column("group", "group", least=14), Column("state", "state", least=8)),
                *(Column("protocol", "protocol", rank=2), Column("type", "type")),
                Column("members", "members", _count),
                Column("generation", "generation", _count, 2),
                Column("rebalances", "rebalances", _count),
                Column("rebalance_s", "time in them", _seconds, 3),
                Column("refused", "refused", _count, 3, is_bad=True),
                _MAX_LAG,
            ),
            lambda source: source.figures.groups(),
            "rebalances",
            lambda row: Place("members", (row["cluster"], row["group"]), f"members of {row['group']}"),
            'no group has joined through it yet; groups need detail = "topics" (--detail topics)',
        ),
        Table(
            "connections",
            (
                *(Column("number", "number", _count, 1), Column("client", "client", least=15)),
                *(_CLUSTER, Column("client_id", "client id", least=12), Column("broker", "broker", least=6)),
                Column("requests_pending", "in flight", _count),
                Column("requests", "requests", _count),
                Column("bytes_in", "from client", _bytes, 2),
                Column("bytes_out", "to client", _bytes, 2),
                Column("age_s", "age", _age, 2),
                *(Column("principal", "principal", rank=4), Column("software", "software", rank=5, least=12)),
                Column("tls", "tls", rank=6),
            ),
            lambda source: source.connections(),
            "requests_pending",
            lambda row: Place("requests", (row["number"],), f"in flight, connection {row['number']}"),
            "no connections",
        ),
        Table(
            "slow",
            (
                Column("at_us", "at (UTC)", _clock),
                *(_CLUSTER, Column("api", "api", least=8), Column("broker", "broker", least=6)),
                Column("client_id", "client id", least=12),
                Column("wait_s", "whole wait", _seconds),
                Column("broker_s", "in broker", _seconds),
                Column("over_s", "too long", _seconds, 1),
                Column("queue_s", "in queue", _seconds, 2),
                Column("muted_s", "muted", _seconds, 3),
                Column("throttle_ms", "throttle", _milliseconds, 3),
                Column("request_bytes", "request", _bytes, 4),
                Column("response_bytes", "response", _bytes, 4),
                *(Column("client", "client", rank=5), Column("error", "error", rank=2, is_bad=True)),
            ),
            lambda source: source.figures.slow(),
            "at_us",
            _values,
            "nothing was slow since kproxy top began",
            ("connection", "number"),
        ),
        Table(
            "errors",
            (
                *(_CLUSTER, Column("error", "error", least=20), Column("api", "api", least=10)),
                Column("broker", "broker", least=8),
                Column("answers_per_s", "answers/s", _rate, is_bad=True),
                Column("answers", "answers", _count),
            ),
            lambda source: source.figures.errors(),
            "answers_per_s",
            lambda row: Place("broker_apis", (row["cluster"], row["broker"]), f"broker {row['broker']} by API"),
            "no errors",
        ),
        Table(
            "findings",
            (
                Column("rank", "rank", _count, 9),
                *(Column("severity", "severity"), _CLUSTER, Column("title", "what", least=20)),
                Column("where", "where", least=16),
            ),
            _findings,
            "rank",
            _finding,
            "nothing stands out",
        ),
        Table(
            "api_brokers",
            (Column("broker", "broker", least=9), *_TRAFFIC, *_SO_FAR),
            lambda source, cluster, api: source.figures.traffic(("broker",), lambda key: key[::2] == (cluster, api)),
            "requests_per_s",
        ),
        Table(
            "broker_apis",
            (Column("api", "api", least=12), *_TRAFFIC, *_SO_FAR),
            lambda source, cluster, broker: source.figures.traffic(("api",), lambda key: key[:2] == (cluster, broker)),
            "requests_per_s",
        ),
        Table(
            "lags",
            (
                *(Column("consumer", "consumer", least=16), Column("consumer_is", "is", least=9)),
                Column("lag_records", "lag", _least_count, missing="lag_unknown_partitions"),
                Column("lag_s", "behind", _seconds),
                Column("lag_unknown_partitions", "unknown partitions", _count, 1),
            ),
            lambda source, cluster, topic: source.figures.lags(cluster, topic),
            "lag_records",
            nothing="nobody was seen to read it",
        ),
        Table(
            "members",
            (
                *(Column("member_id", "member", least=20), Column("client_id", "client id", least=12)),
                Column("instance_id", "group.instance.id", rank=1, least=12),
            ),
            lambda source, cluster, group: source.members(cluster, group),
            "member_id",
            _values,
            "no members",
        ),
        Table(
            "requests",
            (
                *(Column("number", "number", _count, 3), Column("api", "api", least=12)),
                *(Column("version", "version", _count), Column("correlation_id", "correlation", _count, 1)),
                *(Column("client_id", "client id", rank=1, least=12), Column("bytes", "bytes", _bytes, 1)),
                Column("pending_s", "waits for", _seconds),
                *(Column("is_whole", "whole", rank=2, least=5), Column("answer_begun", "answered", rank=2, least=5)),
            ),
            lambda source, connection: source.requests(connection),
            "pending_s",
            _values,
            "no request in flight",
        ),
        Table(
            "details",
            (Column("at", "at", _count, 9), Column("name", "name", least=16), Column("value", "value", least=40)),
            _details,
            "at",
        ),
        Table(
            "help",
            (Column("at", "at", _count, 9), Column("name", "key or column", least=16), Column("value", "it", least=40)),
            _help,
            "at",
        ),
    )
}
TABLES = {
    **TABLES,
    "client_connections": Table(
        "client_connections",
        TABLES["connections"].columns,
        lambda source, client_id: source.connections(client_id),
        "requests_pending",
        TABLES["connections"].opens,
        "no connections",
    ),
}
VIEWS = ("apis", "brokers", "topics", "clients", "groups", "connections", "slow", "errors", "findings")
_HIDDEN = 9  # the rank of a column that only sorts


def rows_of(source: Source, place: Place) -> list[Row]:
    """Return the rows of a place, unsorted. Raises KproxyError if the kproxy cannot answer."""
    return TABLES[place.table].rows(source, *place.of)


def is_idle(row: Row) -> bool:
    """Return whether all rates of a row are zero."""
    rates = [value for name, value in row.items() if name.endswith("_per_s") and not isinstance(value, list)]
    return bool(rates) and not any(rates)


# The figure with the largest values in a list that was cut.
_BY = {"topics": "bytes", "clients": "connections", "groups": "rebalances", "errors": "answers"}


def left_out(figures: Figures, name: str, rows: Sequence[Row]) -> str:
    """Return text about rows of a table that a kproxy did not send; "" if it is complete."""
    parts = []
    if name in _BY and figures.is_cut(name):
        parts.append(f"the {LARGEST} with the most {_BY[name]}")
    if name in ("topics", "groups", "lags") and figures.is_cut("lags"):
        parts.append(f"the {LARGEST} largest lags of all consumers")
    connections = figures.state.get("connections", 0)
    if name == "connections" and len(rows) < connections:
        parts.append(f"the oldest {len(rows):,} of {connections:,}")
    return ", ".join(parts)


def matching(table: Table, rows: Sequence[Row], wanted: str) -> list[Row]:
    """Return rows with a text column that contains `wanted`, ignoring case."""
    low = wanted.lower()
    columns = [column for column in table.columns if not column.is_figure]
    return [row for row in rows if not low or any(low in str(row.get(column.key)).lower() for column in columns)]


def ordered(table: Table, rows: Sequence[Row], key: str, descending: bool) -> list[Row]:
    """Sort by a column; rows without a value come last, equal rows keep the order of their texts at each refresh."""
    rank_of = next(column for column in table.columns if column.key == key).rank_of
    ranked = sorted(((rank_of(row), row) for row in rows), key=lambda each: _names(each[1]))
    some = [each for each in ranked if each[0] is not None]
    numbers = all(isinstance(rank, int | float) for rank, _ in some)
    some.sort(key=lambda each: each[0] if numbers else str(each[0]), reverse=descending)
    return [row for _, row in some] + [row for rank, row in ranked if rank is None]


def _names(row: Row) -> tuple[str, ...]:
    return tuple(value for value in row.values() if isinstance(value, str))


def descends(table: Table, key: str) -> bool:
    """Return whether a column is sorted in descending order at first."""
    column = next(each for each in table.columns if each.key == key)
    return column.is_figure and column.rank != _HIDDEN


def fitting(table: Table, rows: Sequence[Row], width: int) -> list[tuple[Column, int]]:
    """Return (column, width) that fit: figures in full, texts cut to the remaining width, high ranks left out."""
    columns = [column for column in table.columns if column.rank != _HIDDEN]
    if len({row.get("cluster") for row in rows}) < 2:
        columns = [column for column in columns if column.key != "cluster"]
    longest = {
        column.key: max(cell_len(column.title) + 1, *(cell_len(column.text(row)) for row in rows), 3)
        for column in columns
    }

    def needed(column: Column) -> int:
        natural = longest[column.key]
        return natural if column.is_figure else min(natural, max(column.least, len(column.title) + 1))

    while len(columns) > 1 and sum(map(needed, columns)) + GAP * len(columns) > width:
        last = max(columns, key=lambda column: column.rank)
        if last.rank == 0:
            break
        columns.remove(max((each for each in columns if each.rank == last.rank), key=columns.index))
    widths = {column.key: needed(column) for column in columns}
    left = width - sum(widths.values()) - GAP * len(columns)
    for column in columns:  # names first
        more = min(max(0, left), longest[column.key] - widths[column.key])
        widths[column.key] += more
        left -= more
    return [(column, widths[column.key]) for column in columns]


def as_text(table: Table, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield a header and a line for each row, without colours."""
    if not rows:
        yield table.nothing
        return
    columns = fitting(table, rows, width)
    yield (" " * GAP).join(_cell(column, column.title, size) for column, size in columns).rstrip()
    for row in rows:
        yield (" " * GAP).join(_cell(column, column.text(row), size) for column, size in columns).rstrip()


def _cell(column: Column, text: str, width: int) -> str:
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    return text.rjust(width - cell_len(text) + len(text)) if column.is_figure else set_cell_size(text, width)
