"""Whoever reads the log, or does not, stops nothing but the log."""

import logging
import os
import re

from kproxy.proxy.log_lines import MAX_WAITING, LineHandler


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
    *lines, left_out, after = data.decode().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING kproxy\.x after", after)
    assert [int(line.split()[3]) for line in lines] == list(range(len(lines)))
    assert handler.dropped == 3 * MAX_WAITING - len(lines)
    assert left_out == f"({3 * MAX_WAITING - len(lines)} lines were left out here: nobody read them)"


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
    handler.flush()
    assert os.read(reader, 1000).decode().endswith(" host\\x0aERROR forged\\x1b[2J é\n")
