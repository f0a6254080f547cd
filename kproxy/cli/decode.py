"""`kproxy decode`: the options of frames to text. The work is that of `protocol.decode` and `views.decode`."""

import sys
from collections.abc import Iterable
from typing import BinaryIO

import click

from kproxy.errors import KproxyError


@click.command()
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
