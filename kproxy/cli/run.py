"""`kproxy run`: the options of the proxy. Its settings are read and checked by `kproxy.proxy.config.load`."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kproxy.cli import Hinting
from kproxy.interrupts import EndsAtOnce

if TYPE_CHECKING:
    from kproxy.proxy.config.settings import Config


class _Run(Hinting):
    """Hints at --config where a file is given as an argument, as `kproxy check` takes it."""

    def hint(self, arguments: list[str]) -> str:
        for before, each in zip(["", *arguments], arguments, strict=False):
            if each.endswith(".toml") and before != "--config":
                return f"A file of settings has an option: --config {shlex.quote(each)}"
        return ""


@click.command(
    cls=_Run,
    epilog="Each option can also be set by an environment variable, like KPROXY_BROKER_PORT_BASE, or in the file, like "
    "broker_port_base. An option wins over the variable, the variable over the file.",
)
@click.option("--listen", metavar="HOST:PORT", help="Address that clients bootstrap at.")
@click.option("--bootstrap", metavar="HOST:PORT[,...]", help="Brokers of the cluster; one that answers is enough.")
@click.option(
    "--admin",
    metavar="[HOST:]PORT",
    help="Address of the HTTP server: /metrics, /health, /ready, kproxy ctl. Without a host: this machine alone.",
)
@click.option(
    "--admin-token-file",
    metavar="FILE",
    help="Require the bearer token in this file, except for /health and /ready.",
)
@click.option(
    "--no-page",
    "page",
    flag_value=False,
    default=None,
    help="Do not serve the page on the admin server, nor keep the last hour for it.",
)
@click.option(
    "--route",
    metavar="ports|sidecar|sni|transparent",
    help="One port per broker (default), a single port for the broker next to kproxy, one over TLS for "
    "all brokers (sni: docs/tls.md), or one that the kernel redirects clients to (docs/transparent.md).",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Address given to clients for a broker. {port}: kproxy's port, {id}: node id, {host}: the broker's host. "
    "Default: the host of --listen and {port}; {host}:{port} with route sidecar.",
)
@click.option(
    "--broker-port-base", metavar="PORT", help="Broker N gets port PORT + N. Default: the port of --listen + 1."
)
@click.option(
    "--detail",
    metavar="headers|topics|batches",
    help="How much of each frame is read: headers and errors (default), also topics and lag, or also every batch.",
)
@click.option("--read-only", is_flag=True, default=None, help="Refuse every request that writes, creates or alters.")
@click.option(
    "--audit",
    metavar="stderr|FILE",
    help="Write a line of JSON for every administrative request and every refusal.",
)
@click.option("--config", "file", metavar="FILE.toml", help="File of settings, with one or more [[cluster]].")
@click.option("--record", metavar="DIR", help="Record the traffic as the tables that kproxy convert writes.")
@click.option("--record-keep-h", metavar="HOURS", help="Remove recorded files that are older. Default: all files stay.")
@click.option(
    "--record-keep-bytes", metavar="BYTES", help="Remove the oldest recorded files while all together exceed this size."
)
@click.option(
    "--flight",
    metavar="DIR",
    help="Keep the last minutes of all connections in memory, and write them into DIR when kproxy ctl dump asks, or "
    "when something goes wrong (docs/flight.md).",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Push the metrics of /metrics to a collector of OpenTelemetry each minute, by OTLP, like "
    "http://collector:4318 over HTTP or http://collector:4317 over gRPC (docs/otlp.md).",
)
@click.option(
    "--max-connections",
    metavar="N",
    help="Maximum open connections; further clients wait in the listen backlog. "
    "Default: 10000, or as many as the limit of open files allows.",
)
@click.option(
    "--workers",
    metavar="N",
    help="Number of processes that relay, one per core. Default: 1, a single process.",
)
@click.option(
    "--discovery-interval-s",
    metavar="SECONDS",
    help="Interval between two requests for the cluster's brokers. Default: 30.",
)
@click.option(
    "--drain-delay-s",
    metavar="SECONDS",
    help="Time after SIGTERM during which /ready fails but kproxy still accepts connections, "
    "for slow load balancers. Default: 0.",
)
@click.option(
    "--drain-timeout-s",
    metavar="SECONDS",
    help="Time for closing the connections after that, each between two requests. Default: 10.",
)
@click.option("--log-format", metavar="FORMAT", help="text, or json (one object per line). Default: text.")
@click.option(
    "--log-connections",
    is_flag=True,
    default=None,
    help="Log a line when a connection ends: client, duration, requests, bytes.",
)
@click.option(
    "--log-level", metavar="LEVEL", help="debug (one line per connection), info, warning or error. Default: info."
)
def run(file: str | None, **flags: Any) -> None:
    """Run the proxy.

    \b
    As a proxy before a cluster, with a port for each broker (9093 for broker 0, 9094 for broker 1, ...):
      kproxy run --listen localhost:9092 --bootstrap kafka-1:9092,kafka-2:9092 --admin localhost:9600
    \b
    As a gateway that clients know as kafka.example:
      kproxy run --listen :9092 --bootstrap kafka-1:9092 --advertise 'kafka.example:{port}'
    \b
    As a sidecar of each broker, on the same port everywhere:
      kproxy run --route sidecar --listen :19092 --bootstrap localhost:9092
    """
    with EndsAtOnce():  # until Process has handlers of its own
        from kproxy.proxy.config.load import load
        from kproxy.proxy.filters.flight import FINDINGS, FindingsTrigger
        from kproxy.proxy.process.process import Inheritance, Process
        from kproxy.proxy.process.workers.processes import make_server

        inheritance = Inheritance.of(os.environ)

        def read() -> "Config":
            return load(file, os.environ, flags)

        settings = read()
        server = make_server(settings)
        triggered = settings.flight is not None and FINDINGS in settings.flight.triggers
        if settings.admin is not None or triggered:
            from kproxy.analysis.findings.following import Following

            tell = FindingsTrigger(settings.flight, server.operate).update if settings.flight and triggered else None
            server.questions[FINDINGS] = Following(server.counted, tell)
        path = file or os.environ.get("KPROXY_CONFIG")
        Process(server, inheritance, os.environ, read if path else None, Path(path) if path else None).run()
