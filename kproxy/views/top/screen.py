"""The screen of `kproxy top`: one table at a time, and the keys that choose, sort, filter, open and pause.

Duty: a thread requests answers, the loop draws and never waits for the network. All text is passed to Textual as Text,
never as markup. Bounded: ROWS rows drawn, DEPTH places to go back to.
"""

import os
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Input, Static

from kproxy.errors import KproxyError
from kproxy.views import units
from kproxy.views.operator import age
from kproxy.views.top import tables
from kproxy.views.top.figures import Row
from kproxy.views.top.source import Source
from kproxy.views.top.tables import TABLES, VIEWS, Place

DEPTH = 8
AGAIN_S = 2.0  # between two requests to a kproxy that does not answer
_PLAIN = bool(os.environ.get("NO_COLOR"))
_QUIET, _BAD, _ON = "dim", "bold" if _PLAIN else "bold red", "bold reverse"
_BAD_CELL, _NOTED = ("bold", "bold") if _PLAIN else ("red", "bold yellow")
_SHORT = {"connections": "conns"}
_ASKING = {"connections", "client_connections", "requests", "members", "findings"}  # need more than /api/live
_HINT = "enter open  / filter  s sort  r reverse  p pause  esc back  ? help  q quit"


class _Asker(threading.Thread):
    """Requests answers while the application runs; a daemon thread, so a missing answer does not delay the exit."""

    def __init__(self, app: "Top", source: Source, interval_s: float) -> None:
        super().__init__(name="kproxy-top", daemon=True)
        self._app = app
        self._source = source
        self._interval_s = interval_s
        self.wanted = threading.Event()
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            begun, wait_s = monotonic(), AGAIN_S
            place = self._app.place
            self.wanted.clear()
            fault: KproxyError | None = None
            about: KproxyError | None = None
            rows: Sequence[Row] = ()
            if not self._app.is_paused:
                try:
                    wait_s = max(self._interval_s, self._source.ask())
                    try:
                        rows = tables.rows_of(self._source, place)
                    except KproxyError as why:
                        about = why
                except KproxyError as why:
                    fault = why
                if self.ends:
                    return
                try:
                    self._app.call_from_thread(self._app.take, place, rows, fault, about)
                except RuntimeError:  # the application has ended meanwhile
                    return
            self.wanted.wait(max(0.05, wait_s - (monotonic() - begun)))


