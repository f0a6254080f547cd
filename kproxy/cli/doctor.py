"""`kproxy doctor`: the options. The checks: `checks.doctor`, how they look: `views.doctor`."""

import json
import logging
import os
import sys
from typing import Any

import click


@click.command(
    epilog="Exit status: 0, nothing keeps clients from working; 1, at least one error; 2, this command is wrong."
)
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option("--listen", metavar="HOST:PORT", help="As for kproxy run; the following options too.")
@click.option("--bootstrap", metavar="HOST:PORT[,...]")
@click.option("--advertise", metavar="HOST:PORT")
@click.option("--route", metavar="ports|sidecar|transparent|sni")
@click.option("--broker-port-base", metavar="PORT")
@click.option("--admin", metavar="HOST:PORT")
@click.option("--max-connections", metavar="N")
@click.option("--connect-timeout-s", metavar="SECONDS", help="Time for each connection. Default: 10.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for all checks together.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print findings, and checks that passed or were skipped, as JSON."
)
@click.option("-v", "--verbose", is_flag=True, help="Also print the checks that passed or were skipped.")
def doctor(file: str | None, timeout_s: float, as_json: bool, verbose: bool, **flags: Any) -> None:
    """Check a configuration, this host and the clusters, before traffic does.

    It connects to every broker as kproxy would, TLS and login included, binds the ports that kproxy would bind, and
    prints a remedy for each finding. It changes nothing. Run it where kproxy is to run, while kproxy does not.

    \b
      kproxy doctor kproxy.toml
      kproxy doctor --listen :9092 --bootstrap kafka-1:9092 --advertise 'kafka.example:{port}'
    """
    # the findings include messages that a start would log
    logging.getLogger("kproxy").addHandler(logging.NullHandler())
    from rich.console import Console

    from kproxy.checks.doctor import examine
    from kproxy.views.doctor import lines
    from kproxy.views.terminal import can_redraw, printable

    console = Console(stderr=True)
    if can_redraw(console) and not as_json:
        with console.status("reading the settings") as status:
            report = examine(
                file, os.environ, flags, timeout_s=timeout_s, say=lambda text: status.update(printable(text))
            )
    else:
        report = examine(file, os.environ, flags, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        for line in lines(report, verbose=verbose):
            click.echo(line)
    sys.exit(0 if report.is_sound else 1)
