"""An overview of tables: a heading and a small table for each section, and the commands to go on with; or JSON.

Refuses to know where sections come from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import click

from kproxy.views import answers, units

_HEADINGS = {
    "brokers": "Brokers",
    "clients": "Clients",
    "apis": "Requests of clients",
    "topics": "Topics",
    "errors": "Errors",
    "throttles": "Throttled",
    "slowest": "Slowest, expected waits left out",
    "groups": "Groups",
    "coordinators": "Groups that lost their coordinator",
    "leaders": "Leaders and replicas that changed",
    "zookeeper": "ZooKeeper",
    "quality": "What the captures show",
}
_NONE = {"errors": "No errors.", "throttles": "Nobody was throttled.", "slowest": "Nothing took longer than 100 ms."}

Rows = list[dict[str, Any]]


def show(
    found: Mapping[str, tuple[Any, int]],
    next_of: Callable[[Mapping[str, Rows]], Sequence[str]],
    shown: str,
    file: TextIO,
) -> None:
    """Print sections. found: frames with how many rows of each; next_of: the commands to go on with."""
    rows = {name: list(answers.dicts(frame)) for name, (frame, _) in found.items()}
    commands = next_of(rows)
    if shown == "json":
        told = {name: rows[name][:most] for name, (_, most) in found.items()}
        print(json.dumps({**told, "next": list(commands)}), file=file)
        return
    (span,) = rows["span"]
    if not span["exchanges"]:
        click.echo("No exchanges.", file=file)
    else:
        first, last = (str(span[name]).replace("T", " ").removesuffix("Z")[:23] for name in ("first", "last"))
        click.echo(
            f"{first} to {last} UTC, {units.duration(span['lasted_ns'])}: {span['exchanges']:,} exchanges, "
            f"{units.size(span['bytes'])}, {_count(span, 'connections')}, {_count(span, 'sources')}",
            file=file,
        )
    for name, heading in _HEADINGS.items():
        frame, most = found[name]
        if not rows[name]:
            if name in _NONE and span["exchanges"]:
                click.echo(f"\n{_NONE[name]}", file=file)
            continue
        click.echo(f"\n{click.style(heading, bold=True)}", file=file)
        for line in answers.lines_of(frame, rows[name][:most], file):
            click.echo(line, file=file)
        if len(rows[name]) > most:
            click.echo("...", file=file)
    if span["exchanges"] or rows["zookeeper"]:
        click.echo("\n".join(["", click.style("Ask next", bold=True), *commands]), file=file)


def _count(row: Mapping[str, Any], what: str) -> str:
    return f"{row[what]:,} {what if row[what] != 1 else what.removesuffix('s')}"
