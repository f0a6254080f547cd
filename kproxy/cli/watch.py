"""`kproxy watch`: the options of the passive mode. The work is done in `kproxy.watch`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kproxy.interrupts import EndsAtOnce

if TYPE_CHECKING:
    from kproxy.watch.settings import Settings

_ANY_PORT = "any"
_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.option(
    "--interface",
    "interfaces",
    metavar="NAME",
    multiple=True,
    help="Interface to read packets from; may be repeated. any: all of them.",
)
@click.option(
    "--port",
    "ports",
    metavar="PORT|any",
    multiple=True,
    help="Port of brokers; can be given several times. any: Kafka is recognised by its content, on all ports. "
    "Default: 9092. Ports advertised by brokers are added.",
)
@click.option(
    "--zookeeper-port",
    "zookeeper_ports",
    metavar="N",
    type=int,
    multiple=True,
    help="Port of ZooKeeper, if the cluster has one; may be repeated. With --port any it is recognised by its content.",
)
@click.option(
    "--admin",
    metavar="[HOST:]PORT",
    help="Address of the HTTP server: /metrics, /health, /ready, /api/connections. Without a host: this machine alone.",
)
@click.option("--record", metavar="DIR", type=click.Path(path_type=Path), help="Record the traffic as tables.")
@click.option(
    "--cluster",
    metavar="NAME",
    default="default",
    help="Value of the label and the column `cluster`. Default: default.",
)
@click.option(
    "--detail",
    metavar="headers|topics|batches",
    default="headers",
    help="How much of each frame is read: headers and errors (default), also topics and lag, or also every batch.",
)
@click.option(
    "--buffer-mib",
    metavar="MIB",
    type=int,
    default=64,
    help="Memory for unread packets; packets that arrive while it is full are dropped and counted. Default: 64.",
)
@click.option(
    "--user",
    metavar="NAME",
    help="User to run as once the socket is open. Default: the user who called sudo; without sudo, no change. "
    "kproxy drops all capabilities in any case.",
)
@click.option(
    "--processes",
    is_flag=True,
    help="Show in /api/connections the process and container of this host at either end of a connection. kproxy keeps "
    "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, to see those of other users.",
)
@click.option(
    "--log-format", metavar="FORMAT", default="text", help="text, or json (one object per line). Default: text."
)
@click.option("--log-level", metavar="LEVEL", default="info", help="debug, info, warning or error. Default: info.")
def watch(log_format: str, log_level: str, **options: Any) -> None:
    """Watch a cluster passively: metrics and tables from packets, with nothing between clients and brokers.

    It needs the right to capture (sudo, or CAP_NET_RAW), on a machine of a broker or of clients, or at a mirror port.

    \b
    On a broker, with metrics at localhost:9464/metrics:
      sudo kproxy watch --interface eth0 --admin 9464
    \b
    With other ports of brokers, all interfaces of a Kubernetes node, and tables of the traffic:
      sudo kproxy watch --interface any --port 9092 --port 9094 --admin 9464 --record tables
    \b
    A cluster of Kafka 3.9 or older, with its registry in ZooKeeper:
      sudo kproxy watch --interface eth0 --zookeeper-port 2181 --record tables
    \b
    Find Kafka traffic on all ports:
      sudo kproxy watch --interface any --port any --admin 9464
      curl -s localhost:9464/api/connections
    """
    with EndsAtOnce():  # until Watcher has handlers of its own
        from kproxy.errors import KproxyError, of_extras
        from kproxy.proxy import log_lines

        if log_format not in log_lines.FORMATS:
            raise KproxyError(f"--log-format {log_format}: one of {', '.join(log_lines.FORMATS)}")
        if log_level not in _LEVELS:
            raise KproxyError(f"--log-level {log_level}: one of {', '.join(_LEVELS)}")
        settings = settings_of(**options)
        with of_extras(lambda missing: KproxyError(f"watching {missing}")):
            from kproxy.watch.watcher import Watcher

        watcher = Watcher(settings)
        if settings.admin is not None:
            from kproxy.analysis.findings.following import Following

            watcher.questions["findings"] = Following(watcher.counted)
        watcher.open(os.environ)  # before the log, whose thread would keep what this one gives up
        log_lines.begin(log_level, log_format)

        import uvloop

        uvloop.run(watcher.run(os.environ))


def settings_of(*, admin: str | None, interfaces: tuple[str, ...], ports: tuple[str, ...], **rest: Any) -> "Settings":
    """The settings from the options; raises KproxyError for invalid ones."""
    from kproxy.errors import KproxyError
    from kproxy.proxy.config.addresses import parse_address
    from kproxy.watch.settings import PORT, Settings

    try:
        address = None if admin is None else parse_address(admin if ":" in admin else f":{admin}", lowest_port=0)
    except ValueError as fault:
        raise KproxyError(f"--admin: {fault}") from None
    for port in ports:
        if port != _ANY_PORT and not (port.isascii() and port.isdigit() and len(port) < 6):
            raise KproxyError(f"--port {port}: a number from 1 to 65535, or any")
    if _ANY_PORT in ports and len(ports) > 1:
        raise KproxyError("--port any has all ports in it: leave the others out")
    numbers = () if ports == (_ANY_PORT,) else tuple(sorted(set(map(int, ports)))) or (PORT,)
    return Settings(interfaces, numbers, admin=address, **rest)
