"""Whoever reads the log, or does not, stops nothing but the log."""

import ast
import json
import logging
import os
import re
from pathlib import Path

from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.log_lines import _OURS, JSON, MAX_WAITING, LineHandler, field_names

ROOT = Path(__file__).parent.parent.parent


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("kproxy.x", logging.WARNING, "", 0, "%s", (text,), None)


def test_who_does_not_read_stops_nobody_and_hears_how_much_was_left_out():
    reader, writer = os.pipe()
    handler = LineHandler(writer)
    text = "x" * 1000  # a pipe takes 64 KiB
    for number in range(3 * MAX_WAITING):
        handler.emit(record(f"{number} {text}"))
    data = b""
    while data.count(b"\n") < MAX_WAITING:
        data += os.read(reader, 1 << 16)
    handler.flush()
    handler.emit(record("after"))
    while b"after" not in data:
        data += os.read(reader, 1 << 16)
    *lines, after = data.decode().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING kproxy\.x after", after)
    number = left_out = 0
    for line in lines:  # the pipe takes some while lines still come, so that they can be left out in several places
        notice = re.fullmatch(r"\((\d+) lines? were left out here: nobody read them\)", line)
        if notice is None:
            assert int(line.split()[3]) == number
            number += 1
        else:
            number += int(notice[1])
            left_out += int(notice[1])
    assert number == 3 * MAX_WAITING
    assert handler.dropped == left_out > MAX_WAITING


def test_where_nobody_is_left_to_read_nothing_happens():
    reader, writer = os.pipe()
    os.close(reader)
    handler = LineHandler(writer)
    for _ in range(10):
        handler.emit(record("\udcff"))
    handler.flush()
    assert not handler._lines.unfinished_tasks


def test_what_a_peer_says_stays_on_its_line():
    reader, writer = os.pipe()
    handler = LineHandler(writer)
    handler.emit(record("host\nERROR forged\x1b[2J é"))
    handler.emit(record("\x85ERROR \x9b2J\u2028\u202e"))
    handler.flush()
    first, second = os.read(reader, 1000).decode().removesuffix("\n").split("\n")
    assert first.endswith(" host\\x0aERROR forged\\x1b[2J é")
    assert second.endswith(" \\x85ERROR \\x9b2J\\u2028\\u202e")


def written(handler, reader):
    handler.flush()
    return [json.loads(line) for line in os.read(reader, 1 << 16).decode().splitlines()]


def logger_to(handler):
    log = logging.Logger("kproxy.x")
    log.addHandler(handler)
    return log


def test_as_json_a_line_is_an_object_with_its_fields_beside_the_message():
    reader, writer = os.pipe()
    handler = LineHandler(writer, JSON, worker=0)
    log = logger_to(handler)
    log.warning(
        "unreachable cluster=%s broker=%s took_s=%.1f of %d: 100%% %s", "east", 7, 1.25, 3, "name\n=%s\x1b[2J é"
    )
    log.info("without any")
    log.info("an argument %% of no field, but at=%s", None)
    log.error("level=%s is ours", "forged")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("client=%s broke", "10.0.0.1:1")
    line, plain, null, forged, broken = written(handler, reader)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "kproxy.x",
        "worker": 0,
        "message": "unreachable cluster=east broker=7 took_s=1.2 of 3: 100% name\n=%s\x1b[2J é",
        "cluster": "east",
        "broker": 7,
        "took_s": 1.25,
    }
    assert set(plain) == {"time", "level", "logger", "worker", "message"}
    assert set(plain) <= _OURS, "no field of a message replaces a key of all lines"
    assert null["at"] is None and null["message"] == "an argument % of no field, but at=None"
    assert forged["level"] == "error"
    assert broken["client"] == "10.0.0.1:1" and broken["exception"].endswith("ValueError: why")


def test_as_json_what_was_left_out_is_a_number():
    reader, writer = os.pipe()
    handler = LineHandler(writer, JSON)
    limiter = LogLimiter(logger_to(handler))
    for _ in range(3):
        limiter.log(logging.WARNING, "kind", "client=%s again", "x")
    limiter._last["kind"] = (0.0, 2)
    limiter.log(logging.WARNING, "kind", "client=%s again", "y")
    handler._left_out = 5
    limiter.log(logging.WARNING, "other", "other")
    first, second, gap, _ = written(handler, reader)
    assert "left_out" not in first
    assert second["client"] == "y" and second["left_out"] == 2 and second["message"].endswith("(and 2 more like it)")
    assert gap["left_out"] == 5 and gap["message"] == "5 lines were left out here: nobody read them"


def formats():
    """The log formats of the whole package: texts that spell a field, wherever they stand in the code."""
    for path in sorted((ROOT / "kproxy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.search(r"[a-z_]=%[a-z.\d]", node.value)
            ):
                yield path, node.value


def test_every_field_of_the_package_is_documented():
    page = (ROOT / "docs" / "logs.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    used = {name for _, text in formats() for name in field_names(text) if name is not None}
    used |= _OURS
    assert used - documented == set(), "docs/logs.md names every field of a log line"
