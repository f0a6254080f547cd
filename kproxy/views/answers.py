"""Output of the answers of jobs: as a table in the terminal, as json or csv for other programs, or as Parquet.

Duty: a table has durations and sizes with units, and fits the terminal. In a narrow one, in this order: headers are
wrapped; a date that all times share, and columns with one value in all rows, move to a line below the table; sentences
move below their rows; long texts lose their middle; columns on the right are left out and listed. json and csv keep
every column and plain numbers. Text from the wire cannot move the cursor of a terminal.

Answers are small, so they come to the driver, row by row; a table holds TABLE_ROWS of them unless more are requested.
"""

import csv
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kproxy.analysis import engine
from kproxy.errors import KproxyError
from kproxy.views import progress, units

_WAITING = "computing the answer"
TABLE_ROWS = 50
WIDEST_WORD = 28  # cells of a text column in a narrow terminal
WIDEST_ID = 14  # cells of an id that a client library generated, mostly a client id and a UUID
_IDS = ("member_id", "cause_member", "last_to_join", "topic_id")
SENTENCES = ("explanation", "sentence", "reason")
# Numbers that are identifiers: they have no separators, so that other programs and options accept them.
_KEY = ("connection", "number")  # the key of an exchange
_NAMES = (
    *("connection", "number", "partition", "generation", "leader", "leader_epoch", "epoch", "version", "api_version"),
    *("api_key", "error_code", "port", "broker_port", "client_port", "producer_epoch", "xid", "zxid", "czxid"),
)
MOMENT_NS = 10**17  # three years: a larger number is a time since 1970, not a duration
_GAP = "  "
_LEFT = (engine.TEXT, engine.TIME, engine.FLAG, engine.OTHER)


def show(
    answer: Any, shown: str, out: str | None, limit: int | None, quiet: bool = False
) -> list[dict[str, Any]] | None:
    """Print an answer, a frame of either engine, or write it into the file `out`; Parquet goes into a folder.

    Returns the rows of a table, so that the caller can print a hint about them; None for other formats. Progress is
    shown on standard error unless `quiet`. Raises KproxyError if `out` cannot be written.
    """
    if shown == "parquet":
        with progress.waiting(_WAITING, quiet):
            _write(answer if limit is None else engine.first_rows(answer, limit), Path(str(out)))
        return None
    with opened(out) as file:
        if shown == "table":
            return print_table(answer, limit, file, quiet)
        found = answer if limit is None else engine.first_rows(answer, limit)
        columns = engine.columns(found)
        rows = dicts(found, quiet)
        if shown == "json":
            for row in rows:
                print(json.dumps(row), file=file)
        else:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([column.name for column in columns])
            for row in rows:
                writer.writerow(row.values())
    return None


@contextmanager
def opened(out: str | None) -> Iterator[TextIO]:
    """Yield standard output, or the new file `out`; a file that cannot be written completely is removed."""
    if out is None:
        yield sys.stdout
        return
    try:
        with Path(out).open("x", encoding="utf-8") as file:
            yield file
    except OSError as fault:
        if isinstance(fault, FileExistsError) or fault.filename not in (None, out):  # of another file
            raise
        with suppress(OSError):
            Path(out).unlink()
        raise KproxyError(f"--out {out} cannot be written: {fault.strerror or fault}") from None


def _write(answer: Any, folder: Path) -> None:
    if hasattr(answer, "sparkSession"):
        answer.write.mode("errorifexists").parquet(str(folder))
        return
    import pyarrow.parquet as pq

    rows = answer.arrow()
    folder.mkdir(parents=True)
    pq.write_table(rows, folder / "part-0.parquet", compression="zstd")


def dicts(answer: Any, quiet: bool = True) -> Iterator[dict[str, Any]]:
    """Yield rows with times as text in UTC, whatever the session's zone; shows progress until the first row."""
    columns = engine.columns(answer)
    times = [column.name for column in columns if column.kind == engine.TIME]
    rows = engine.rows(answer)
    with progress.waiting(_WAITING, quiet):
        first = list(islice(rows, 1))
    for row in chain(first, rows):
        values = dict(zip((column.name for column in columns), row, strict=True))
        for name in times:
            if values[name] is not None:
                values[name] = f"{units.time(values[name] * 1000, decimals=6).replace(' ', 'T')}Z"
        yield values


# --- a table ---------------------------------------------------------------------------------------------------------


