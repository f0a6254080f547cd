"""`kproxy top`: the options of the terminal view. The work is done in `kproxy.views.top`."""

import json
import shutil
import sys
from pathlib import Path

import click

from kproxy.cli import admin_port

_VIEWS = ("apis", "brokers", "topics", "clients", "groups", "connections", "slow", "errors", "findings")
_TIMEOUT_S = 5.0


@click.command()
@click.argument("admin", required=False, metavar="[ADMIN]")
@click.option("-a", "--admin", "also", metavar="ADMIN", help="The same as the argument, as for kproxy ctl.")
@admin_port.token_file
@admin_port.ca
@click.option(
    "--show",
    "view",
    type=click.Choice(_VIEWS),
    default="apis",
    show_default=True,
    metavar="TABLE",
    help=f"The table at first, and that of --once: {', '.join(_VIEWS)}.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two updates; with --once and --json the span of the rates.",
)
@click.option("--once", is_flag=True, help="Print one table, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with all tables, and exit.")
def top(
    admin: str | None,
    also: str | None,
    token_file: Path | None,
    ca: Path | None,
    view: str,
    interval: float,
    once: bool,
    as_json: bool,
) -> None:
    """Show what a running kproxy does: APIs, brokers, topics, clients, groups, connections, slow exchanges, errors.

    ADMIN is the HOST:PORT of its admin port, its --admin, as seen from here. Default: localhost:9600.

    \b
    In a terminal; 1 to 9 choose a table, Enter opens a row, / filters, s sorts, p pauses, q ends:
      kproxy top
      kproxy top https://kproxy-1:9600 --token-file token --ca ca.pem
    \b
    For scripts:
      kproxy top --once --show brokers
      kproxy top --json --interval 10 | jq '.apis[] | select(.errors_per_s > 0)'
    """
    from kproxy.admin.asking import AdminPort
    from kproxy.views.top import once as plainly
    from kproxy.views.top.source import Source

    if admin and also:
        raise click.UsageError(f"one address is asked: {admin} or {also}")
    source = Source(AdminPort(admin or also or "localhost:9600", token_file, ca, _TIMEOUT_S))
    if as_json or once:
        plainly.ask(source, interval)
        if as_json:
            click.echo(json.dumps(plainly.document(source), indent=2))
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else plainly.WIDTH
        lines, left_out = plainly.as_text(source, view, width)
        for line in lines:
            click.echo(line)
        if left_out:
            click.echo(f"only {left_out}", err=True)
        return
    plainly.check_terminal(sys.stdin, sys.stdout, sys.stderr)
    from kproxy.views.top.screen import Top

    Top(source, view, interval).run()
