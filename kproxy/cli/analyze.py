"""`kproxy analyze JOB`: questions to tables on DuckDB, in this process. Logic is in `kproxy.analysis`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kproxy.cli.asking import Asked, check_tables, commands
from kproxy.errors import KproxyError


@contextmanager
def _in_words() -> Iterator[None]:
    """Errors of DuckDB as one line."""
    import duckdb

    try:
        yield
    except duckdb.ParserException as fault:
        near = re.search(r" near .*", plain(str(fault)))
        said = f"cannot be read{near[0] if near else ''}: give a condition in SQL, like \"api = 'Fetch'\""
        raise KproxyError(f"--where {said}") from None
    except duckdb.Error as fault:
        raise KproxyError(plain(str(fault))) from None


def plain(text: str) -> str:
    """What DuckDB says, without the name of the error's class and without the statement."""
    lines = [line.strip() for line in text.split("\nLINE ")[0].strip().splitlines() if line.strip()]
    return " ".join([lines[0].partition(" Error: ")[2] or lines[0], *lines[1:]]) if lines else "DuckDB failed"


def answer(asked: Asked) -> None:
    """Answer a question and show it."""
    from kproxy.analysis.duck import Tables
    from kproxy.analysis.question import Question
    from kproxy.views import answers

    question = Question(asked.job, asked.options, **asked.chosen)
    for line in question.check():
        click.echo(line, err=True)
    folder = asked.places[0]
    others = [asked.other] if asked.other is not None else []
    check_tables([folder, *others], asked.job.tables)
    with _in_words(), Tables(folder, others) as tables:
        other = None if asked.other is None else tables.beside(asked.other, asked.job.tables[0])
        answers.show(question.answer(tables, other), asked.shown, asked.out, asked.limit)


COMMANDS = commands("analyze", click.argument("places", metavar="TABLES"), (), answer)
