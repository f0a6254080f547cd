"""The matrix as a table: on a terminal, and as docs/matrix.md."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.matrix.brokers import Release
from tests.matrix.cases import OPEN, Outcome
from tests.matrix.clients import Client
from tests.matrix.ways import Way

_SIGNS = {"works": "yes", "fails": "FAILS", "cannot": "-", OPEN: "?"}
_HEAD = """\
# Which clients work through kproxy, with which brokers

`./dev matrix` made this page on {date}. Of {all} combinations {tried} were tried: {works} work through kproxy,
{cannot} cannot exist, {fails} fail, {open} are open (the client ran out of time with and without kproxy).

A combination works when the client, configured as for the broker itself, produced records of random bytes through
kproxy with every codec that both sides know, with keys, and headers where the broker has them (0.11 and later); when a
member of a group consumed half of them and committed, and a second one the rest; when every byte of every record came
back, in order and once (of share groups and Streams: in any order); and when every connection that the brokers
accepted was one of kproxy's.

TLS ends at kproxy and begins anew towards the brokers. PLAIN, SCRAM and OAUTHBEARER are SASL_SSL, and pass through
kproxy to the broker; "by kproxy": kproxy checks the client's login, and logs in at the broker as itself.

A dash stands for a combination that does not work without kproxy either; the notes say what the client says then. An
empty cell was not tried: `./dev matrix --results FILE` goes on where a run was broken off.
"""


def table(release: Release, outcomes: Sequence[Outcome], clients: Sequence[Client], ways: Sequence[Way]) -> Table:
    """One release, for the terminal."""
    found = Table(title=f"Kafka {release.name} ({release.version})", title_justify="left")
    found.add_column("client", no_wrap=True)
    for way in ways:
        found.add_column(way.name, justify="center")
    signs = {(outcome.case.client, outcome.case.way): _SIGNS[outcome.state] for outcome in outcomes}
    for client in clients:
        found.add_row(client.name, *(signs.get((client, way), "") for way in ways))
    return found


def show(release: Release, outcomes: Sequence[Outcome], clients: Sequence[Client], ways: Sequence[Way]) -> None:
    Console(width=max(120, Console().width)).print(table(release, outcomes, clients, ways))
    for outcome in outcomes:
        if outcome.state == "fails":
            print(f"FAILS: {outcome.case.client.name}, {outcome.case.way.name}: {outcome.reason}")


def write(
    path: Path,
    outcomes: Sequence[Outcome],
    releases: Sequence[Release],
    clients: Sequence[Client],
    ways: Sequence[Way],
    versions: Sequence[str] = (),
) -> None:
    """The page, of a whole run."""
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in _SIGNS}
    every = len(releases) * len(clients) * len(ways)
    lines = [_HEAD.format(date=datetime.date.today().isoformat(), tried=len(outcomes), all=every, **count)]
    if versions:
        lines.append("Made with " + ", ".join(versions) + ".\n")
    for release in releases:
        lines += [
            f"## Kafka {release.name} ({release.version})",
            "",
            "| client | " + " | ".join(way.name for way in ways) + " |",
            "|---" * (len(ways) + 1) + "|",
        ]
        notes: dict[str, int] = {}
        here = {
            (outcome.case.client, outcome.case.way): outcome for outcome in outcomes if outcome.case.release == release
        }
        for client in clients:
            row = [client.name]
            for way in ways:
                outcome = here.get((client, way))
                sign = "" if outcome is None else _SIGNS[outcome.state]
                if outcome is not None and outcome.state != "works":
                    sign += f" [{notes.setdefault(outcome.reason, len(notes) + 1)}]"
                row.append(sign)
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
        lines += [f"{number}. `{reason.replace('`', chr(39))}`" for reason, number in notes.items()]
        lines += [""] if notes else []
    path.write_text("\n".join(lines).rstrip() + "\n")