@dataclass
class _Column:
    title: str
    left: bool
    cells: list[str]
    sentence: bool

    def width(self, broken: bool) -> int:
        words = self.title.split("_") if broken else [self.title]
        return max(map(cell_len, (*words, *self.cells)))

    def heading(self, width: int) -> list[str]:
        """Return the title in lines of at most `width` cells."""
        lines = [""]
        for word in self.title.split("_"):
            longer = f"{lines[-1]}_{word}" if lines[-1] else word
            lines[-1:] = [longer] if len(longer) <= width else [lines[-1], word]
        return lines


def print_table(answer: Any, limit: int | None, file: TextIO, quiet: bool = True) -> list[dict[str, Any]]:
    """Print the columns of an answer that fit the terminal, or all columns without a terminal; returns the rows."""
    most = limit or TABLE_ROWS
    rows = list(dicts(engine.first_rows(answer, most + 1), quiet))
    if not rows:
        print("No rows.", file=file)
        return []
    for line in lines_of(answer, rows[:most], file):
        click.echo(line, file=file)
    if len(rows) > most and limit is None and not quiet:
        click.echo(f"Only the first {'row' if most == 1 else f'{most} rows'}: --limit shows more.", err=True)
    return rows[:most]


def lines_of(answer: Any, rows: Sequence[dict[str, Any]], file: TextIO) -> Iterator[str]:
    """Yield the lines of a table of some rows of an answer."""
    found = engine.columns(answer)
    if any(column.name == "time" and column.kind == engine.TIME for column in found):
        found = [column for column in found if column.name != "time_ns"]  # the same time
    columns = [
        _Column(
            _title(column.name, column.kind, [each.name for each in found]),
            column.kind in _LEFT,
            [_cell(column, row[column.name]) for row in rows],
            column.name in SENTENCES,
        )
        for column in found
    ]
    return lines(columns, width_of(file))


def wrapped(line: str, file: TextIO, indent: int = 0) -> list[str]:
    """Return a line wrapped to the width of the terminal, all but the first line indented; unwrapped without one."""
    width = width_of(file)
    if width is None:
        return [line]
    return textwrap.wrap(line, max(width, 20), subsequent_indent=" " * indent, break_on_hyphens=False)


def width_of(file: TextIO) -> int | None:
    """Return the width in cells of the terminal that `file` is; None if it is no terminal."""
    return Console().width if file is sys.stdout and sys.stdout.isatty() else None


def _cell(column: engine.Column, value: Any) -> str:
    if column.kind == engine.TIME and value is not None:
        return str(value).replace("T", " ")[:23]
    return text(column.name, value)


def _title(name: str, kind: str, names: Sequence[str]) -> str:
    """Return the header of a column. Cells have units, so the suffix of the name is dropped if the rest is unique."""
    if kind == engine.TIME:
        return f"{name}_UTC"
    for suffix in ("_ns", "_ms"):
        bare = name.removesuffix(suffix)
        if bare != name:
            return bare if bare not in names else f"{bare}_time"
    return name


def lines(columns: Sequence[_Column], width: int | None) -> Iterator[str]:
    """Yield the lines of a table that is at most `width` cells wide."""

    def fits(columns: Sequence[_Column], broken: bool) -> bool:
        return width is None or sum(column.width(broken) + len(_GAP) for column in columns) - len(_GAP) <= width

    below: list[_Column] = []
    left_out: list[str] = []
    kept, alike = list(columns), []
    broken = not fits(kept, False)
    date = "" if fits(kept, broken) else _without_date(kept)
    if not fits(kept, broken) and len(columns[0].cells) > 1:
        alike = [column for column in kept if len(set(column.cells)) == 1]
        kept = [column for column in kept if len(set(column.cells)) > 1] or kept[:1]
        broken = not fits(kept, False)
    if not fits(kept, broken):
        below = [column for column in kept if column.sentence]
        kept = [column for column in kept if not column.sentence]
    if not fits(kept, broken):
        for column in kept:
            if column.left:
                widest = WIDEST_ID if column.title in _IDS else WIDEST_WORD
                column.cells = [cropped(cell, widest) for cell in column.cells]
        broken = not fits(kept, False)
    while len(kept) > 1 and not fits(kept, broken):
        left_out.insert(0, kept.pop().title)
    keys = [column for column in columns if column.title in _KEY and column.title in left_out]
    if len(keys) == len(_KEY):  # `kproxy show` needs both
        left_out = [title for title in left_out if title not in _KEY]
    else:
        keys = []
    widths = [column.width(broken) for column in kept]
    headings = [column.heading(width) for column, width in zip(kept, widths, strict=True)]
    tallest = max(map(len, headings))
    for number in range(tallest):
        words = [[*[""] * (tallest - len(heading)), *heading][number] for heading in headings]
        yield click.style(_line(kept, widths, words), bold=True)
    for index in range(len(kept[0].cells)):
        yield _line(kept, widths, [column.cells[index] for column in kept])
        for column in below:
            wrapped = Text(column.cells[index]).wrap(Console(), (width or 0) - 4)
            yield from (f"    {line.plain.rstrip()}" for line in wrapped)
        if keys:
            yield f"    {', '.join(f'{column.title} {column.cells[index]}' for column in keys)}"
    notes = [f"All times are of {date}."] if date and any(c.title.endswith("_UTC") for c in (*kept, *alike)) else []
    if same := ", ".join(f"{column.title} {column.cells[0]}" for column in alike if column.cells[0]):
        notes.append(f"In all rows: {same}.")
    if empty := ", ".join(column.title for column in alike if not column.cells[0]):
        notes.append(f"Empty: {empty}.")
    if left_out:
        notes.append(f"Left out, since the terminal is narrow: {', '.join(left_out)}. `| less -S` shows all.")
    for part in notes:
        yield from (line.plain.rstrip() for line in Text(part).wrap(Console(), width or 0))


