"""One SQL text for each question, on two engines: Spark, and DuckDB inside this process.

Duty: run a text over frames of either engine (`ask`), and return an answer's columns and rows in the same form. A frame
is a table or an answer: a DataFrame of Spark, or a `duck.Frame`. Texts use SQL that both engines accept; macros define
Spark's functions for DuckDB (`duck.MACROS`).

Memory: rows of an answer one portion at a time. Refuses to know questions, files and formats of output.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Frame = Any  # a DataFrame of Spark or a duck.Frame; both have `columns`

TEXT, TIME, FLAG, INTEGER, NUMBER, OTHER = "text", "time", "flag", "integer", "number", "other"

_KINDS = {
    **dict.fromkeys(("string", "varchar"), TEXT),
    **dict.fromkeys(("timestamp", "timestamp with time zone"), TIME),
    "boolean": FLAG,
    **dict.fromkeys(("tinyint", "smallint", "int", "integer", "bigint", "hugeint"), INTEGER),
    **dict.fromkeys(("float", "double"), NUMBER),
}


@dataclass(frozen=True)
class Column:
    """A column of an answer; kind: one of the constants above."""

    name: str
    kind: str


def ask(tables: Mapping[str, Frame], once: Collection[str] = (), **steps: str) -> Frame:
    """The answer of the last step, a SELECT, as a frame of the engine that `tables` are of.

    Each step is a SELECT that may name the tables and the steps before it. Nothing is computed before rows are asked
    for; a text that the engine does not take raises the engine's own error here. once: steps of few rows that others
    name twice: DuckDB keeps these in memory, and computes all others wherever they are named.
    """
    first = next(iter(tables.values()))
    *others, (_, last) = steps.items()
    if hasattr(first, "sparkSession"):
        named = [(name, f"select * from {{{name}}}") for name in tables]
        named += [(name, _braced(text)) for name, text in others]
        return first.sparkSession.sql(f"{_with(named, 'as')}{_braced(last)}", **tables)
    # Else DuckDB would keep each table whole in memory, all of its columns, where two steps name it.
    named = [(name, f"select * from ({frame.text})") for name, frame in tables.items()]
    words = dict.fromkeys(once, "as materialized")
    return first.asked(f"{_with([*named, *others], 'as not materialized', words)}{last}")


def _with(named: list[tuple[str, str]], word: str, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """The steps before the last; between name and text stands `word`, or what `words` has for the name."""
    return f"with {', '.join(f'{name} {words.get(name, word)} ({text})' for name, text in named)} "


def _braced(text: str) -> str:
    """Spark takes a name in braces for a table's place."""
    return text.replace("{", "{{").replace("}", "}}")


def columns(frame: Frame) -> list[Column]:
    """The columns of a frame, in order."""
    found: list[tuple[str, str]] = frame.dtypes
    return [Column(name, _KINDS.get(kind.lower(), OTHER)) for name, kind in found]


@contextmanager
def kept(frame: Frame) -> Iterator[Frame]:
    """The rows of a frame, computed once for all the questions in the block; DuckDB spills them as other rows."""
    if hasattr(frame, "sparkSession"):
        rows_of = frame.persist()
        try:
            yield rows_of
        finally:
            rows_of.unpersist()
        return
    with frame.stored() as rows_of:
        yield rows_of


def first_rows(frame: Frame, limit: int) -> Frame:
    """A frame of at most as many rows, the first ones."""
    return frame.limit(limit)


def rows(frame: Frame) -> Iterator[tuple[Any, ...]]:
    """The rows of an answer, in its order; times as microseconds since the epoch, independent of the session's zone."""
    times = [column.name for column in columns(frame) if column.kind == TIME]
    if not hasattr(frame, "sparkSession"):
        yield from frame.in_micros(times).fetched()
        return
    chosen = ", ".join(f"unix_micros(`{name}`) as `{name}`" if name in times else f"`{name}`" for name in frame.columns)
    yield from (tuple(row) for row in ask({"answer": frame}, plain=f"select {chosen} from answer").toLocalIterator())
