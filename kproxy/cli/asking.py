"""The common part of `kproxy analyze` and `kproxy spark`: a command for each job, made from its function.

Duty: options are the function's parameters and those of every question; help is the docstring. Faults are
reported before an engine starts, in the same words for both. Refuses to know engines.
"""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kproxy.errors import KproxyError

if TYPE_CHECKING:
    from kproxy.analysis.jobs import Job

FINDINGS_SHOWN = 5  # in an overview
MAX_LIMIT = 2**31 - 2  # one more is asked for, and Spark takes an int

_PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "by": ("--by", {"metavar": "COLUMN,...", "help": "api, version, broker, client, host, or any column."}),
    "every": ("--every", {"metavar": "TIME", "help": "Group by time too, in steps like '10 seconds' or '1 minute'."}),
    "slower_than_ms": (
        "--slower-than-ms",
        {"type": float, "metavar": "MS", "help": "Minimum total time, first request byte to last response byte."},
    ),
    "replicas": ("--replicas", {"is_flag": True, "help": "Include requests between brokers, mainly replication."}),
    "kafka": ("--kafka", {"metavar": "RELEASE", "help": "The release to be ready for: 3.7.2, or 3.7."}),
    "other": ("--with", {"metavar": "TABLES", "required": True, "help": "The other dataset."}),
}
PLACES = click.argument("places", nargs=-1, required=True, metavar="TABLES|CAPTURE...")
TIMES = (
    click.option(
        "--from",
        "since",
        metavar="TIME",
        help="Start: '2026-01-31T10:15:00' or '10:15' (UTC), or '-5m', before the end.",
    ),
    click.option(
        "--to", "until", metavar="TIME", help="End, exclusive: as --from; '+30s' is 30 s after the beginning."
    ),
)
_OTHER_TIMES = "other_since", "other_until"
_OF_OTHER = (
    click.option("--with-from", "other_since", metavar="TIME", help="Start in the other dataset. Default: --from."),
    click.option("--with-to", "other_until", metavar="TIME", help="End in the other dataset. Default: --to."),
)
_HAVING = click.option(
    "--having",
    metavar="SQL",
    help='Keep only rows of the answer that satisfy this condition, like "exchanges > 100".',
)
# By the first table of a job: a condition on its rows.
CONDITIONS = {
    "exchanges": "api = 'Fetch' and client = 'app'",
    "partitions": "topic = 'orders' and partition = 0",
    "batches": "topic = 'orders' and client = 'app'",
    "connections": "close = 'reset'",
    "quality": "kind = 'connect_refused'",
    "group_events": "group_id = 'billing' and event = 'expired'",
    "rebalances": "group_id = 'billing' and cause = 'session_expired'",
    "assignments": "group_id = 'billing' and topic = 'orders'",
    "leadership": "topic = 'orders' and change = 'offline'",
    "topology": "kind = 'broker' and change = 'gone'",
    "changes": "api = 'DeleteTopics' and answered",
    "registry": "kind = 'broker'",
}
ANSWER = (
    click.option(
        "--limit",
        type=click.IntRange(1, MAX_LIMIT),
        metavar="N",
        help="Maximum number of rows. Default: 50 for a table.",
    ),
    click.option(
        "--format",
        "shown",
        type=click.Choice(("table", "json", "csv", "parquet")),
        default="table",
        help="json: one object per row and line (jq -s makes an array of them). The table format has units in its "
        "cells, others in the names of columns (_ns, _ms, _bytes); times are UTC.",
    ),
    click.option("--json", "shown", flag_value="json", help="The same as --format json."),
    click.option("--out", metavar="PATH", help="File for the answer; a folder for Parquet."),
    click.option("-q", "--quiet", is_flag=True, help="Print only errors on standard error."),
)


@dataclass(frozen=True)
class Asked:
    """A question on the command line: the job, its tables, and the form of the answer."""

    job: "Job"
    places: tuple[str, ...]
    other: str | None
    shown: str
    out: str | None
    limit: int | None
    quiet: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, str | None] = field(default_factory=dict)


