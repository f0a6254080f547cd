"""The rings and shards of tests/conftest.py: each test is in one ring, and each of ring 2 in one shard."""

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from itertools import chain
from types import SimpleNamespace

import pytest

from tests.conftest import RING_2, WITHOUT_FIXTURES, is_in_shard, pytest_collection_modifyitems, shard
from tests.project import ROOT

SHARDS = 6


def test_files_of_ring_2_are_there():
    for place in RING_2:
        assert (ROOT / place).exists(), place


def test_each_file_is_in_one_shard():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    shards = [{file for file in files if is_in_shard(file, number, SHARDS)} for number in range(1, SHARDS + 1)]
    assert sum(map(len, shards)) == len(files) and set().union(*shards) == set(files)


class Item:
    """What of an item of pytest decides its ring."""

    def __init__(self, nodeid, **markers):
        self.nodeid = nodeid
        self.keywords = markers
        self.get_closest_marker = {name: SimpleNamespace(args=args) for name, args in markers.items()}.get


TESTS = [
    Item("tests/wire/test_a.py::test_plain"),
    Item("tests/wire/test_a.py::test_marked", ring2=()),
    *(Item(f"tests/wire/test_b.py::test_cases[{number}]", sampled=(2,)) for number in range(4)),
    Item("tests/bench/test_c.py::test_in_a_folder"),
    Item("tests/deploy/test_helm.py::test_in_a_file"),
    Item("tests/broker/test_d.py::test_before_a_broker"),
]


def chosen(ring=None, part=None):
    """The names that are left of TESTS, in the order in which they run."""
    items, left_out = [*TESTS], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(getoption={"ring": ring, "shard": part}.get, hook=hook)
    pytest_collection_modifyitems(config, items)
    assert len(items) + len(left_out) == len(TESTS)
    return [item.nodeid.partition("::")[2] for item in items]


def test_each_test_is_in_one_ring():
    assert chosen("1") == ["test_before_a_broker", "test_plain", "test_cases[0]", "test_cases[1]"]
    assert chosen("2") == ["test_marked", "test_cases[2]", "test_cases[3]", "test_in_a_folder", "test_in_a_file"]
    assert sorted(chosen()) == sorted([*chosen("1"), *chosen("2")])


def test_shards_share_out_ring_2():
    parts = [chosen("2", (number, 3)) for number in (1, 2, 3)]
    assert sorted(chain(*parts)) == sorted(chosen("2"))


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "/"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="I/N is needed"):
        shard(text)


def test_the_fixtures_of_all_tests_are_there(request):
    """One went with the test that had made it, and two shards of ring 2 were red, which nobody saw.

    This run has collected the files of ring 1, with their tests of ring 2; another one collects the files of ring 2.
    """
    assert request.config.stash[WITHOUT_FIXTURES] == []
    collects = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*collects, *RING_2], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-k", "a b"), "-k takes words joined by `and`, `or`, `not`: a b: at column 3: "),
        (("-m", "ring2 sampled"), "-m takes marks joined by `and`, `or`, `not`: ring2 sampled: at column 7: "),
        (("test_it.py::test_other",), "its tests: ./dev test test_it.py --collect-only\n"),
        (("test_it.py::test_other", "-n", "1"), "its tests: ./dev test test_it.py --collect-only\n"),
        (("test_it.py::test_it", "-rf"), "alone: ./dev test 'test_it.py::test_it[a b[c]]'\n"),
    ],
)
def test_a_run_says_how_to_run_what_was_meant(tmp_path, arguments, said):
    """With workers, `-k "a b"` was an internal error of pytest; the lines `alone` stood above its summary."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    test = "import pytest\n@pytest.mark.parametrize('a', ['a b[c]'])\ndef test_it(a): assert a == 1\n"
    (tmp_path / "test_it.py").write_text(test)
    runs = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    done = subprocess.run(runs, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode != 0 and said in done.stdout + done.stderr
    if "FAILED" in done.stdout:
        assert done.stdout.index("FAILED") < done.stdout.index("alone")


def test_a_fixture_that_is_not_there_is_named_by_who_collects(tmp_path):
    conftest = "from tests.conftest import *\n"
    test = "import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_it(a, tmp_path, gone, request): pass\n"
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(test)
    collects = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [*collects, f"--rootdir={tmp_path}", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it[1]: gone\n" in done.stderr and "tmp_path" not in done.stderr.partition("fixture:")[2]
