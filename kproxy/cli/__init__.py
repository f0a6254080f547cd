"""The command line: sub-commands only, no logic. Whatever is heavy is imported by the command that needs it."""

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import click

from kproxy import __version__
from kproxy.errors import KproxyError

_EXTRA_OF = {"numpy": "offline", "pandas": "spark", "pyarrow": "offline", "pyspark": "spark"}


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
@click.option(
    "--detail",
    metavar="headers|topics|batches",
    help="How closely what passes is read: headers and errors (default), topics and lag too, or every batch.",
)
@click.option("--config", "file", metavar="FILE.toml", help="Settings, and more than one [[cluster]].")
@click.option("--record", metavar="DIR", help="Write what passes as tables too, those of kproxy convert.")
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
    from kproxy.proxy import config, log_lines

    settings = config.load(file, os.environ, flags)
    log_lines.begin(settings.log_level)

    from kproxy.proxy.control.server import Server

    Server(settings).run()


@cli.command()
@click.option("--seconds", type=click.FloatRange(min=0), metavar="N", help="End after so long. Default: at Ctrl-C.")
@click.option("--record", type=click.Path(path_type=Path), metavar="DIR", help="Write tables, as kproxy convert does.")
def demo(seconds: float | None, record: Path | None) -> None:
    """Kafka traffic decoded, with nothing to set up.

    A miniature cluster of three brokers and its clients, all of it on this machine, with kproxy in between and a live
    view of what it sees. Where the output is no terminal: a line every two seconds.
    """
    from kproxy.demo import app

    app.run(seconds, record)


@cli.command()
@click.argument("captures", nargs=-1, required=True, metavar="CAPTURE...")
@click.option("--out", required=True, metavar="DIR", help="Where the tables go; a folder each.")
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    metavar="N",
    help="A broker's port. Default: by content.",
)
@click.option("--cluster", default="default", show_default=True, metavar="NAME", help="The column `cluster`.")
@click.option("--rotated", is_flag=True, help="The files are one capture, in the order of their packets.")
@click.option(
    "--detail",
    type=click.Choice(("headers", "topics", "batches")),
    default="batches",
    show_default=True,
    help="How closely bodies are read: for no further table, for `partitions`, for `batches` too.",
)
@click.option("--checksums", is_flag=True, help="Check that of every batch: `crc_valid`. Every byte is read for it.")
@click.option(
    "--records", metavar="TOPIC[,...]", help="The table `records` too, of these topics; * as in a shell, ids as names."
)
@click.option(
    "--record-values",
    metavar="N|hash|all",
    default="64",
    show_default=True,
    help="What it shows of a key, a value and a header: the first N bytes, a hash, or all of it.",
)
@click.option(
    "--key-log",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="SSLKEYLOGFILE of the TLS connections; needs tshark.",
)
@click.option("--follow", is_flag=True, help="The file still grows: read on until interrupted.")
@click.option(
    "--processes", type=click.IntRange(0), default=0, metavar="N", help="Default: as many as cores and memory allow."
)
def convert(
    captures: tuple[str, ...],
    out: str,
    ports: tuple[int, ...],
    cluster: str,
    rotated: bool,
    detail: str,
    checksums: bool,
    records: str | None,
    record_values: str,
    key_log: str | None,
    follow: bool,
    processes: int,
) -> None:
    """Turn packet captures into Parquet tables.

    \b
    pcap or pcapng, plain or gzip, zstd, lz4; - is standard input:
      kproxy convert incident.pcap --out tables
      tcpdump -i any -s 0 -w - port 9092 | kproxy convert - --out tables
      kproxy convert incident.pcap --out tables --records 'orders,billing.*' --record-values hash
    \b
    And then, in any tool that reads Parquet:
      select api, approx_quantile(latency_ns, 0.99) from 'tables/exchanges/*.parquet' group by api
    """
    if follow and len(captures) > 1 and not rotated:
        raise click.UsageError("--follow is of one capture, or of --rotated files, of which the last one grows")

    from kproxy.convert import machine
    from kproxy.convert import processes as conversion
    from kproxy.tables.records import chosen
    from kproxy.views import convert as convert_view
    from kproxy.views import summary as rows_view

    machine.retain()
    with convert_view.bar() as advance:
        summary = conversion.convert(
            captures,
            out,
            ports=ports,
            cluster=cluster,
            rotated=rotated,
            detail=detail,
            checksums=checksums,
            records=None if records is None else chosen(records, record_values),
            key_log=key_log,
            follow=follow,
            processes=processes,
            progress=advance,
        )
    rows_view.tell(summary)
    if summary.failed:
        sys.exit(1)


