"""`kproxy top --once` and `--json`: requests two answers, and prints plain text or one JSON document, for scripts.

Duty: also reports a missing terminal, for the screen.
"""

import os
from collections.abc import Iterable, Iterator
from time import sleep
from typing import Any, TextIO

from kproxy.errors import KproxyError
from kproxy.views import units
from kproxy.views.top import tables
from kproxy.views.top.source import Source

WIDTH = 200  # without a terminal


def ask(source: Source, interval_s: float) -> None:
    """Request two answers; rates cover the time between them."""
    wait_s = max(interval_s, source.ask())
    sleep(wait_s)
    source.ask()


def as_text(source: Source, view: str, width: int) -> tuple[Iterator[str], str]:
    """Return (lines of one table in its initial order, text about omitted rows or "")."""
    table = tables.TABLES[view]
    rows = tables.rows_of(source, tables.Place(view))
    ordered = tables.ordered(table, rows, table.sort, tables.descends(table, table.sort))
    return tables.as_text(table, ordered, width), tables.left_out(source.figures, view, rows)


def line(source: Source, apis: int = 3) -> str:
    """Return one line for logs and pipes: totals, and the busiest APIs."""
    figures = source.figures
    all_ = figures.head()
    busiest = sorted(figures.traffic(("api",), of="apis"), key=lambda row: -row["requests_per_s"])[:apis]
    named = "  ".join(
        f"{row['api']} {row['requests_per_s']:.0f}/s p50 {_seconds(row['p50_s'])} p99 {_seconds(row['p99_s'])}"
        f" wait p99 {_seconds(row['wait_p99_s'])}"
        for row in busiest
        if row["requests_per_s"]
    )
    return (
        f"{all_['uptime_s']:5.0f} s  {all_['requests_per_s']:6.0f} requests/s"
        f"  to brokers {units.rate(all_['request_bytes_per_s'])}  to clients {units.rate(all_['response_bytes_per_s'])}"
        f"  errors {units.number(all_['errors_per_s'])}/s  throttled {all_['throttled']}"
        f"  connections {all_['connections']}  in kproxy p99 {_seconds(all_['inside_p99_s'])}"
        + (f"  |  {named}" if named else "")
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else units.duration(value * 1e9)


def can_draw(*streams: TextIO) -> bool:
    """Return whether a screen can be drawn: standard input, output and error (Textual uses it) are terminals."""
    return _are_terminals(streams) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _are_terminals(streams: Iterable[TextIO]) -> bool:
    return all(stream.isatty() for stream in streams)


def check_terminal(*streams: TextIO) -> None:
    """Raise KproxyError if no screen can be drawn."""
    if not can_draw(*streams):
        if _are_terminals(streams):
            raise KproxyError("TERM=dumb cannot move the cursor: --once prints a table; TERM=xterm where it can")
        raise KproxyError("kproxy top draws on a terminal, and this is none: --once prints a table, --json all of them")


def document(source: Source) -> dict[str, Any]:
    """Return all tables as one JSON document: plain values, with units as suffixes of their names."""
    found: dict[str, Any] = {
        "admin": source.url,
        "state": source.figures.state,
        "rates_over_s": source.figures.seconds,
        "total": source.figures.head(),
    }
    for name in tables.VIEWS:
        try:
            found[name] = tables.rows_of(source, tables.Place(name))
        except KproxyError as fault:
            found[name], found.setdefault("faults", {})[name] = None, str(fault)
    found["lags"] = source.figures.lags()
    notes = {name: tables.left_out(source.figures, name, found[name] or ()) for name in (*tables.VIEWS, "lags")}
    found["left_out"] = {name: text for name, text in notes.items() if text and found[name] is not None}
    return found
