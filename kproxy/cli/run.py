"""`kproxy run`: the options of the proxy. Its settings are read and checked by `kproxy.proxy.config`."""

import os
from typing import Any

import click


@click.command(
    epilog="Every option is also a variable, like KPROXY_BROKER_PORT_BASE, and a key of the file, like "
    "broker_port_base; an option wins over the variable, the variable over the file."
)
@click.option("--listen", metavar="HOST:PORT", help="Where clients bootstrap.")
@click.option("--bootstrap", metavar="HOST:PORT[,...]", help="Brokers of the cluster; one that lives is enough.")
@click.option("--admin", metavar="HOST:PORT", help="HTTP: /metrics, /health, /ready.")
@click.option("--route", metavar="ports|sidecar", help="A port per broker (default), or one for the broker beside.")
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="What clients are told; {port}: ours, {id}: the node id, {host}: the broker's own name. "
    "Default: the host of --listen and {port}; with route sidecar {host}:{port}.",
)
@click.option("--broker-port-base", metavar="PORT", help="Broker N is at PORT + N. Default: the port of --listen + 1.")
@click.option(
    "--detail",
    metavar="headers|topics|batches",
    help="How closely what passes is read: headers and errors (default), topics and lag too, or every batch.",
)
@click.option("--config", "file", metavar="FILE.toml", help="Settings, and more than one [[cluster]].")
@click.option("--record", metavar="DIR", help="Write what passes as tables too, those of kproxy convert.")
@click.option(
    "--max-connections",
    metavar="N",
    help="Most open connections; further clients wait in the listen backlog. "
    "Default: 10000, or as many as the limit of open files allows.",
)
@click.option("--discovery-interval-s", metavar="SECONDS", help="Between two questions for the brokers. Default: 30.")
@click.option(
    "--drain-timeout-s", metavar="SECONDS", help="SIGTERM lets requests under way finish for so long. Default: 10."
)
@click.option("--log-level", metavar="LEVEL", help="debug (a line for each connection), info, warning or error.")
def run(file: str | None, **flags: Any) -> None:
    """Run the proxy.

    \b
    Before a cluster, a port for each broker (9093 is broker 0, 9094 is broker 1, ...):
      kproxy run --listen localhost:9092 --bootstrap kafka-1:9092,kafka-2:9092 --admin localhost:9600
    \b
    As a gateway that clients know as kafka.example:
      kproxy run --listen :9092 --bootstrap kafka-1:9092 --advertise 'kafka.example:{port}'
    \b
    As a sidecar of each broker, on the same port everywhere:
      kproxy run --route sidecar --listen :19092 --bootstrap localhost:9092
    """
    from kproxy.proxy import config, log_lines

    settings = config.load(file, os.environ, flags)
    log_lines.begin(settings.log_level)

    from kproxy.proxy.control.server import Server

    Server(settings).run()