@cli.command()
@click.argument("frame", required=False, metavar="[HEX]")
@click.option("-f", "--file", type=click.File("rb"), metavar="FILE", help="Hex or binary; - is standard input.")
@click.option("--response", metavar="API:VERSION", help="It is the answer to this, like Metadata:12 or 3:12.")
@click.option("--data", metavar="NAME", help="It is a message of another kind, like ConsumerProtocolSubscription.")
@click.option("--records", is_flag=True, help="It is record batches or message sets, as in a log or a Fetch.")
@click.option("--sized/--bare", default=None, help="With 4-byte sizes or without. Default: as it makes sense.")
@click.option("--json", "as_json", is_flag=True, help="JSON, as Kafka's own converters write it.")
@click.option("--jsonl", is_flag=True, help="A JSON object a line, in and out; nothing is masked.")
@click.option("--records-shown", type=click.IntRange(0), default=10, show_default=True, metavar="N", help="Per batch.")
@click.option("--show-secrets", is_flag=True, help="SASL tokens, HMACs, SCRAM credentials and passwords too.")
def decode(
    frame: str | None,
    file: BinaryIO | None,
    response: str | None,
    data: str | None,
    records: bool,
    sized: bool | None,
    as_json: bool,
    jsonl: bool,
    records_shown: int,
    show_secrets: bool,
) -> None:
    """Decode a Kafka frame, or several with their sizes: requests, unless told otherwise.

    \b
    A request tells what it is; an answer must be told what it answers:
      kproxy decode 00120000000000070003666f6f
      kproxy decode --response ApiVersions:0 0000000700000000000100030000000d
      kproxy decode --file frame.bin --json
    \b
    Records, for example a segment of a topic's log:
      kproxy decode --records --file 00000000000000000000.log
    \b
    Many at once, each line {"side": "request"|"response"|"data", "hex": ...} with "api_key" and "api_version" for a
    response and "message" for data; with --records just {"hex": ...}:
      kproxy decode --jsonl < frames.jsonl
    """
    import json

    from kproxy.protocol import decode as decoding

    if sum(map(bool, (response, data, records))) > 1:
        raise click.UsageError("--response, --data and --records say what it is: give one of them")
    if frame is not None and file is not None:
        raise click.UsageError("the frame is there twice, as hex and by --file: give one of them")
    if jsonl and (frame is not None or response is not None or data is not None):
        raise click.UsageError("--jsonl reads lines, from --file or standard input, and each says what it is")
    source = file or sys.stdin.buffer
    if jsonl:
        work = decoding.answer_records if records else decoding.answer_frame
        for line in source:
            if line.strip():
                _write_line(decoding.answer(line, work))
        return
    if frame is None and file is None and source.isatty():
        raise click.UsageError("give a frame as hex, with --file, or on standard input")
    if frame is not None:
        given = decoding.bytes_of(frame.encode(), must_be_hex=True)
    else:
        given = decoding.bytes_of(decoding.contents(source))
    if records:
        if as_json:
            _write_line(decoding.records_as_json(given))
        else:
            from kproxy.views import decode as view

            view.show_records(given, records=records_shown)
        return
    if response is not None:
        key, version = decoding.api_and_version(response)
        found = decoding.frames(given, sized, lambda one: decoding.response(one, key, version))
    elif data is not None:
        found = decoding.frames(given, sized, lambda one: decoding.data(one, data))
    else:
        try:
            found = decoding.frames(given, sized, decoding.request)
        except KproxyError as fault:
            raise type(fault)(f"as a request: {fault}; an answer needs --response API:VERSION") from None
    for one in found:
        if as_json:
            click.echo(json.dumps(decoding.as_json(one, show_secrets=show_secrets), indent=2))
        else:
            from kproxy.views import decode as view

            view.show(one, show_secrets=show_secrets, records=records_shown)


def _write_line(pieces: Iterable[str]) -> None:
    sys.stdout.writelines(pieces)
    sys.stdout.write("\n")
    sys.stdout.flush()


class _SparkCommands(click.Group):
    """Made when they are asked for, since their help is that of the jobs."""

    def list_commands(self, context: click.Context) -> list[str]:
        from kproxy.cli.spark import COMMANDS

        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        from kproxy.cli.spark import COMMANDS

        return COMMANDS.get(name)


@cli.group(cls=_SparkCommands)
def spark() -> None:
    """Captures and tables of any size on Spark, from this machine's cores to a cluster.

    \b
    Tables from captures, and answers from tables, whoever wrote them:
      kproxy spark ingest captures/*.pcap --out tables
      kproxy spark latency tables --by api,client
      kproxy spark slow tables --format json
    """


def _open_standard_files() -> None:
    """One that our parent has closed leads nowhere. Else a socket takes its number, which libuv does not survive."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, mode))


def main() -> None:
    _open_standard_files()
    # Nobody multiplies matrices here: numpy's threads for that would only cost 40 ms of CPU at each start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        cli()
    except KproxyError as fault:
        logging.shutdown()  # what led to it comes first
        click.echo(f"kproxy: {fault}" if "\n" not in str(fault) else f"kproxy:\n{fault}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as fault:
        package = str(fault.name).partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        text = f"this needs {package}, which is not installed: pip install 'kproxy[{_EXTRA_OF[package]}]'"
        click.echo(f"kproxy: {text}", err=True)
        sys.exit(2)
    except OSError as fault:  # the disk under the output is full, say
        click.echo(f"kproxy: {fault}", err=True)
        with suppress(OSError):
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries once more at its end, and tells of it again
        sys.exit(1)
