"""The command line: sub-commands only, no logic. Whatever is heavy is imported by the command that needs it."""

import logging
import sys
import time
from typing import Any

import click

from kproxy import __version__
from kproxy.errors import KproxyError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kproxy")
def cli() -> None:
    """A protocol-aware proxy for Apache Kafka, and an analyser of its traffic."""


@cli.command(
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
@click.option("--config", "file", metavar="FILE.toml", help="Settings, and more than one [[cluster]].")
@click.option("--max-connections", metavar="N", help="Then accepting waits. Default: 10000.")
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
    import os

    from kproxy import config

    settings = config.load(file, os.environ, flags)
    _log_lines(settings.log_level)

    from kproxy.proxy.server import Server

    Server(settings).run()


def _log_lines(level: str) -> None:
    """One line for each thing that happens, to standard error, times in UTC."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def main() -> None:
    try:
        cli()
    except KproxyError as fault:
        click.echo(f"kproxy: {fault}" if "\n" not in str(fault) else f"kproxy:\n{fault}", err=True)
        sys.exit(2)
