"""The environment of all tests, which ring they belong to, how workers share them, and Hypothesis.

Tests see the same environment wherever they are started: what the caller's terminal is called, how wide it is, whether
colours are wanted, kproxy's own variables, and that a shell has its background jobs ignore SIGINT, reach no test and no
process that a test starts. A test about any of these sets it.
"""

import argparse
import logging
import os
import shlex
import signal
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark import _parse_expression
from hypothesis import settings

for name in [*os.environ]:
    if name.startswith("KPROXY_") or name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
        del os.environ[name]
os.environ["TERM"] = "xterm-256color"
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / ".cache")  # with Spark's classes: ./dev keeps them
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with suppress(ValueError):  # not the main thread: then the process that started this one has done it
        signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no defect: how long one example takes is not what properties are about. Ring 1 tries the same
# examples in each run, so that it is red only where something has changed; all other runs try new ones, and more.
settings.register_profile("kproxy", deadline=None)
settings.register_profile("ring 1", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("kproxy")


class NamesFailuresAtOnce:
    """Beside workers pytest names them at its end alone: who waits for minutes wants to look meanwhile."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nfailed in {report.when}: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _parse_expression(config.option.keyword, "-k takes words joined by `and`, `or`, `not`")  # workers would crash
        _parse_expression(config.option.markexpr, "-m takes marks joined by `and`, `or`, `not`")
        config.pluginmanager.register(NamesFailuresAtOnce(config))
    if core := config.getoption("core"):
        os.environ["KPROXY_CORE"] = core
    config.option.loadscopereorder = False  # xdist's own order: files with the most tests first, not the longest ones
    settings.load_profile("ring 1" if config.getoption("ring") == "1" else "kproxy")


pytest_plugins = ["tests.spark_session"]

# One Kafka cluster, one Spark: what needs it runs in one process.
KAFKA = ("tests/broker/", "tests/chaos/", "tests/knowledge/", "tests/matrix/")
SPARK = ("tests/spark/", "tests/analysis/", "tests/cli/test_spark.py", "tests/views/test_answers.py")
# What takes long beside these: begun early, so that no process is left with it at the end.
LONG = (
    "tests/proxy/admission/",
    "tests/proxy/connection/",
    "tests/proxy/process/",
    "tests/admin/",
    "tests/watch/",
    "tests/cli/",
    "tests/convert/",
    "tests/demo/",
    "tests/views/",
    "tests/docs/",
)

# Ring 1 decides whether kproxy works and takes minutes: `./dev test`. Ring 2 has every combination that ring 1 samples:
# these files and folders, tests that are marked `ring2`, and of those marked `sampled(n)` the cases after the first n.
# `./dev test all` runs both rings, and `./dev test PATH` what is named, whatever its ring is.
RING_2 = (
    "tests/analysis/test_engine.py",
    "tests/bench",
    "tests/broker/test_findings.py",
    "tests/broker/test_incident.py",
    "tests/broker/test_outages.py",
    "tests/broker/test_report.py",
    "tests/broker/test_transparent.py",
    "tests/deploy/test_helm.py",
    "tests/docs/test_site.py",
    "tests/admin/test_page.py",
    "tests/spark/test_classes.py",
    "tests/spark/test_cluster.py",
    "tests/spark/test_daemon.py",
    "tests/spark/test_follow.py",
    "tests/spark/tasks/test_pieces.py",
    "tests/spark/test_reading.py",
    "tests/spark/test_sample.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kproxy")
    group.addoption("--ring", choices=("1", "2"), help="only tests of this ring; default: both")
    group.addoption("--shard", metavar="I/N", type=shard, help="part I of N of the tests, the same in each run")
    group.addoption(
        "--core", choices=("auto", "native", "python"), help="what relays where a test does not choose; default: auto"
    )


def shard(text: str) -> tuple[int, int]:
    """`I/N` as two numbers."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text}: I/N is needed, I from 1 to N, like 2/6")
    return int(number), int(count)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of ring 2 are not even imported in ring 1."""
    place = (
        collection_path.relative_to(config.rootpath).as_posix() if config.rootpath in collection_path.parents else ""
    )
    return True if place in RING_2 and config.getoption("ring") == "1" else None


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A reload or an operator may set the level of all logs: it ends with the test."""
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the ring and of the shard; what takes one process longest begins first."""
    ring, part = config.getoption("ring"), config.getoption("shard")
    cases: Counter[str] = Counter()
    chosen = [item for item in items if ring is None or _is_in_ring_2(item, cases) == (ring == "2")]
    if part is not None:
        chosen = [item for item in chosen if is_in_shard(_file_of(item), *part)]
    left_out = set(items) - set(chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted(
        chosen, key=lambda item: (not item.nodeid.startswith((*KAFKA, *SPARK)), not item.nodeid.startswith(LONG))
    )


# Tests, of any ring, that ask for a fixture that is not there: a run of ring 1 would not see those of ring 2 fail.
WITHOUT_FIXTURES = pytest.StashKey[list[str]]()
_NO_CASE = SimpleNamespace(params={})


def pytest_itemcollected(item: pytest.Item) -> None:
    without = item.config.stash.setdefault(WITHOUT_FIXTURES, [])
    if isinstance(item, pytest.Function):
        there = {"request", *item._fixtureinfo.name2fixturedefs, *getattr(item, "callspec", _NO_CASE).params}
        without.extend(f"{item.nodeid}: {name}" for name in item.fixturenames if name not in there)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Who only collects is told; in other runs such a test fails when it begins."""
    without = session.config.stash.get(WITHOUT_FIXTURES, [])
    if without and session.config.option.collectonly:
        raise pytest.UsageError("\n".join(["no such fixture:", *without]))


