"""`kproxy demo`, as a user runs it."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request

import psutil
import pyarrow.parquet
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kproxy.demo import app

COMMAND = [sys.executable, "-c", "from kproxy.cli import main; main()", "demo"]


@pytest.mark.ring2
def test_without_a_terminal_it_writes_lines_and_ends_at_ctrl_c(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--record", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        first = process.stdout.readline()
        url = re.search(r"metrics at (http://\S+/metrics)", first)[1]
        assert f"page at {url.removesuffix('metrics')}," in first and f"tables go into {tmp_path}\n" in first
        apis = {"ApiVersions", "Metadata", "Produce", "Fetch", "ListOffsets"}
        traffic = polled_json(
            url.replace("/metrics", "/api/traffic"),
            lambda found: apis <= found["apis"].keys() and len(found["brokers"]) == 4,
        )
        while not re.search(r"\d+ requests/s .* Produce \d+/s p50 ", line := process.stdout.readline()):
            assert re.search(r"\d+ requests/s ", line), line
        with urllib.request.urlopen(url, timeout=60) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        requests = {}
        for sample in families["kproxy_requests"].samples:
            requests[sample.labels["api"]] = requests.get(sample.labels["api"], 0) + sample.value
        assert apis <= requests.keys()
        assert traffic["apis"]["Produce"]["requests"] > 0
        assert {broker["broker"] for broker in traffic["brokers"]} == {"1", "2", "3", "bootstrap"}
        groups = polled_json(url.replace("/metrics", "/api/groups"), lambda found: len(found) == 3)
        assert {group["group"] for group in groups} == {"fraud", "sessions", "data-lake"}
        assert {group["strategy"] for group in groups} == {"range"}
        lags = polled_json(
            url.replace("/metrics", "/api/live"), lambda found: any(row[1] == "group" for row in found["lags"])
        )
        assert {row[2] for row in lags["lags"] if row[1] == "group"} <= {"fraud", "sessions", "data-lake"}
        with urllib.request.urlopen(url.replace("/metrics", "/api/connections"), timeout=60) as answer:
            assert {connection["broker"] for connection in json.load(answer)} >= {1, 2, 3}
        children = psutil.Process(process.pid).children()
        world = world_of(process)
        assert world in children
        assert os.getsid(world.pid) == world.pid  # Ctrl-C in a terminal must not reach it while it is still loading
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, ""), rest
        assert not any(each.rstrip("\n").endswith(" ") for each in (first, line, *rest.splitlines()))
        assert rest.endswith(f"recorded into {tmp_path}\n")
        for table in ("exchanges", "partitions", "batches", "connections"):
            assert pyarrow.parquet.read_table(tmp_path / table).num_rows
        assert not any(child.is_running() for child in children)
    finally:
        process.kill()
        process.communicate()


def polled_json(url, complete):
    """Poll the admin port until the answer is complete (members need seconds to join and commit); return it."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.load(answer)
        if complete(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def world_of(process):
    """Return the process of the demo's brokers and clients; another child follows groups."""
    (world,) = (one for one in psutil.Process(process.pid).children() if "kproxy.demo.world" in one.cmdline())
    return world


def on_a_terminal(*wanted, leave, **environment):
    """Return the demo's output to a terminal of 80x24; types `leave` once all `wanted` patterns appeared."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    missing = list(wanted)
    with subprocess.Popen(
        COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        os.close(theirs)
        output = b""
        deadline = time.monotonic() + 60
        try:
            while select.select([ours], [], [], max(0, deadline - time.monotonic()))[0]:
                output += os.read(ours, 65536)
                if missing and not (
                    missing := [each for each in missing if not re.search(each, output.decode("utf-8", "ignore"))]
                ):
                    os.write(ours, leave)
                    deadline = time.monotonic() + 60
            process.kill()
            raise AssertionError(f"never there: {missing}" if missing else "it does not end")
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(ours)
        assert process.wait(30) == 0
    return output.decode()


@pytest.mark.ring2
def test_events_that_could_not_be_recorded_are_reported_at_the_end(tmp_path):
    place = tmp_path / "tables"
    command = [*COMMAND, "--seconds", "1", "--record", str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    place.rename(tmp_path / "moved")
    place.touch()
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "recorded into" not in said
    assert re.search(rf"\nkproxy: not all was recorded into {place}: \d+ events are lost", errors), errors


def test_a_line_is_cut_to_the_terminal_width_and_whole_in_a_file(tmp_path, monkeypatch):
    line = "12.3 requests/s  " * 20
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours), (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert app._cut(line) == line[:79]
        monkeypatch.setattr(sys, "stdout", file)
        assert app._cut(line) == line


@pytest.mark.ring2
def test_a_dumb_terminal_gets_plain_lines():
    text = on_a_terminal(r"\d+ requests/s  to brokers ", leave=b"\x03", TERM="dumb")
    assert "\x1b" not in text
    assert max(map(len, text.replace("\r", "").split("\n")[1:])) < 80  # the first line, with the addresses, is not cut


@pytest.mark.ring2
@pytest.mark.sampled(1)
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_on_a_terminal_it_shows_kproxy_top_and_restores_the_screen(environment):
    seen = ("Demo: 3 brokers, 11 clients", "q ends it", "page http://127.0.0.1:", "Produce", "Fetch", "enter open")
    text = on_a_terminal(*seen, leave=b"q", TERM="xterm-256color", **environment)
    enter, leave = "\x1b[?1049h", "\x1b[?1049l"
    assert text.count(enter) == text.count(leave) == 1
    screen, after = text[text.index(enter) : text.index(leave)], text[text.index(leave) :]
    assert all(words in screen for words in seen)
    if environment:
        assert not re.search(r"\x1b\[(\d+;)*(3[1-8]|4[1-8])[;m]", screen)
    assert "Traceback" not in text
    assert "requests/s" in after


@pytest.mark.ring2
def test_no_child_process_survives_when_it_is_killed():
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline()
        children = psutil.Process(process.pid).children()
        assert world_of(process) in children
    finally:
        process.kill()
        process.communicate()
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_the_demo_ends_with_an_error_when_its_cluster_dies():
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline()
        world_of(process).kill()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        # What the proxy logs before the demo learns that the process has ended depends on which of them is faster.
        assert errors.rpartition("kproxy:\n")[2] == "the demo's cluster ended with code -9\n\n"
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
