"""SQL statements, one after the other: typed in a terminal with history and completion, or read from standard input.

Duty: collects a statement, runs it, shows the answer, and goes on after an error. Commands other than SQL begin with a
dot. Statements end with a semicolon. The history of a terminal is a file in the user's state folder.

Bounds: MOST_BYTES of standard input.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from kproxy.errors import KproxyError
from kproxy.views import answers

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

MOST_BYTES = 1 << 20
SHOWN = ("table", "json", "csv")
_KEYWORDS = """
    select from where group by all order limit having join left right full cross on using as and or not in is null
    between like ilike case when then else end distinct union with desc asc describe summarize count sum min max avg
    approx_quantile quantile_disc percentile_approx try_divide unix_micros date_trunc cast interval true false
"""
_HELP = """\
A SELECT over the tables, ended by a semicolon; it may take several lines. Times are UTC, durations end in _ns.
  .tables            the tables, with their numbers of rows
  .columns TABLE     the columns of a table, with their types
  .format FORMAT     table, json or csv
  .limit N           rows at most; 0: as many as a table shows
  .quit              or Ctrl-D; Ctrl-C stops a question"""


@dataclass
class Shell:
    """A session. ask: returns a frame for a SELECT. columns: by table. failed: exceptions of the engine."""

    ask: Callable[[str], Any]
    columns: Mapping[str, Sequence[str]]
    failed: tuple[type[Exception], ...]
    in_words: Callable[[Exception], str]
    shown: str = "table"
    limit: int | None = None
    quiet: bool = False

    def run(self, statements: Sequence[str], out: str | None = None) -> None:
        """Run statements, one after the other; the first error is raised."""
        for statement in statements:
            answers.show(self.ask(statement), self.shown, out, self.limit, self.quiet)

    def loop(self) -> None:
        """Read statements from the terminal until it ends."""
        if not self.quiet:
            click.echo(
                f"Tables: {', '.join(self.columns)}. Statements end with a semicolon; .help lists commands.", err=True
            )
        session = self._session()
        while True:
            try:
                text = session.prompt("kproxy> ").strip()
            except KeyboardInterrupt:  # drops the line, not the session
                continue
            except EOFError:
                return
            try:
                if text in (".quit", ".exit"):
                    return
                self._take(text)
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
            except KproxyError as fault:
                click.echo(f"kproxy: {fault}", err=True)
            except self.failed as fault:
                click.echo(f"kproxy: {self.in_words(fault)}", err=True)

    def _take(self, text: str) -> None:
        if text.startswith("."):
            self._command(*text[1:].rstrip("; ").split())
        elif text.strip("; "):
            answers.show(self.ask(text), self.shown, None, self.limit, self.quiet)

    def _command(self, name: str = "", *given: str) -> None:
        argument = given[0] if given else ""
        if name == "help":
            click.echo(_HELP)
        elif name == "tables":
            counts = " union all ".join(f"select '{each}' as t, count(*) as n from {each}" for each in self.columns)
            answers.show(self.ask(f'select t as "table", n as "rows" from ({counts})'), "table", None, 1000, True)
        elif name == "columns" and argument in self.columns:
            answers.show(self.ask(f"describe {argument}"), "table", None, 1000, True)
        elif name == "columns":
            raise KproxyError(f".columns takes a table: {', '.join(self.columns)}")
        elif name == "format" and argument in SHOWN:
            self.shown = argument
        elif name == "limit" and argument.isdecimal():
            self.limit = int(argument) or None
        else:
            raise KproxyError(f"there is no command .{' '.join((name, *given))}: .help lists them")

    def words(self, text: str) -> Iterator[str]:
        """Yield completions for this text: tables, columns of the tables that it names (or of all), keywords."""
        named = [table for table in self.columns if table in text.split()]
        columns = {column: None for table in named or self.columns for column in self.columns[table]}
        yield from (*self.columns, *columns, *_KEYWORDS.split())

    def _session(self) -> "PromptSession[str]":
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.filters import Condition

        shell = self

        class Words(Completer):
            def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
                begun = document.get_word_before_cursor()
                for word in dict.fromkeys(shell.words(document.text)):
                    if begun and word.lower().startswith(begun.lower()):
                        yield Completion(word, start_position=-len(begun))

        is_open = Condition(lambda: not is_whole(get_app().current_buffer.text))
        return PromptSession(multiline=is_open, history=_history(), completer=Words(), prompt_continuation="     -> ")


def is_whole(text: str) -> bool:
    """Return whether Enter ends the input: a command, a statement with its semicolon, or an empty line."""
    query = text.strip()
    return not query or query.startswith(".") or query.endswith(";")


def read(file: TextIO) -> str:
    """Return all of standard input. Raises KproxyError for more than MOST_BYTES."""
    text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise KproxyError(f"standard input has more than {MOST_BYTES >> 20} MiB: these are no questions")
    return text


def _history() -> "History":
    """Return a history in the user's state folder, or in memory if the folder cannot be written to."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kproxy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "sql_history"
        with file.open("a"):
            pass
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