def is_in_shard(file: str, number: int, count: int) -> bool:
    """Whether a file's tests are in shard `number` of `count`: whole files, so that fixtures are made once."""
    return zlib.crc32(file.encode()) % count == number - 1


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _is_in_ring_2(item: pytest.Item, cases: Counter[str]) -> bool:
    """cases: how many of each test were seen before it; counts this one."""
    place, test = _file_of(item), item.nodeid.partition("[")[0]
    cases[test] += 1
    sampled = item.get_closest_marker("sampled")
    if "ring2" in item.keywords or (sampled is not None and cases[test] > sampled.args[0]):
        return True
    return any(place == path or place.startswith(f"{path}/") for path in RING_2)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own summary: the last lines of a run
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> Iterator[None]:
    """How to run each failure alone, or that nothing ran; and the tests that were run again, only ring 2 does.

    Of these each is listed with what it failed of the first time.
    """
    yield
    stats = terminalreporter.stats
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        ring = config.getoption("ring")
        which = f" of ring {ring}; `./dev test all` and `./dev test PATH` look in both" if ring else ""
        terminalreporter.write_line(f"none was chosen by: {shlex.join(config.invocation_params.args)}{which}")
    if exitstatus in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        files = {name.partition("::")[0] for name in config.args if "::" in name}
        for file in sorted(file for file in files if (config.rootpath / file).is_file()):
            terminalreporter.write_line(f"its tests: ./dev test {shlex.quote(file)} --collect-only")
    failed = {report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())}
    first: dict[str, Any] = {}
    for report in stats.get("rerun", ()):
        first.setdefault(report.nodeid, report)
    for name, report in sorted(first.items()):
        crash = getattr(report.longrepr, "reprcrash", None)
        mark = "at first" if name in failed else "flaky"
        terminalreporter.write_line(f"{mark}: {name}, {crash.message.splitlines()[0] if crash else 'cause unknown'}")
    for name in sorted(failed)[:MOST_ALONE]:
        terminalreporter.write_line(f"alone: ./dev test {shlex.quote(name)}")


MOST_ALONE = 10  # more fail of one cause


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]  # whose fixtures are made once
            return next((group[0] for group in (KAFKA, SPARK) if nodeid.startswith(group)), file)

    return Together(config, log)