def with_options(options: Sequence[Callable[[Any], Any]], function: Any) -> Any:
    """A function with options of click, in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def command(
    program: str,
    job: "Job",
    places: Callable[[Any], Any],
    more: Sequence[Callable[[Any], Any]],
    answer: Callable[..., None],
) -> click.Command:
    """The command of a job. `places`: the argument; `more`: options of the engine, given to `answer` by name."""

    def run(shown: str, out: str | None, limit: int | None, quiet: bool, **given: Any) -> None:
        chosen = {key: given.pop(key, None) for key in ("since", "until", "where", "having", *_OTHER_TIMES)}
        found = given.pop("places")
        names = {parameter.name for parameter in job.parameters}
        options = {key: given.pop(key) for key in list(given) if key in names}
        other = options.pop("other", None)
        options = {key: value for key, value in options.items() if value is not None}
        if "by" in options:
            options["by"] = options["by"].replace(",", " ").split()
        check_out(shown, out)
        listed = (found,) if isinstance(found, str) else tuple(found)
        answer(Asked(job, listed, other, shown, out, limit, quiet, options, chosen), **given)

    text = f"Keep only rows of the table {job.tables[0]} that satisfy this condition, like"
    where = click.option("--where", metavar="SQL", help=f'{text} "{CONDITIONS[job.tables[0]]}".')
    has_other = any(parameter.name == "other" for parameter in job.parameters)
    run = with_options((*TIMES, *(_OF_OTHER if has_other else ()), where, _HAVING, *ANSWER, *more), run)
    for parameter in reversed(job.parameters):
        if parameter.name in ("where", "traffic"):  # values of the option --where, which every job has
            continue
        flag, settings = _PARAMETERS[parameter.name]
        default = parameter.default
        if default not in (inspect.Parameter.empty, None, False, ()):
            said = ",".join(default) if isinstance(default, tuple) else default
            settings = {**settings, "help": f"{settings['help']} Default: {said}."}
        run = click.option(flag, parameter.name, **settings)(run)
    run = places(run)
    text = inspect.getdoc(job.run) or ""
    return click.Command(
        job.name,
        callback=run,
        params=list(reversed(run.__click_params__)),  # type: ignore[attr-defined]
        help=f"{text}\n\n\b\nExample:\n  kproxy {program} {job.name} tables{job.example}",
        short_help=text.partition("\n")[0].partition(":")[0].rstrip(".") + ".",
    )


def commands(
    program: str, places: Callable[[Any], Any], more: Sequence[Callable[[Any], Any]], answer: Callable[..., None]
) -> dict[str, click.Command]:
    """The commands of all jobs, by name."""
    from kproxy.analysis.jobs import JOBS

    return {name: command(program, job, places, more, answer) for name, job in JOBS.items()}


def check_out(shown: str, out: str | None, is_folder: bool = False) -> None:
    """Raise KproxyError where an answer cannot be written as asked. is_folder: other formats than Parquet too."""
    is_folder |= shown == "parquet"
    if is_folder and out is None:
        what = "Parquet" if shown == "parquet" else f"an overview as {shown}"
        raise KproxyError(f"--format {shown} and --out go together: {what} is written to a folder")
    if out is not None and "://" not in out and Path(out).exists():
        raise KproxyError(f"--out {out} is there already: name {'a folder' if is_folder else 'a file'} that is not")
    if out is not None and "://" not in out and not Path(out).absolute().parent.is_dir():
        folder = Path(out).absolute().parent
        raise KproxyError(f"--out {out}: there is no folder {folder}: make it (mkdir -p {shlex.quote(str(folder))})")


def overview_command(
    program: str, places: Callable[[Any], Any], more: Sequence[Callable[[Any], Any]], answer: Callable[..., None]
) -> click.Command:
    """The command of the overview; `answer` gets what `show_overview` needs besides tables."""

    @places
    def overview(**given: Any) -> None:
        """Summarise tables or captures, and name the questions to ask next.

        First a verdict in a sentence, with four figures. Then findings, kinds of findings that were looked for in vain,
        a timeline of what users felt, the span of time, brokers, clients and their software, APIs with failures and
        latencies, topics, throttles, the slowest exchanges, groups, leader changes, ZooKeeper, and the flaws of the
        captures.

        --limit applies to each section. csv and parquet write a file for each section into the folder --out.
        """
        check_out(given["shown"], given["out"], is_folder=given["shown"] in ("csv", "parquet"))
        listed = given.pop("places")
        answer((listed,) if isinstance(listed, str) else tuple(listed), **given)

    made = click.command("overview")(with_options((*TIMES, *ANSWER, *more), overview))
    made.help = f"{inspect.cleandoc(made.help or '')}\n\n\b\nExample:\n  kproxy {program} overview tables --from 10:15"
    return made


def show_overview(
    program: str,
    places: Sequence[str],
    tables: Mapping[str, Any],
    since: str | None,
    until: str | None,
    limit: int | None,
    shown: str,
    out: str | None,
    quiet: bool,
    key_log: str | None = None,
) -> None:
    """Answer and show it, with tables of either engine. key_log: the file with TLS keys, if one was given."""
    from kproxy.analysis.conclusions import TABLES as OF_CONCLUSIONS
    from kproxy.analysis.conclusions import conclusions
    from kproxy.analysis.question import chosen_by_time
    from kproxy.analysis.questions import sections
    from kproxy.views import answers, progress
    from kproxy.views import overview as view

    frames = {name: chosen_by_time(name, tables, since, until) for name in sections.TABLES}
    found = sections.overview(frames, limit)
    if shown in ("csv", "parquet"):
        folder = Path(str(out))
        folder.mkdir()
        for name, (frame, most) in found.items():
            answers.show(frame, shown, str(folder / (f"{name}.csv" if shown == "csv" else name)), most, quiet)
        return
    with progress.waiting("computing the overview", quiet):
        rows = {name: (list(answers.dicts(frame)), most) for name, (frame, most) in found.items()}
        chosen = {name: chosen_by_time(name, tables, since, until) for name in OF_CONCLUSIONS}
        # On Spark findings take longer than all the rest: `kproxy spark findings`.
        listed, said = conclusions(chosen, finds=program == "analyze")
    commands = sections.next_questions(program, places, {name: some for name, (some, _) in rows.items()}, frames)
    if listed:
        commands.insert(0, f"kproxy {program} findings {shlex.join(places)}")
    with answers.opened(out) as file:
        frames = {name: frame for name, (frame, _) in found.items()}
        is_nothing = not rows["span"][0][0]["exchanges"]
        why = why_nothing(tables, since, until, key_log) if is_nothing else ""
        view.show(frames, rows, said, limit or FINDINGS_SHOWN, commands, shown, file, program == "analyze", why)


def why_nothing(tables: Mapping[str, Any], since: str | None, until: str | None, key_log: str | None = None) -> str:
    """The reason for an answer without exchanges, in sentences: the times that were given, or the captures' quality."""
    from kproxy.analysis.questions import sections
    from kproxy.views import answers, summary
    from kproxy.wording import counted

    (span,) = answers.dicts(sections.span(tables))
    if span["exchanges"]:
        given = " and ".join(
            f"{name} {text}" for name, text in (("--from", since), ("--to", until)) if text is not None
        )
        first, last = (str(span[name]).replace("T", " ").removesuffix("Z")[:19] for name in ("first", "last"))
        exchanges = counted(span["exchanges"], "exchange")
        return f"{given}: of {exchanges}, from {first} to {last} UTC, none is in this time."
    return summary.why_nothing(answers.dicts(sections.quality(tables)), key_log)


def check_tables(folders: Sequence[str], tables: Sequence[str], quiet: bool = False) -> None:
    """Raise KproxyError for a folder that is no dataset, or lacks a table; print those that it is too old for."""
    from kproxy.tables import dataset

    for folder in folders:
        lacking = [table for table in tables if not dataset.has_rows(folder, table) and dataset.is_older(folder, table)]
        if lacking and not quiet:
            made = f"{folder} was written by an older kproxy, which made no {', '.join(lacking)}"
            click.echo(f"{made}: convert the captures again", err=True)
