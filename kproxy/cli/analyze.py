"""`kproxy analyze JOB`: questions to tables on DuckDB, in this process. Logic is in `kproxy.analysis`."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kproxy.cli import captures
from kproxy.cli.asking import (
    ANSWER,
    PLACES,
    Asked,
    check_out,
    check_tables,
    commands,
    overview_command,
    show_overview,
    with_options,
)
from kproxy.cli.findings import findings_command, show_findings
from kproxy.errors import KproxyError

if TYPE_CHECKING:
    from kproxy.analysis.duck import Tables
    from kproxy.convert.job import Settings

_EXAMPLE = "give a condition in SQL, like \"api = 'Fetch'\""


@contextmanager
def in_words(what: str, example: str = "") -> Iterator[None]:
    """Errors of DuckDB as one line; `what` cannot be read where it is no SQL."""
    import duckdb

    try:
        yield
    except duckdb.Error as fault:
        raise KproxyError(_words_of(fault, what, example)) from None


def _words_of(fault: Exception, what: str = "the query", example: str = "") -> str:
    """An error of DuckDB in one line."""
    import duckdb

    if example and isinstance(fault, duckdb.ConversionException) and "to BOOL" in str(fault):
        return f"{what} is no condition, since it is neither true nor false: {example}"
    if isinstance(fault, duckdb.InvalidInputException) and ".parquet" in str(fault):
        return f"{plain(str(fault))}: remove the file if it is none of kproxy's, or convert its capture again"
    if not isinstance(fault, duckdb.ParserException):
        return plain(str(fault))
    fault_text = plain(str(fault))
    near = re.search(r" near .*", fault_text)
    return f"{what} cannot be read{near[0] if near else f': {fault_text}'}{example and f': {example}'}"


def plain(text: str) -> str:
    """DuckDB's message, without the name of the error's class and without the statement."""
    lines = [line.strip() for line in text.split("\nLINE ")[0].strip().splitlines() if line.strip()]
    return " ".join([lines[0].partition(" Error: ")[2] or lines[0], *lines[1:]]) if lines else "DuckDB failed"


@contextmanager
def tables_at(
    places: Sequence[str], tables: Sequence[str], how: dict[str, Any], quiet: bool = False
) -> Iterator[Callable[[bool], str]]:
    """Gives what returns the folder of tables that `places` stand for, made first where they are captures.

    It takes whether those that are there cannot be read. how: the options of captures; quiet: no progress.
    """
    from kproxy.analysis import cached

    far = [place for place in places if "://" in place]
    if far:
        from kproxy.capture.formats.storage import shown

        raise KproxyError(
            f"{shown(far[0])}: questions are put to files of this machine: `kproxy convert` makes tables of captures "
            "at URLs, `kproxy spark` asks tables there"
        )
    if len(places) == 1 and cached.is_dataset(places[0]):
        from kproxy.tables import dataset

        folder = Path(places[0])
        before = dataset.generation(folder)
        check_tables(places, tables, quiet)
        try:
            yield lambda again: places[0]
        finally:  # the answer, or the fault, may be of old files and new ones
            dataset.refuse_replaced(folder, before)
        return
    from kproxy.convert import machine
    from kproxy.views import progress

    several = [place for place in places if cached.is_dataset(place)]
    if several:
        check_tables(several, tables)
        raise KproxyError(f"{several[0]} is a folder of tables: ask one such folder, or captures")
    settings = captures.settings(how)
    passing = []

    def made(again: bool) -> str:
        machine.retain()
        with progress.bar(quiet) as advance:
            convert = cached.convert_with(places, advance)
            found, is_passing = cached.tables_of(places, tables, settings, convert=convert, again=again)
        passing.extend([found] if is_passing else [])
        return str(found)

    try:
        yield made
    finally:
        for found in passing:
            cached.forget(found)


def answer(asked: Asked, **how: Any) -> None:
    """Answer a question and show it."""
    from kproxy.analysis.duck import Tables
    from kproxy.analysis.question import Question
    from kproxy.analysis.questions import parties
    from kproxy.views import answers

    question = Question(asked.job, asked.options, **asked.chosen)
    for line in question.check():
        if not asked.quiet:
            click.echo(line, err=True)
    needed = asked.job.tables
    with (
        tables_at(asked.places, needed, how, asked.quiet) as folder_of,
        tables_at([asked.other], needed, how, asked.quiet) if asked.other else nullcontext(folder_of) as other_of,
    ):

        def ask(again: bool) -> None:
            folder = folder_of(again)
            other_folder = None if asked.other is None else other_of(again)
            with Tables(folder, [other_folder] if other_folder else []) as tables:
                other = None if other_folder is None else tables.beside(other_folder, needed[0])
                answer = question.answer(tables, other)
                rows = answers.show(answer, asked.shown, asked.out, asked.limit, asked.quiet)
                if asked.quiet:
                    return
                if rows == []:
                    click.echo(question.why_empty(tables), err=True)
                if rows and asked.job.name == "compare" and (warning := answers.lengths(rows)):
                    click.echo(warning, err=True)
                if rows and asked.job.name == "slow":
                    _show_one(rows[0], asked.places, captures.settings(how))
                if asked.job.name == "errors" and any(row.get("error") == parties.INSIDE for row in rows or ()):
                    one = parties.inside(tables["exchanges"], tables["partitions"])
                    for row in answers.dicts(one):
                        _show_one(row, asked.places, captures.settings(how), "An answer with errors inside")
                _say_what_lacks(tables, asked.places)

        with in_words("--where", _EXAMPLE):
            _asked_again(ask)


def _show_one(row: dict[str, Any], places: Sequence[str], settings: "Settings", what: str = "The first whole") -> None:
    """Print the command that shows a whole exchange; for tables, with their name of the capture."""
    from kproxy.analysis import cached

    is_dataset = len(places) == 1 and cached.is_dataset(places[0])
    source = str(row["source"])
    if (is_dataset and source.startswith("live:")) or "-" in places:  # no capture can be read again
        return
    which = ["--connection", str(row["connection"]), "--number", str(row["number"])]
    options = [] if is_dataset else [*settings.reading, *(["--rotated"] if settings.rotated else [])]
    words = ["kproxy", "show", *([source] if is_dataset else places), *which, *options]
    click.echo(f"{what}, with its frames and packets: {shlex.join(words)}", err=True)


def _say_what_lacks(tables: "Tables", places: Sequence[str]) -> None:
    """Print that the captures are incomplete, as `convert` does at its end."""
    from kproxy.analysis import engine
    from kproxy.views.summary import lacking

    with suppress(KproxyError):  # tables without that table
        text = "select kind, cast(sum(`count`) as bigint) as n from quality group by kind"
        counts = dict(engine.rows(engine.ask({"quality": tables["quality"]}, counted=text)))
        if lost := lacking(counts):
            where = shlex.join(places)
            click.echo(f"Not complete: {'; '.join(lost)}. More: kproxy analyze quality {where}", err=True)


def _asked_again(ask: Callable[[bool], None]) -> None:
    """Asks once more where tables cannot be read, made anew if they are a cache."""
    import duckdb

    try:
        ask(False)
    except (duckdb.IOException, duckdb.InvalidInputException) as fault:
        if ".parquet" not in str(fault):
            raise
        ask(True)


@click.argument("words", nargs=-1, required=True, metavar="[SELECT] TABLES|CAPTURE...")
def sql(words: tuple[str, ...], shown: str, out: str | None, limit: int | None, quiet: bool, **how: Any) -> None:
    """Run any SELECT over the tables, by DuckDB; without one, read statements from the terminal or standard input.

    Begin with the views exchanges_full, partitions_full and batches_full: their rows also have the client, the
    broker and the software. Tables are named as their folders: exchanges, partitions, batches, connections, quality,
    and those of groups and brokers; `kproxy analyze sql "describe exchanges_full" tables` lists columns. `error` is
    'NONE' where an answer has no error at its top level, and null without an answer: count errors by `errors > 0`,
    which is also right for errors inside an answer. Spark's functions of the same names as in
    DuckDB work too (try_divide, percentile_approx, unix_micros). Nothing but these tables can be read, and nothing
    can be written.

    In a terminal there are a history and completion (Tab), statements end with a semicolon, and .help lists more.

    \b
    Example:
      kproxy analyze sql "select api, count(*) as n from exchanges group by api order by n desc" tables
      kproxy analyze sql "select client_id, topic, sum(records) as n from partitions_full group by all" tables
      kproxy analyze sql tables
      kproxy analyze sql tables < questions.sql
    """
    import duckdb

    from kproxy.analysis.duck import Tables
    from kproxy.views import shell

    is_place = "://" in words[0] or words[0] == "-" or exists(words[0])  # noqa: PTH110 - raises never
    query, places = (None, words) if is_place else (words[0], words[1:])
    if not places:
        raise KproxyError(f"there is no folder or capture {query!r}: a question stands before the tables it is about")
    if is_place and len(words) > 1 and " " in words[-1] and not exists(words[-1]):  # noqa: PTH110 - raises never
        right = shlex.join(["kproxy", "analyze", "sql", words[-1], *words[:-1]])
        raise KproxyError(f"a question stands before the tables it is about: {right}")
    check_out(shown, out)
    is_typed = query is None and sys.stdin.isatty()
    text = query if query is not None else "" if is_typed else shell.read(sys.stdin)

    with tables_at(places, ("batches",), how, quiet) as folder_of:

        def ask(again: bool) -> None:
            with Tables(folder_of(again)) as tables:
                session = shell.Shell(tables.sql, tables.names(), (duckdb.Error,), _words_of, shown, limit, quiet)
                if is_typed:
                    session.loop()
                else:
                    session.run([text] if query is not None else tables.statements(text), out)

        with in_words("the query"):
            _asked_again(ask)


def overview(places: tuple[str, ...], **given: Any) -> None:
    """Show what is in tables."""
    from kproxy.analysis.duck import Tables
    from kproxy.analysis.question import times
    from kproxy.analysis.questions.sections import TABLES

    times("exchanges", given["since"], given["until"])
    how = captures.taken(given)
    with tables_at(places, TABLES, how, given["quiet"]) as folder_of:

        def ask(again: bool) -> None:
            with Tables(folder_of(again)) as tables:
                show_overview("analyze", places, tables, **given, key_log=how["key_log"])
                if given["shown"] != "table" and not given["quiet"]:  # a table has a section of it
                    _say_what_lacks(tables, places)

        with in_words("the question"):
            _asked_again(ask)


def findings(places: tuple[str, ...], **given: Any) -> None:
    """Show what stands out."""
    from kproxy.analysis.duck import Tables
    from kproxy.analysis.findings import TABLES

    how = captures.taken(given)
    with tables_at(places, TABLES, how, given["quiet"]) as folder_of:

        def ask(again: bool) -> None:
            with Tables(folder_of(again)) as tables:
                show_findings(tables, **given)
                if not given["quiet"]:
                    _say_what_lacks(tables, places)

        with in_words("the question"):
            _asked_again(ask)


COMMANDS = {
    "findings": findings_command("analyze", PLACES, captures.OPTIONS, findings),
    "overview": overview_command("analyze", PLACES, captures.OPTIONS, overview),
    **commands("analyze", PLACES, captures.OPTIONS, answer),
    "sql": click.command("sql")(with_options((*ANSWER, *captures.OPTIONS), sql)),
}
