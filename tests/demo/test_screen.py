"""The demo's screen ends when its parent ends, however early, and restores the terminal."""

import json
import os
import pty
import subprocess
import sys

import pytest

from kproxy.demo import screen


@pytest.mark.parametrize("orders", [b"", json.dumps(["127.0.0.1:1", ["what this is"]]).encode() + b"\n"])
def test_the_screen_ends_with_its_parent_and_restores_the_terminal(orders: bytes) -> None:
    theirs, ours = os.pipe()
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", screen.__name__, str(theirs)]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, pass_fds=(theirs,), env=environment
    ) as process:
        os.close(theirs)
        os.close(its_end)
        os.write(ours, orders)
        os.close(ours)
        output = b""
        try:
            while chunk := os.read(terminal, 65536):
                output += chunk
        except OSError:  # the other end is closed
            pass
        os.close(terminal)
        assert process.wait(60) == 0
    assert output.count(b"\x1b[?1049h") == output.count(b"\x1b[?1049l")
