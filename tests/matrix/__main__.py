"""`./dev matrix`: every client with every broker and every kind of security, through kproxy.

One release after another; without options all of them, which takes about an hour, and writes docs/matrix.md. With
options, only what they name, and no page.
"""

import fcntl
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from tests.matrix import brokers, clients, report, setup, ways
from tests.matrix.cases import OPEN, Case, Leak, Outcome, Results, run_release
from tests.matrix.clients import Client

PAGE = Path(__file__).parents[2] / "docs/matrix.md"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _chosen(found: list[str], names: tuple[str, ...], what: str) -> list[str]:
    """Those that are one of the names, or begin with one that none is; all without names."""
    for name in names:
        if not any(one.lower().startswith(name.lower()) for one in found):
            raise click.UsageError(f"no {what} begins with {name!r}; there are: {', '.join(found)}")
    whole = {one.lower() for one in found}
    wanted = [name.lower() for name in names]
    return [
        one
        for one in found
        if not names or any(one.lower() == name if name in whole else one.lower().startswith(name) for name in wanted)
    ]


def _install(wanted: list[Client]) -> list[Client]:
    """Builds the drivers; those whose tools are missing are named and left out."""
    missing = [client for client in wanted if not setup.available(client.family)]
    for client in missing:
        click.echo(f"matrix: {client.name} is left out: {client.family} is not installed", err=True)
    found = [client for client in wanted if client not in missing]
    for client in found:
        client.command()
    return found


def _versions() -> list[str]:
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    return [f"Python {platform.python_version()}", (java or ["no Java"])[0].replace('"', "")]


def _say(outcome: Outcome) -> None:
    case = outcome.case
    text = f"{case.release.name}: {case.client.name}, {case.way.name}: {outcome.state} ({outcome.seconds:.1f} s)"
    click.echo(f"{text} {outcome.reason}".rstrip())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--client", multiple=True, help="Only clients whose names begin so; can be given several times.")
@click.option("--broker", multiple=True, help="Only releases that begin so.")
@click.option("--security", multiple=True, help="Only kinds of security that begin so.")
@click.option("--jobs", type=click.IntRange(1, 16), default=2, show_default=True, help="Clients at a time.")
@click.option("--lock", type=click.Path(path_type=Path), help="A file that is locked while brokers of a release run.")
@click.option(
    "--page", type=click.Path(path_type=Path), help="Write the page there. Default: docs/matrix.md of a whole run."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="A file of outcomes: those that it has are not run again, further ones are added.",
)
@click.option("--no-run", is_flag=True, help="Run nothing: show what --results has, and write the page of it.")
@click.option("--keep", type=click.Path(path_type=Path), help="A folder for jobs, outputs and logs, which is kept.")
def main(
    client: tuple[str, ...],
    broker: tuple[str, ...],
    security: tuple[str, ...],
    jobs: int,
    lock: Path | None,
    page: Path | None,
    results: Path | None,
    no_run: bool,
    keep: Path | None,
) -> None:
    """Every client with every broker and every kind of security, through kproxy."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a shell's background, too: brokers are ended in any case
        signal.signal(number, signal.default_int_handler)
    names = _chosen([one.name for one in clients.CLIENTS], client, "client")
    wanted = [one for one in clients.CLIENTS if one.name in names]
    if not no_run:
        wanted = _install(wanted)
    names = _chosen([one.name for one in brokers.RELEASES], broker, "release")
    releases = [one for one in brokers.RELEASES if one.name in names]
    names = _chosen([one.name for one in ways.WAYS], security, "kind of security")
    columns = [one for one in ways.WAYS if one.name in names]
    whole = not (client or broker or security)
    known = Results(results)
    outcomes: list[Outcome] = []
    leaks: list[str] = []
    with tempfile.TemporaryDirectory(prefix="matrix-") as temporary:
        for release in releases:
            cases = [Case(one, release, way) for one in wanted for way in columns]
            here = [outcome for case in cases if (outcome := known.of(case)) is not None]
            done = {outcome.case for outcome in here}
            if not no_run and (left := [case for case in cases if case not in done]):
                folder = (keep or Path(temporary)) / release.name.replace(",", "").replace(
                    " ", "-"
                )  # log.dirs is a list
                folder.mkdir(parents=True)
                setup.jars(release.version)
                with _locked(lock) if lock else nullcontext(), brokers.running(release, folder / "brokers") as cluster:
                    try:
                        for outcome in run_release(cluster, left, folder, jobs):
                            here.append(outcome)
                            known.add(outcome)
                            _say(outcome)
                    except Leak as fault:
                        leaks.append(f"Kafka {release.name}: {fault}")
                        click.echo(leaks[-1], err=True)
            outcomes += here
            report.show(release, here, wanted, columns)
    if page or whole:
        report.write(page or PAGE, outcomes, releases, wanted, columns, _versions())
    failed = [outcome for outcome in outcomes if outcome.state == "fails"]
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in ("works", "cannot", OPEN)}
    click.echo(
        f"{count['works']} work, {count['cannot']} cannot exist, {len(failed)} fail, {count[OPEN]} are open, "
        f"{len(leaks)} leaks"
    )
    sys.exit(bool(failed or leaks or count[OPEN]))


if __name__ == "__main__":
    main()
