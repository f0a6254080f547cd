"""`python -m bench`: options in, a table or JSON out, status 1 if a limit was not kept."""

import json
import sys

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import cases, measure, report
from bench.load import LoadError
from bench.processes import BenchError

_NAMES = [case.name for case in cases.CASES]
_MIN_WIDTH = 125  # even if the output is no terminal


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cases", "names", metavar="NAME,...", default=",".join(_NAMES), show_default=True)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), help="Rounds per case and version.  [default: 15; with --quick: 5]"
)
@click.option(
    "--quick",
    is_flag=True,
    help="Send a third of the requests in fewer rounds: takes two minutes, with noisier results.",
)
@click.option("--detail", type=click.Choice(("headers", "topics")), default="headers", show_default=True)
@click.option(
    "--policy",
    is_flag=True,
    help="Run kproxy with 20 policy rules that allow this load; the limits are those of topics.",
)
@click.option(
    "--load",
    type=click.Choice((*cases.LOADS, "both")),
    default="both",
    show_default=True,
    help="paced: proxies idle between requests; saturating: proxies are the bottleneck.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
def main(names: str, rounds: int | None, quick: bool, detail: str, policy: bool, load: str, as_json: bool) -> None:
    """CPU time and memory of kproxy, HAProxy and nginx, with a minimal broker and minimal clients."""
    wanted = [case for case in cases.CASES if case.name in names.split(",")]
    if unknown := set(names.split(",")) - set(_NAMES):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(_NAMES)}", param_hint="--cases")
    rounds = rounds or (5 if quick else 15)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redraw only between rounds: a drawing thread would compete with the load.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        loads = cases.LOADS if load == "both" else (load,)
        task = progress.add_task("", total=len(loads) * measure.steps(wanted, rounds))

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1)
            progress.refresh()

        try:
            share = 1 / 3 if quick else 1.0
            runs = [measure.run(wanted, rounds, share, step, detail, each, policy=policy) for each in loads]
        except (BenchError, LoadError) as fault:
            raise click.ClickException(str(fault)) from fault
    if as_json:
        print(json.dumps([report.as_json(run) for run in runs], indent=2))
    else:
        for run in runs:
            report.show(run, Console(width=max(_MIN_WIDTH, Console().width)))
    sys.exit(0 if all(report.passed(run) for run in runs) else 1)


if __name__ == "__main__":
    main()
