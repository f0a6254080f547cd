"""Every trap of traps.md has a test, and the tests that it names are there and run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAPS = Path(__file__).with_name("traps.md")


@pytest.mark.ring2
def test_every_trap_has_a_test():
    lines = [line for line in TRAPS.read_text().splitlines() if line.startswith("- ")]
    assert len(lines) > 60
    named = set()
    for line in lines:
        tests = re.findall(r"`([\w/]+\.py::test_\w+)`", line)
        assert tests or " Later: " in line, f"no test stands for: {line}"
        assert line.count("`") == 2 * len(tests), f"not the name of a test: {line}"
        named |= {f"tests/{test}" for test in tests}
    files = sorted({test.partition("::")[0] for test in named})
    collect = [sys.executable, "-m", "pytest", "--collect-only", *files]
    done = subprocess.run(collect, cwd=TRAPS.parents[1], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not named - {line.partition("[")[0] for line in done.stdout.splitlines()}
