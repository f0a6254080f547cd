"""`kproxy compat`: the options. What is asked: `checks.compat`, how it looks: `views.compat`."""

import json
import os
from pathlib import Path

import click


@click.command()
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option("--bootstrap", metavar="HOST:PORT[,...]", help="Brokers of the cluster, in place of a file.")
@click.option(
    "--clients",
    metavar="URL|TABLES",
    help="Source of the clients: the admin address of a running kproxy, like http://localhost:9600, or tables.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def compat(file: str | None, bootstrap: str | None, clients: str | None, as_json: bool) -> None:
    """Show what kproxy does with each API of a cluster: rewritten, passed, capped or hidden; and the losses of clients.

    It asks every broker which versions it serves. A file's [[cluster]] gives TLS and login.

    \b
      kproxy compat --bootstrap kafka-1:9092
      kproxy compat kproxy.toml --clients http://localhost:9600
    """
    from kproxy.checks.compat import clients_of, compatibility
    from kproxy.errors import ConfigError
    from kproxy.proxy.config.load import load
    from kproxy.views.compat import lines

    if file is None and bootstrap is None and not os.environ.get("KPROXY_CONFIG"):
        raise ConfigError([("--bootstrap", "is missing: give it HOST:PORT, or a FILE.toml")])
    if file is not None and ":" in file and not Path(file).exists():
        raise ConfigError([(file, f"there is no such file; a broker's address is given by --bootstrap {file}")])
    flags = {"bootstrap": bootstrap, **({"listen": "127.0.0.1:0"} if file is None else {})}
    found = compatibility(load(file, os.environ, flags), clients_of(clients) if clients else ())
    if as_json:
        click.echo(json.dumps([one.as_json() for one in found], indent=2))
        return
    for number, one in enumerate(found):
        if number:
            click.echo()
        for line in lines(one):
            click.echo(line)
