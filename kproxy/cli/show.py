"""`kproxy show`: one exchange of a capture, why it took its time, and what stood before it on its connection."""

import sys
from typing import Any

import click

from kproxy.cli.captures import options, settings
from kproxy.errors import KproxyError

BEFORE = 5  # exchanges


@click.command()
@click.argument("captures", nargs=-1, required=True, metavar="CAPTURE...")
@click.option("--connection", type=int, required=True, metavar="C", help="As `slow` and the tables say.")
@click.option("--number", type=int, required=True, metavar="N", help="Of the request on its connection.")
@click.option("--before", type=click.IntRange(0), default=BEFORE, show_default=True, metavar="N", help="Exchanges.")
@click.option("--records-shown", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Per batch.")
@click.option("--show-secrets", "secrets", is_flag=True, help="Show tokens, credentials and passwords.")
@options
def show(
    captures: tuple[str, ...], connection: int, number: int, before: int, records_shown: int, secrets: bool, **how: Any
) -> None:
    """One exchange: when it was, why it took its time, what stood before it on its connection, and both frames decoded.

    The capture's tables are made first, as `kproxy analyze` does, and found again later. --cluster, --port,
    --zookeeper-port, --rotated and --key-log must be those with which connection and number were found.

    \b
    Example, with a row of `kproxy analyze slow incident.pcap`:
      kproxy show incident.pcap --connection 8419965625270144188 --number 63
    """
    from kproxy.analysis import cached, single
    from kproxy.analysis.duck import Tables
    from kproxy.cli.analyze import tables_at
    from kproxy.convert.frames import frames_of
    from kproxy.views import answers
    from kproxy.views import exchange as view

    if any(cached.is_dataset(capture) for capture in captures):
        raise KproxyError(f"{captures[0]} is no capture: tables do not hold the frames, name the capture")
    with (
        tables_at(captures, ("exchanges", "connections"), how) as folder_of,
        Tables(folder_of(False)) as tables,
    ):
        said = list(answers.dicts(single.explained(tables, connection, number)))
        earlier = single.before(tables, connection, number, before)
        rows = list(answers.dicts(earlier))
        found = frames_of(captures, connection, number, settings(how))
        view.show(found, show_secrets=secrets, records=records_shown)
        for row in said:
            click.echo(f"\nWhy: {row['explanation']}")
        if rows:
            click.echo(f"\n{click.style('Before it on the connection', bold=True)}")
            for line in answers.lines_of(earlier, rows, sys.stdout):
                click.echo(line)
