"""`kproxy demo`: the options of the demonstration in `kproxy.demo`."""

from pathlib import Path

import click

from kproxy.interrupts import EndsAtOnce


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(min=0), metavar="N", help="Stop after N seconds. Default: run until Ctrl-C."
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Record the traffic as the tables that kproxy convert writes.",
)
def demo(seconds: float | None, record: Path | None) -> None:
    """Kafka traffic decoded, with nothing to set up.

    \b
    Run in a terminal until Ctrl-C; or record tables of the traffic, to try the other commands on:
      kproxy demo
      kproxy demo --seconds 20 --record tables

    A miniature cluster of three brokers and its clients, all of it on this machine, with kproxy in between and kproxy
    top on it. Where input or output is no terminal, and with TERM=dumb: a line every two seconds.
    """
    with EndsAtOnce():  # until it has handlers of its own
        from kproxy.demo import app

        app.run(seconds, record)