class Top(App[None]):
    """The application. source: of the figures. view: the first table. about: lines that describe the kproxy shown."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen, Static, Input { background: ansi_default; color: ansi_default; }
    #head, .about, #totals, #views, #place, #foot { height: 1; }
    #table { height: 1fr; color: ansi_default; background: ansi_default;
      scrollbar-size-horizontal: 0; scrollbar-size-vertical: 1;
      scrollbar-background: ansi_default; scrollbar-background-hover: ansi_default; scrollbar-color: ansi_default;
      scrollbar-color-hover: ansi_default; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    DataTable > .datatable--header { text-style: bold; background: ansi_default; color: ansi_default; }
    DataTable > .datatable--header-hover { background: ansi_default; color: ansi_default; }
    DataTable > .datatable--cursor { text-style: reverse; background: ansi_default; color: ansi_default; }
    DataTable > .datatable--hover { background: ansi_default; }
    DataTable > .datatable--even-row { background: ansi_default; }
    DataTable > .datatable--odd-row { background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view('{name}')", name) for number, name in enumerate(VIEWS, 1)),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", "sort by the column before"),
        Binding("r", "reverse", "reverse"),
        Binding("p,space", "pause", "pause"),
        Binding("question_mark", "help", "help"),
        Binding("escape,backspace", "leave", "back"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
    ]

    def __init__(self, source: Source, view: str = "apis", interval_s: float = 1.0, about: Sequence[str] = ()) -> None:
        super().__init__(ansi_color=True)
        self._source = source
        self._about_lines = about
        self._places = [Place(view)]
        self._rows: Sequence[Row] = ()
        self._shown: list[Row] = []
        self._keys: list[tuple[Any, ...]] = []
        self._cells: list[list[tuple[str, str]]] = []
        self._sorts: dict[str, tuple[str, bool]] = {}
        self._wanted: dict[str, str] = {}
        self._fault: KproxyError | None = None
        self._about: KproxyError | None = None
        self._is_asked = self._is_drawn = False
        self._answered_at = monotonic()
        self._layout: tuple[Any, ...] = ()
        self.is_paused = False
        self._asker = _Asker(self, source, interval_s)

    # --- state of the screen -----------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        return self._places[-1]

    @property
    def sort(self) -> tuple[str, bool]:
        """Return (column, descending) of the table that is shown."""
        table = TABLES[self.place.table]
        return self._sorts.get(table.name, (table.sort, tables.descends(table, table.sort)))

    @property
    def shown(self) -> Sequence[Row]:
        """Return the rows on the screen, in their order."""
        return self._shown

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        for line in self._about_lines:
            text = Text(f" {tables.plain(line)}", no_wrap=True, overflow="ellipsis")
            yield Static(text, classes="about", markup=False)
        for name in ("totals", "views", "place"):
            yield Static(id=name, markup=False)
        yield DataTable(id="table", cursor_type="row", zebra_stripes=False, cell_padding=1)
        yield Input(id="filter", placeholder="rows with this text; enter keeps it, esc forgets it", compact=True)
        yield Static(Text(f" {_HINT}", _QUIET, no_wrap=True), id="foot", markup=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self._is_drawn = True
        self._draw()
        self._asker.start()

    def on_unmount(self) -> None:
        self._asker.ends = True
        self._asker.wanted.set()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw)

    def take(self, place: Place, rows: Sequence[Row], fault: KproxyError | None, about: KproxyError | None) -> None:
        """Take the rows of a place. fault: no request was answered. about: only the request for these rows failed."""
        self._fault = fault
        if fault is None:
            self._answered_at = monotonic()
            if place == self.place:
                self._rows, self._about, self._is_asked = rows, about, True
        self._draw()

    # --- keys --------------------------------------------------------------------------------------------------------

    def action_view(self, name: str) -> None:
        self._go([Place(name)])

    def action_leave(self) -> None:
        field = self.query_one("#filter", Input)
        if field.has_class("open") or (self._wanted.get(self.place.table) and len(self._places) == 1):
            self._wanted.pop(self.place.table, None)
            self._close_filter()
        elif len(self._places) > 1:
            self._go(self._places[:-1])

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self._asker.wanted.set()
        self._draw()

    def action_help(self) -> None:
        table = self.place.table
        if table != "help" and len(self._places) < DEPTH:
            self._go([*self._places, Place("help", (table,), "keys, and the columns of this table")])

    def action_sort(self, step: int) -> None:
        names = [column.key for column, _ in self._columns()]
        now = self.sort[0]
        at = (names.index(now) + step) % len(names) if now in names else 0
        self._sort_by(names[at])

    def action_reverse(self) -> None:
        key, descending = self.sort
        self._sorts[self.place.table] = key, not descending
        self._draw()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = self._wanted.get(self.place.table, "")
        field.add_class("open")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted[self.place.table] = event.value
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_filter()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        key = str(event.column_key.value)
        self.action_reverse() if key == self.sort[0] else self._sort_by(key)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if 0 <= event.cursor_row < len(self._shown) and len(self._places) < DEPTH:
            place = TABLES[self.place.table].opens(self._shown[event.cursor_row])
            if place is not None:
                self._go([*self._places, place])

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.query_one(DataTable).focus()
        self._draw()

    def _sort_by(self, key: str) -> None:
        self._sorts[self.place.table] = key, tables.descends(TABLES[self.place.table], key)
        self._draw()

    def _go(self, places: list[Place]) -> None:
        self._places = places
        self._rows, self._about, self._keys = (), None, []
        asks = places[-1].table in _ASKING
        self._is_asked = not asks
        if not asks and not self._source.figures.is_empty:
            self._rows = tables.rows_of(self._source, places[-1])  # also without connection, or paused
        self.query_one("#filter", Input).remove_class("open")
        table = self.query_one(DataTable)
        table.focus()
        self._draw()
        table.move_cursor(row=0, animate=False)
        self._asker.wanted.set()

    # --- drawing -----------------------------------------------------------------------------------------------------

    def _columns(self) -> list[tuple[tables.Column, int]]:
        # A cell has a column of padding at both sides; the scroll bar takes one more.
        return tables.fitting(TABLES[self.place.table], self._shown, self.size.width - 1)

    def _draw(self) -> None:
        if not self._is_drawn:
            return
        table = TABLES[self.place.table]
        key, descending = self.sort
        found = tables.matching(table, self._rows, self._wanted.get(self.place.table, ""))
        self._shown = tables.ordered(table, found, key, descending)[: tables.ROWS]
        self._draw_heads(len(found))
        self._draw_table(table)

    def _draw_table(self, table: tables.Table) -> None:
        widget = self.query_one(DataTable)
        key, descending = self.sort
        columns = self._columns()
        at, offset = widget.cursor_row, widget.scroll_offset.y
        chosen = self._keys[at] if 0 <= at < len(self._keys) and at > 0 else None
        layout = (table.name, key, descending, *((column.key, width) for column, width in columns))
        with self.batch_update():
            if layout != self._layout:
                widget.clear(columns=True)
                for column, width in columns:
                    mark = ("↓" if descending else "↑") if column.key == key else ""
                    text = Text(f"{column.title}{mark}", justify="right" if column.is_figure else "left", no_wrap=True)
                    widget.add_column(text, width=width, key=column.key)
                self._layout, self._cells = layout, []
            cells = [[_cell(column, row) for column, _ in columns] for row in self._shown]
            if len(cells) == len(self._cells):  # changing cells costs a tenth of rebuilding all rows
                for at_row, (now, before) in enumerate(zip(cells, self._cells, strict=True)):
                    for at_column, (one, other) in enumerate(zip(now, before, strict=True)):
                        if one != other:
                            widget.update_cell_at(Coordinate(at_row, at_column), _as_text(one, columns[at_column][0]))
            else:
                widget.clear()
                for line in cells:
                    widget.add_row(*(_as_text(one, column) for one, (column, _) in zip(line, columns, strict=True)))
            self._cells = cells
            self._keys = [_identity(table, row) for row in self._shown]
            if chosen in self._keys:
                at = self._keys.index(chosen)
            widget.move_cursor(row=min(at, max(0, len(self._shown) - 1)), animate=False, scroll=False)
            widget.scroll_to(y=offset, animate=False, force=True)

    def _draw_heads(self, found: int) -> None:
        figures = self._source.figures
        width = self.size.width
        head = Text.assemble((" kproxy ", _ON), f" {tables.plain(self._source.url.partition('://')[2])}", no_wrap=True)
        totals = Text(no_wrap=True, overflow="ellipsis")
        if not figures.is_empty:
            state, total = figures.state, figures.head()
            ready = bool(state.get("ready"))
            status = "draining" if state.get("draining") else "ready" if ready else "not ready"
            cpu = "–" if total["cpu_share"] is None else f"{total['cpu_share']:.0%}"
            head.append(f"  {status}", "" if ready else _BAD)
            if self.is_paused:
                head.append("  paused: p goes on", _NOTED)
            if self._source.restarts:
                head.append(f"  restarted {self._source.restarts}×", _NOTED)
            head.append(f"  {total['connections']:,} conns  cpu {cpu}  up {age(total['uptime_s'])}", _QUIET)
            head.append(f"  {tables.plain(state.get('version'))}", _QUIET)
            to, wait_s = "to " if width >= 90 else "", total["wait_p99_s"]
            for label, value in (
                ("req/s", units.number(total["requests_per_s"])),
                (f"p99 wait{' without polls' if to else ''}", "–" if wait_s is None else units.duration(wait_s * 1e9)),
                ("errors/s", units.number(total["errors_per_s"])),
                (f"{to}brokers", units.rate(total["request_bytes_per_s"])),
                (f"{to}clients", units.rate(total["response_bytes_per_s"])),
            ):
                totals.append(f" {label} ", _QUIET)
                totals.append(f"{value} ", _BAD if label == "errors/s" and total["errors_per_s"] else "bold")
        if self._fault is not None:
            ago = f"figures of {age(monotonic() - self._answered_at)} ago; " if not figures.is_empty else ""
            why = str(self._fault).removeprefix(self._source.url).lstrip(" :")  # the line above shows the address
            totals = Text(f" {ago}asking again: {tables.plain(why)}", _BAD, no_wrap=True, overflow="ellipsis")
        elif figures.is_empty:
            totals = Text(" asking", _QUIET)
        for name, text in (
            ("head", head),
            ("totals", totals),
            ("views", self._views(width)),
            ("place", self._where(found)),
        ):
            self.query_one(f"#{name}", Static).update(text)

    def _views(self, width: int) -> Text:
        text = Text(no_wrap=True)
        for number, name in enumerate(VIEWS, 1):
            label = (
                {"apis": "APIs"}.get(name, name) if width >= 90 else _SHORT.get(name, {"apis": "APIs"}.get(name, name))
            )
            text.append(f"{number} ", _QUIET)
            text.append(label, _ON if name == self._places[0].table else "")
            text.append(" ")
        return text

    def _where(self, found: int) -> Text:
        """Return the path to the place, the filter, and the number of rows, or why there are none."""
        table = TABLES[self.place.table]
        text = Text(no_wrap=True, overflow="ellipsis")
        for place in self._places[1:]:
            text.append(" > ", _QUIET)
            text.append(tables.plain(place.title), "bold")
        if wanted := self._wanted.get(self.place.table):
            text.append(f" with {tables.plain(wanted)!r}: {found} of {len(self._rows)}", _NOTED)
        if self._about is not None:
            text.append(f" {tables.plain(self._about)}", _BAD)
        elif not self._rows and not self._source.figures.is_empty:
            nothing = table.nothing if self._is_asked else "not asked while paused" if self.is_paused else "asking"
            text.append(f" {nothing}", _QUIET)
        elif found > len(self._shown):
            text.append(f" {len(self._shown)} of {found} rows: filter with /", _QUIET)
        if self._rows and not self._source.figures.is_empty:
            left = tables.left_out(self._source.figures, table.name, self._rows)
            text.append(f" {left}" if left else "", _QUIET)
        return text


def _cell(column: tables.Column, row: Row) -> tuple[str, str]:
    """Return the text of a cell, and its style."""
    value = row.get(column.key)
    is_name = column.rank == 0 and not column.is_figure
    quiet = _QUIET if tables.is_idle(row) else ""
    return column.text(row), _BAD_CELL if column.is_bad and value else quiet or ("bold" if is_name else "")


def _as_text(cell: tuple[str, str], column: tables.Column) -> Text:
    return Text(*cell, justify="right" if column.is_figure else "left", no_wrap=True, overflow="ellipsis")


def _identity(table: tables.Table, row: Row) -> tuple[Any, ...]:
    """Return the identity of a row: the values that do not change with its figures."""
    if "number" in row:
        return (row.get("connection"), row["number"])
    return tuple(str(row.get(column.key)) for column in table.columns if not column.is_figure)
