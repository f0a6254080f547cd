"""`kproxy show`: one exchange of a capture, where its time went, and the exchanges before it on its connection."""

import shlex
import sys
from collections.abc import Iterable
from typing import Any

import click

from kproxy.cli.captures import options, settings, shown
from kproxy.errors import KproxyError

BEFORE = 5  # exchanges


@click.command()
@click.argument("captures", nargs=-1, required=True, metavar="CAPTURE...")
@click.option(
    "--connection",
    type=int,
    metavar="C",
    help="Id of the connection, from a row of `kproxy analyze slow`.",
)
@click.option(
    "--number",
    type=int,
    metavar="N",
    help="Number of the request on its connection, from the same row.",
)
@click.option(
    "--before",
    type=click.IntRange(0),
    default=BEFORE,
    show_default=True,
    metavar="N",
    help="Number of earlier exchanges of the connection to list.",
)
@click.option(
    "--wireshark",
    is_flag=True,
    help="Wireshark's own dissection of the packets; needs tshark, and the extra wireshark.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@shown
@options
def show(
    captures: tuple[str, ...],
    connection: int | None,
    number: int | None,
    before: int,
    wireshark: bool,
    quiet: bool,
    records_shown: int,
    show_secrets: bool,
    **how: Any,
) -> None:
    """Show one exchange: both frames decoded, where its time went and why, its packets, and earlier exchanges.

    Packets are those of its connection from the first byte of the request to the last of the answer, numbered as
    Wireshark does; "sent again" are retransmissions.

    The capture's tables are made first, as `kproxy analyze` does, and found again later. --cluster, --port,
    --zookeeper-port, --rotated and --key-log must be those with which connection and number were found.

    \b
    Example, with a row of `kproxy analyze slow incident.pcap`:
      kproxy show incident.pcap --connection 4212281926912369617 --number 63
    """
    from kproxy.analysis import cached
    from kproxy.analysis.duck import Tables
    from kproxy.analysis.questions import single
    from kproxy.cli.analyze import tables_at
    from kproxy.convert.frames import frames_of
    from kproxy.convert.packets import by_file, packets_of
    from kproxy.convert.wireshark import dissections
    from kproxy.views import answers, progress, units
    from kproxy.views import exchange as view
    from kproxy.views import packets as packets_view
    from kproxy.views.terminal import printable

    if connection is None or number is None:
        lacks = "--connection" if connection is None else "--number"
        slow = shlex.join(["kproxy", "analyze", "slow", *captures])
        raise click.UsageError(f"Missing option '{lacks}': `{slow}` prints the whole command for the slowest exchange")
    if any(cached.is_dataset(capture) for capture in captures):
        raise KproxyError(f"{captures[0]} is no capture: tables do not hold the frames, name the capture")
    with (
        tables_at(captures, ("exchanges", "connections"), how, quiet) as folder_of,
        Tables(folder_of(False)) as tables,
    ):
        explanations = list(answers.dicts(single.explained(tables, connection, number)))
        earlier = single.before(tables, connection, number, before)
        rows = list(answers.dicts(earlier))
        with progress.waiting("reading the capture", quiet):
            found = frames_of(captures, connection, number, settings(how))
            packets = packets_of(found)
    view.show(found, show_secrets=show_secrets, records=records_shown)
    for row in explanations:
        _heading(f"Where its {units.duration(row['total_ns'])} went")
        _lines(packets_view.parts(row))
        click.echo(f"Why: {row['explanation']}")
    _heading("Packets")
    _lines(packets_view.lines(packets))
    if wireshark:
        for path, numbers in by_file([packet for packet in packets if packet.carries]).items():
            for packet, text in dissections(path, numbers, found.connection.broker_port, how["key_log"]):
                _heading(f"Wireshark's packet {packet} of {printable(path.name)}")
                click.echo(text.rstrip())
    if rows:
        _heading("Before it on the connection")
        _lines(answers.lines_of(earlier, rows, sys.stdout))


def _heading(text: str) -> None:
    click.echo(f"\n{click.style(text, bold=True)}")


def _lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