def _line(columns: Sequence[_Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    padded = (
        set_cell_size(cell, width) if column.left else " " * (width - cell_len(cell)) + cell
        for column, width, cell in zip(columns, widths, cells, strict=True)
    )
    return _GAP.join(padded).rstrip()


def _without_date(columns: Sequence[_Column]) -> str:
    """Remove the date from all times and return it; "" if there are several dates, or none."""
    times = [column for column in columns if column.title.endswith("_UTC")]
    dates = {cell[:10] for column in times for cell in column.cells if cell}
    if len(dates) != 1:
        return ""
    for column in times:
        column.cells = [cell[11:] for cell in column.cells]
    return dates.pop()


def cropped(cell: str, widest: int) -> str:
    """Cut the middle of a text: names differ at their ends as often as at their beginnings."""
    if cell_len(cell) <= widest:
        return cell
    end = widest // 3
    return f"{set_cell_size(cell, widest - end - 1)}…{set_cell_size(cell[::-1], end)[::-1]}"


def lengths(rows: Sequence[Mapping[str, Any]], names: tuple[str, str] = ("This capture", "the other")) -> str:
    """Return that the captures of a `compare` differ in length by more than a tenth, as a sentence; else ""."""
    found = [
        next((row[f"{side}exchanges"] / rate for row in rows if (rate := row[f"{side}exchanges_per_second"])), 0)
        for side in ("", "b_")
    ]
    if min(found) * 1.1 >= max(found) or not all(found):
        return ""
    one, other = (units.duration(seconds * 1e9) for seconds in found)
    return f"{names[0]} lasts {one}, {names[1]} {other}: compare rates per second, not totals."


# What `analyze errors` has in the column `error` beside Kafka's names of errors. JSON and conditions have the values.
_ERRORS = {
    "inside_answer": "errors inside the answer",
    "not_missed": "no answer, nobody waited for it",
    "closed_by_broker": "no answer, the broker closed the connection",
    "answered_too_late": "answered after the client had closed the connection",
    "tls_expected": "no answer, the port expects TLS",
    "lost": "answer not captured",
    "in_flight_at_end": "in flight when the capture ended",
}


def text(name: str, value: Any) -> str:
    """Return a value as text for a table; the suffix of the column's name is its unit."""
    if value is None:
        return ""
    words = name.split("_")
    if words[-1] == "ns" and isinstance(value, int) and value >= MOMENT_NS:
        return f"{units.time(value)}Z"
    if words[-1] in ("ns", "ms"):
        return units.duration(value * (1 if words[-1] == "ns" else 1_000_000))
    if "bytes" in words:
        return units.size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}" if "share" in words else f"{value:,.2f}" if abs(value) >= 1 else f"{value:#.2g}"
    if name == "error" and value in _ERRORS:
        return _ERRORS[value]
    if isinstance(value, int):
        return str(value) if name in _NAMES or words[-1] == "id" else f"{value:,}"
    return str(value) if str(value).isprintable() else str(value).encode("unicode_escape").decode()
