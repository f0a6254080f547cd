"""`kproxy analyze findings` and `kproxy spark findings`: options, help, one call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from kproxy.cli.asking import TIMES, check_out, with_options


def thresholds_shown(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print all kinds and thresholds, and end."""
    if not wanted or context.resilient_parsing:
        return
    from kproxy.analysis.findings import KINDS, THRESHOLDS
    from kproxy.views import findings as view

    for line in view.kinds(KINDS, THRESHOLDS):
        click.echo(line)
    context.exit()


THRESHOLDS = (
    click.option(
        "--threshold", "given", metavar="NAME=VALUE", multiple=True, help="Change a threshold; --list names them all."
    ),
    click.option(
        "--thresholds", "file", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="TOML: NAME = VALUE."
    ),
)
_LIST = click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=thresholds_shown,
    help="List all kinds, their thresholds and the reasons for these, and exit.",
)
_KIND = click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Only findings of this kind.")
_SHOWN = (
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Maximum number of findings."),
    click.option("--format", "shown", type=click.Choice(("table", "json", "csv")), default="table"),
    click.option("--json", "shown", flag_value="json", help="The same as --format json."),
    click.option("--out", metavar="PATH", help="File for the answer."),
    click.option("-q", "--quiet", is_flag=True, help="Print only errors on standard error."),
)


def findings_command(
    program: str, places: Callable[[Any], Any], more: Sequence[Callable[[Any], Any]], answer: Callable[..., None]
) -> click.Command:
    """The command of one engine; `answer` gets what `show_findings` needs besides tables."""

    @places
    def findings(**given: Any) -> None:
        """List findings by severity, each with evidence, why it matters, and the setting to change.

        Batches of one record, no compression, empty fetches, quotas, old protocol versions, weak acks, hot partitions
        and brokers, connection churn, rebalance storms, growing lag, open transactions, lost segments. Each needs
        enough traffic, by thresholds that you can change: --list shows them with their reasons.
        """
        from kproxy.analysis.findings.thresholds import read
        from kproxy.analysis.question import times

        check_out(given["shown"], given["out"])
        times("exchanges", given["since"], given["until"])
        read(given["given"], given["file"])
        check_kinds(given["kinds"])
        listed = given.pop("places")
        answer((listed,) if isinstance(listed, str) else tuple(listed), **given)

    made = click.command("findings")(with_options((*TIMES, _KIND, *THRESHOLDS, _LIST, *_SHOWN, *more), findings))
    made.help = (
        f"{inspect.cleandoc(made.help or '')}\n\n\b\nExamples:\n  kproxy {program} findings tables\n"
        f"  kproxy {program} findings tables --from -5m --threshold single_record_share=0.9 --format json"
    )
    return made


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise KproxyError for a kind that is none."""
    from kproxy.analysis.findings import KINDS
    from kproxy.analysis.questions.pieces import no_such

    for kind in kinds:
        if kind not in KINDS:
            raise no_such("--kind: there is none called", kind, list(KINDS))


def show_findings(
    tables: Mapping[str, Any],
    since: str | None,
    until: str | None,
    kinds: Sequence[str],
    given: Sequence[str],
    file: str | None,
    limit: int | None,
    shown: str,
    out: str | None,
    quiet: bool,
) -> None:
    """Find and show, with tables of either engine."""
    from rich.console import Console

    from kproxy.analysis.engine import ask, rows
    from kproxy.analysis.findings import TABLES, findings, records_of
    from kproxy.analysis.findings.thresholds import read
    from kproxy.analysis.jobs import JOBS
    from kproxy.analysis.question import Question, chosen_by_time
    from kproxy.views import answers, progress
    from kproxy.views import findings as view

    names = [*TABLES, *([] if records_of(tables) is None else ["records"])]
    frames = {name: chosen_by_time(name, tables, since, until) for name in names}
    with progress.waiting("looking for what stands out", quiet):
        found = findings(frames, read(given, file), kinds or None)
    with answers.opened(out) as stream:
        width = Console().width if out is None and stream.isatty() else None
        view.show(found, shown, stream, width, limit)
    if not found and not quiet:
        chosen = Question(JOBS["slow"], since=since, until=until)
        if not list(rows(ask({"t": frames["exchanges"]}, one="select 1 from t limit 1"))):
            click.echo(f"There is nothing to judge. {chosen.why_empty(tables)}", err=True)
