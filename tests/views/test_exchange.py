"""An exchange of a capture as people see it: `kproxy decode --exchange`."""

import json
from dataclasses import replace

from click.testing import CliRunner

import kproxy
from kproxy.cli import cli
from kproxy.convert.frames import Frames, frames_of
from kproxy.views import exchange
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE
from tests import captures


def run(*arguments):
    return CliRunner().invoke(cli, ["decode", *arguments], catch_exceptions=False)


def test_request_and_answer_with_their_times():
    capture = captures.capture("k41_quota")
    row = next(row for row in kproxy.exchanges(capture) if row["api"] == "Produce" and row["outcome"] == "answered")
    name = f"{row['connection']}:{row['number']}"
    shown = run("--exchange", name, str(capture))
    assert shown.exit_code == 0
    first, second, _, request, *rest = shown.output.splitlines()
    assert first.startswith(
        f"Produce, request {row['number']} of connection {row['connection']}, {row['client_address']}:"
    )
    assert " UTC, " in second and "first byte of the answer after" in second
    assert request.startswith("Produce request v")
    assert any(line.startswith("Produce response v") for line in rest)
    said = json.loads(run("--json", "--exchange", name, str(capture)).output)
    assert said["request"]["header"]["correlationId"] == row["correlation_id"]
    assert said["response"]["body"]["responses"]
    assert said["request_start_ns"] == row["request_start_ns"]


def test_secrets_are_masked():
    capture = captures.capture("k41_sasl_plain")
    row = next(row for row in kproxy.exchanges(capture) if row["api"] == "SaslAuthenticate")
    name = f"{row['connection']}:{row['number']}"
    for how in ((), ("--json",)):
        masked, shown = (
            run(*how, "--exchange", name, str(capture)),
            run(*how, "--show-secrets", "--exchange", name, str(capture)),
        )
        assert "masked" in masked.output and "masked" not in shown.output


def test_bytes_missing_from_the_capture_are_named(capsys):
    capture = captures.capture("k41_BASE")
    row = next(kproxy.exchanges(capture))
    found = frames_of([capture], row["connection"], row["number"])
    exchange.show(replace(found, request=None, response=b"\0"), show_secrets=False, records=1)
    shown = capsys.readouterr().out
    assert "request: the capture does not hold all of its bytes" in shown
    assert "response: cannot be decoded: " in shown
    said = exchange.as_json(replace(found, response=None, request=b""), show_secrets=False)
    assert "cannot be decoded" in said["request"]["error"] and "does not hold" in said["response"]["error"]


def test_the_line_of_times_names_each_part_of_the_wait():
    """Times in turn: request's first and last byte, answer's first and last byte."""
    info = ConnectionInfo("demo", "a.pcap", "10.0.0.7", 5000, "10.0.0.1", 9092, 1, 0)
    start = 1_700_000_000 * 10**9
    times = (start, start + 3_000_000, start + 23_000_000, start + 123_000_000)
    found = Frames(info, 0, 0, 9, "answered", 7, *times, 100, 50)
    assert exchange._when(found) == (
        "2023-11-14 22:13:20.000000 UTC, sent in 3.00 ms, first byte of the answer after 20.0 ms, received in 100 ms"
    )
    unanswered = replace(found, outcome="unanswered", request_end=start, response_start=NONE, response_end=NONE)
    assert exchange._when(unanswered) == "2023-11-14 22:13:20.000000 UTC, unanswered"
