"""`kproxy decode`: the options of frames to text. The work is that of `protocol.shown.decode` and `views.decode`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from kproxy.cli import captures

if TYPE_CHECKING:
    from kproxy.protocol.primitives import Buffer


@click.command()
@click.argument("given", nargs=-1, metavar="[HEX | CAPTURE...]")
@click.option(
    "-f", "--file", type=click.File("rb"), metavar="FILE", help="File with frames, hex or binary; - is standard input."
)
@click.option(
    "--response", metavar="API:VERSION", help="Decode as the answer to this request, like Metadata:12 or 3:12."
)
@click.option("--data", metavar="NAME", help="Decode as another kind of message, like ConsumerProtocolSubscription.")
@click.option("--records", is_flag=True, help="Decode as record batches or message sets, as in a log segment.")
@click.option(
    "--exchange", metavar="CONNECTION:NUMBER", help="Find request and answer of a row of `exchanges` in its capture."
)
@click.option(
    "--zookeeper",
    is_flag=True,
    help="Decode ZooKeeper's frames, from captures, or requests as hex; --response NAME for an answer.",
)
@click.option("--sized/--bare", default=None, help="Frames with or without their 4-byte sizes. Default: recognised.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as Kafka's own converters write it.")
@click.option("--jsonl", is_flag=True, help="Read and write one JSON object per line; nothing is masked.")
@captures.shown
@captures.options
def decode(
    given: tuple[str, ...],
    file: BinaryIO | None,
    response: str | None,
    data: str | None,
    records: bool,
    exchange: str | None,
    zookeeper: bool,
    sized: bool | None,
    as_json: bool,
    jsonl: bool,
    records_shown: int,
    show_secrets: bool,
    **how: Any,
) -> None:
    """Decode a Kafka frame, or several with their sizes. They are requests, unless an option names another kind.

    \b
    A request names its API and version; an answer does not, so name its request:
      kproxy decode 00120000000000070003666f6f
      kproxy decode --response ApiVersions:0 0000000700000000000100030000000d
      kproxy decode --file frame.bin --json
    \b
    Records, for example a segment of a topic's log:
      kproxy decode --records --file 00000000000000000000.log
    \b
    The frames of an exchange that `kproxy analyze slow` names by its connection and number, from the capture, which is
    read as by `kproxy convert` with the same options:
      kproxy decode --exchange 1729372594811:12 incident.pcap
    \b
    ZooKeeper's operations and notifications in a capture, or a frame of its protocol:
      kproxy decode --zookeeper incident.pcap
      kproxy decode --zookeeper 0000000100000004000000012f01
    \b
    Many at once, each line {"side": "request"|"response"|"data", "hex": ...} with "api_key" and "api_version" for a
    response and "message" for data; with --records just {"hex": ...}:
      kproxy decode --jsonl < frames.jsonl
    """
    if sum(map(bool, (response, data, records, exchange))) > 1:
        raise click.UsageError("--response, --data, --records and --exchange say what it is: give one of them")
    if given and file is not None:
        raise click.UsageError("the frame is there twice, as an argument and by --file: give one of them")
    if jsonl and (given or response or data or exchange):
        raise click.UsageError("--jsonl reads lines, from --file or standard input, and each says what it is")
    source = file or sys.stdin.buffer
    if zookeeper:
        if data or records or exchange or jsonl:
            raise click.UsageError("--zookeeper goes with --response, --sized, --bare and --json alone")
        _zookeeper(given, file, response, sized, as_json, how)
        return

    from kproxy.errors import Malformed, ProtocolError
    from kproxy.protocol.shown import decode as decoding

    if jsonl:
        for line in source:
            if line.strip():
                _write_line(decoding.answer(line, decoding.answer_records if records else decoding.answer_frame))
        return

    if exchange is not None:
        connection, _, number = exchange.partition(":")
        if not (connection.isdecimal() and number.isdecimal() and given):
            raise click.UsageError("--exchange takes CONNECTION:NUMBER, as in the table exchanges, and its capture")

        from kproxy.convert.frames import frames_of
        from kproxy.views import exchange as exchange_view

        found = frames_of(given, int(connection), int(number), captures.settings(how))
        if as_json:
            click.echo(json.dumps(exchange_view.as_json(found, show_secrets=show_secrets), indent=2))
        else:
            exchange_view.show(found, show_secrets=show_secrets, records=records_shown)
        return
    if given:
        if _is_file(given[0]):
            with Path(given[0]).open("rb") as named:
                _no_frames(given[0], named.read(8))
            raise click.UsageError(f"{given[0]} is a file: give it with --file")
        try:
            frame = decoding.bytes_of(" ".join(given).encode(), must_be_hex=True)
        except Malformed as fault:
            raise _neither(fault, given[0]) from None
    elif file is None and source.isatty():
        raise click.UsageError("give a frame as hex, with --file, or on standard input")
    else:
        frame = decoding.bytes_of(decoding.contents(source))
        name = getattr(source, "name", "-")
        if response is None:
            _no_frames(name, frame)
        if decoding.is_text(frame):
            raise click.UsageError(
                f"{name} is text: give hexadecimal digits alone, as xxd -p prints them, base64, or the bytes themselves"
            )

    from kproxy.views import decode as view

    if records and as_json:
        _write_line(decoding.records_as_json(frame))
    elif records:
        view.show_records(frame, records=records_shown)
    else:
        try:
            for one in decoding.decoded(frame, sized=sized, response_to=response, data_name=data):
                if as_json:
                    click.echo(json.dumps(decoding.as_json(one, show_secrets=show_secrets), indent=2))
                else:
                    view.show(one, show_secrets=show_secrets, records=records_shown)
        except ProtocolError:
            _no_other_protocol(frame)
            raise


def _neither(fault: Exception, given: str) -> Exception:
    """Return the error about an argument that is neither hex nor a file; pasted lines name no file."""
    return fault if len(given.splitlines()) > 1 else type(fault)(f"{fault}; there is no file {given!r} either")


def _no_frames(name: str, content: "Buffer") -> None:
    """Raises click.UsageError for a file that begins as a capture does, or as one that is compressed."""
    from kproxy.protocol.shown import decode as decoding

    if decoding.is_capture(content):
        raise click.UsageError(f"{name} is a capture, which holds packets: kproxy convert {name} --out tables")
    if decoding.is_compressed(content):
        raise click.UsageError(
            f"{name} is compressed: decompress it, or if it is a capture: kproxy convert {name} --out tables"
        )


def _no_other_protocol(frame: "Buffer") -> None:
    """Raises Malformed for bytes that begin as another protocol does."""
    from kproxy.errors import Malformed
    from kproxy.wire.frames import sniff

    other = {"tls": "TLS does", "http": "HTTP does", "proxy_protocol": "a PROXY header does"}
    name = other.get(sniff(bytes(frame[:8]))[0])
    if name is not None:
        raise Malformed(f"no frame of Kafka: the bytes begin as {name}")


def _zookeeper(
    given: tuple[str, ...],
    file: BinaryIO | None,
    response: str | None,
    sized: bool | None,
    as_json: bool,
    how: dict[str, Any],
) -> None:
    from kproxy.errors import KproxyError, Malformed
    from kproxy.protocol.shown import decode as decoding
    from kproxy.views import zookeeper as view
    from kproxy.zookeeper import decode as zookeeper

    if given and _is_file(given[0]):
        from kproxy.convert.reading import zookeeper_events

        # Only ZooKeeper is looked for, so that a port is its own.
        how = {**how, "ports": (), "zookeeper_ports": (*how["ports"], *how["zookeeper_ports"])}
        found = False
        for info, event in zookeeper_events(given, captures.settings(how)):
            view.show(event, info, as_json=as_json)
            found = True
        if not found:
            raise KproxyError(
                f"{', '.join(given)}: no ZooKeeper was found: does the capture have its port, 2181 as a rule? "
                "`kproxy convert` says what is in it"
            )
        return
    raw = decoding.contents(file or sys.stdin.buffer) if not given else " ".join(given).encode()
    try:
        frames = zookeeper.sized(bytes(decoding.bytes_of(raw, must_be_hex=bool(given))), has_sizes=sized)
    except Malformed as fault:
        if not given:
            raise
        raise _neither(fault, given[0]) from None
    if response is not None:
        view.show_answer(response, zookeeper.answer(frames, response), as_json=as_json)
        return
    for operation in zookeeper.requests(frames):
        view.show(operation, None, as_json=as_json)


def _is_file(text: str) -> bool:
    """Whether it names a file; digits of a frame may be more than a name can have."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def _write_line(pieces: Iterable[str]) -> None:
    sys.stdout.writelines(pieces)
    sys.stdout.write("\n")
    sys.stdout.flush()
