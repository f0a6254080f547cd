"""Output of `kproxy ctl`: tables from answers of the admin API, and frames of a trace.

Text of a peer is shown with unprintable characters escaped, so that it cannot move the terminal's cursor. Bounded by
the size of an answer.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kproxy.wording import counted

_NAME, _QUIET, _TITLE, _BAD = "cyan", "dim", "bold", "bold red"
_SHORT = 80  # characters of a value on its name's line
_LONG = 400

Row = Mapping[str, Any]


def show_table(rows: Sequence[Row], columns: Sequence[str], nothing: str) -> None:
    """Print rows as a table, or the text `nothing` if there are none."""
    console = Console(soft_wrap=True)
    if not rows:
        console.print(nothing, highlight=False, markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style=_TITLE)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_value(row.get(column))) for column in columns))
    (console if console.is_terminal else Console(width=240)).print(table)


def show_values(values: Row) -> None:
    """Print names and values, one per line."""
    console = Console(soft_wrap=True)
    for line in _lines(values):
        console.print(line)


def connections(rows: Iterable[Row], now_ns: int) -> list[Row]:
    """Return rows of /api/connections with the age in addition to the time of opening."""
    return [{**row, "age": age((now_ns - int(row["opened_ns"])) / 1e9)} for row in rows]


def groups(rows: Iterable[Row], now_ns: int) -> list[Row]:
    """Return rows of /api/groups with the last rebalance as columns."""
    found: list[Row] = []
    for row in rows:
        last: Row = row["last_rebalance"] or {}
        ended_ns = last.get("ended_ns")
        found.append(
            {
                **row,
                "members": row["member_count"],
                "last_rebalance": f"{age((now_ns - int(last['started_ns'])) / 1e9)} ago" if last else None,
                "took": age((ended_ns - int(last["started_ns"])) / 1e9) if ended_ns is not None else None,
                "cause": last.get("cause"),
                "reason": last.get("reason"),
            }
        )
    return found


def age(seconds: float) -> str:
    """Return a duration of a connection or a request, in its largest units: "3d 4h", "12.3 s"."""
    if seconds < 60:
        return f"{max(0.0, seconds):.3g} s"
    minutes = int(seconds) // 60
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{count}{unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "m")) if count]
    return " ".join(parts[:2])


class Frames:
    """Prints the lines of a trace as they arrive."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True)

    def show(self, line: Row) -> None:
        if "tracing" in line:
            text = f"tracing {line['tracing']}: {counted(line['connections'], 'connection')} so far; Ctrl-C ends it"
            self._console.print(Text(text, _QUIET))
        elif "ended" in line:
            left_out = f"; {counted(line['left_out'], 'frame')} left out, to keep up" if line["left_out"] else ""
            self._console.print(Text(f"{_plain(line['ended'])}{left_out}", _QUIET))
        else:
            for part in _frame(line):
                self._console.print(part)


def _frame(line: Row) -> Iterator[Text]:
    time = datetime.fromtimestamp(line["time_ns"] / 1e9, UTC).strftime("%H:%M:%S.%f")[:-3]
    arrow = "->" if line["from"] == "client" else "<-"
    title = Text(f"{time} ", _QUIET) + Text(f"{line['connection']} {arrow} ", "not bold")
    if "api" in line:
        title += Text(f"{line['api']} {line['kind']} v{line['version']}", _TITLE)
    header = line.get("header") or {}
    if "correlationId" in header:
        title += Text(f"  correlation id {header['correlationId']}")
    if header.get("clientId") is not None:
        title += Text(f"  client {_value(header['clientId'])}")
    yield title + Text(f"  {line['bytes']:,} bytes", _QUIET)
    if "left_out" in line:
        yield Text(f"  {_plain(line['left_out'])}", _QUIET)
    yield from (Text("  ") + text for text in _lines(line.get("body") or {}))


def _lines(value: Any) -> Iterator[Text]:
    """Yield a JSON value: short values on one line, long ones indented below their name."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            label = Text(f"{_plain(str(name))}: ", _NAME)
            short = _compact(inner)
            if short is not None:
                yield label + Text(short)
            else:
                yield label
                yield from (Text("  ") + line for line in _lines(inner))
    elif isinstance(value, list):
        for item in value:
            short = _compact(item)
            first = True
            for line in [Text(short)] if short is not None else _lines(item):
                yield Text("- " if first else "  ") + line
                first = False
    else:
        yield Text(_value(value))


def _compact(value: Any) -> str | None:
    """Return a value on one line; None if it is too long."""
    if not isinstance(value, Mapping | list):
        return _value(value)
    text = json.dumps(value)
    return _plain(text) if len(text) <= _SHORT else None


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        text = _plain(value)
        return text if len(text) <= _LONG else f"{text[:_LONG]}… ({len(value):,} characters)"
    return _plain(json.dumps(value))


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
