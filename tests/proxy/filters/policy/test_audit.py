"""The audit log writes its lines to the file without blocking, also if the file is rotated, stuck or not writable."""

import json
import os
import threading
import time

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.filters.policy.audit import MAX_NAMES, MAX_WAITING, MAX_WAITING_BYTES, Audit, require_writable, shown


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_written_in_order(tmp_path):
    audit = Audit(str(tmp_path / "audit.jsonl"))
    for number in range(100):
        audit.add({"number": number, "name": 'a"\n\x1b'})
    audit.flush(10)
    assert [line["number"] for line in lines(tmp_path / "audit.jsonl")] == list(range(100))
    assert audit.counts() == (100, 0)
    audit.close()


def test_a_file_that_was_rotated_is_opened_again(tmp_path):
    path = tmp_path / "audit.jsonl"
    audit = Audit(str(path))
    audit.add({"number": 1})
    audit.flush(10)
    path.rename(tmp_path / "audit.jsonl.1")
    audit.add({"number": 2})
    audit.flush(10)
    assert lines(tmp_path / "audit.jsonl.1") == [{"number": 1}] and lines(path) == [{"number": 2}]
    os.truncate(path, 0)  # as copytruncate does
    audit.add({"number": 3})
    audit.flush(10)
    assert path.read_bytes() == b'{"number":3}\n'
    audit.close()


def test_a_stopped_reader_makes_the_audit_drop_and_count_lines(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    audit = Audit(str(path))
    line = {"text": "x" * 1000}
    for _ in range(MAX_WAITING + 3000):
        audit.add(line)  # one that waited for the reader would wait for ever
    assert audit.dropped > 1000
    found = bytearray()

    def read():
        while b'"last"' not in found:
            try:
                found.extend(os.read(reader, 1 << 16))
            except BlockingIOError:
                time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    audit.flush(30)
    audit.add({"text": "last"})
    thread.join(30)
    assert not thread.is_alive()
    written = [json.loads(line) for line in found.splitlines()]
    assert sum(line.get("missing_lines", 0) for line in written) == audit.dropped
    assert audit.lines == sum("text" in line for line in written)
    audit.close()
    os.close(reader)


def test_lines_are_dropped_and_counted_until_the_file_can_be_written(tmp_path):
    path = tmp_path / "not-yet" / "audit.jsonl"
    audit = Audit(str(path))
    for number in (1, 2, 3):  # each line that is dropped counts once
        audit.add({"number": number})
    audit.flush(10)
    assert audit.dropped == 3
    path.parent.mkdir()
    audit.add({"number": 4})
    audit.flush(10)
    missing, line = lines(path)
    assert missing["missing_lines"] == 3 and line == {"number": 4}
    audit.close()


def test_the_number_and_the_length_of_names_in_a_line_are_limited():
    assert shown(["a", "b", "a"]) == ["a", "b"]
    many = shown([str(number) for number in range(MAX_NAMES + 5)])
    assert len(many) == MAX_NAMES + 1 and many[-1] == "... and 5 more"
    assert len(shown(["x" * 9999])[0]) == 256


def test_waiting_lines_have_a_limit_in_bytes(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    audit = Audit(str(path))
    for _ in range(100):
        audit.add({"text": "x" * (MAX_WAITING_BYTES // 16)})
    assert audit.dropped >= 100 - 16
    os.set_blocking(reader, True)
    found = bytearray()
    while b'"last"' not in found:
        found += os.read(reader, 1 << 20)
        if found.count(b"\n") == 100 - audit.dropped:
            audit.add({"text": "last"})  # the queue has room again
    audit.close()
    os.close(reader)


def test_a_file_that_cannot_be_written_is_reported_at_the_start_and_in_the_log(tmp_path, caplog):
    path = tmp_path / "no" / "audit.jsonl"
    with pytest.raises(ConfigError, match=f"audit: {path} cannot be written to: No such file or directory"):
        require_writable(str(path))
    path.parent.mkdir()
    require_writable(str(path))
    os.mkfifo(tmp_path / "pipe")  # whose reader may come later
    for target in (None, "stderr", str(tmp_path / "pipe")):
        require_writable(target)
    path.unlink()
    path.mkdir()
    audit = Audit(str(path))
    for _ in range(2):
        audit.add({"number": 1})
    audit.flush(10)
    assert audit.counts() == (0, 2)
    audit.close()
    (message,) = (record.getMessage() for record in caplog.records)  # one a second
    assert message == f"the audit loses lines: {path} cannot be written to: Is a directory"
