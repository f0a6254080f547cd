"""The rings and shards of tests/conftest.py: each test is in one ring, and each of ring 2 in one shard."""

import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

from tests.conftest import RING_2, is_in_shard, shard
from tests.project import ROOT

SHARDS = 6


def collected(*arguments):
    command = [sys.executable, "-m", "pytest", "--collect-only", "--no-header", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_files_of_ring_2_are_there():
    for place in RING_2:
        assert (ROOT / place).exists(), place


def test_each_file_is_in_one_shard():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    shards = [{file for file in files if is_in_shard(file, number, SHARDS)} for number in range(1, SHARDS + 1)]
    assert sum(map(len, shards)) == len(files) and set().union(*shards) == set(files)


def test_rings_and_shards_share_out_the_tests():
    places = ("tests/chaos/test_chaos.py", "tests/bench/test_memory.py")  # some of a file, and all of one
    first, second = (collected("--ring", ring, *places) for ring in "12")
    assert first and second and not first & second
    assert first | second == collected(*places)
    assert all("test_chaos.py" in test for test in first) and any("test_memory.py" in test for test in second)
    parts = [collected("--ring", "2", "--shard", f"{number}/2", *places) for number in (1, 2)]
    assert parts[0] | parts[1] == second and not parts[0] & parts[1]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "/"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="I/N is needed"):
        shard(text)
