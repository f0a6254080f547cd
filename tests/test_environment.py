"""The suite passes wherever it is started: see conftest.py."""

import os
import subprocess
import sys

import pytest

from tests.ports import BLOCK, free_ports
from tests.project import ROOT

# Of those that see a terminal, colours, a width, settings from the environment, SIGINT, or a home.
TOUCHY = (
    "tests/views/test_decode.py",
    "tests/views/test_terminal.py",
    "tests/proxy/config/test_load.py",
    "tests/demo/test_app.py::test_without_a_terminal_it_writes_lines_and_ends_at_ctrl_c",
)


@pytest.mark.ring2
def test_the_suite_passes_in_a_hostile_environment():
    """In the background of a script, with a dumb and narrow terminal, no colours, no home and a variable of kproxy."""
    hostile = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "20", "LINES": "5", "KPROXY_LISTEN": "nowhere"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | hostile
    environment.pop("HOME", None)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TOUCHY]
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *pytest]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr


def test_runs_beside_each_other_have_ports_of_their_own():
    """Though none is bound yet."""
    take = "from tests.ports import *; print(*(free_ports(8) for _ in range(BLOCK // 4)), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", take], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = {int(first) for first in other.stdout.readline().split()}
        ours = {free_ports(8) for _ in range(BLOCK // 4)}
        other.communicate("\n", timeout=30)
    assert min(len(theirs), len(ours)) > BLOCK // 16  # others are given first
    assert not {first + n for first in theirs for n in range(8)} & {first + n for first in ours for n in range(8)}
