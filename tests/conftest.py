"""The environment of all tests, how they are shared out among workers, and Hypothesis.

Tests see the same environment wherever they are started: what the caller's terminal is called, how wide it is, whether
colours are wanted, kproxy's own variables, and that a shell has its background jobs ignore SIGINT, reach no test and no
process that a test starts. A test about any of these sets it.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

for name in [*os.environ]:
    if name.startswith("KPROXY_") or name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
        del os.environ[name]
os.environ["TERM"] = "xterm-256color"
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / ".cache")  # with Spark's classes: ./dev keeps them
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with suppress(ValueError):  # not the main thread: then the process that started this one has done it
        signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no defect: how long one example takes is not what properties are about.
settings.register_profile("kproxy", deadline=None)
settings.load_profile("kproxy")

pytest_plugins = ["tests.spark_session"]

# One Kafka cluster, one Spark: what needs it runs in one process.
KAFKA = ("tests/broker/", "tests/chaos/", "tests/knowledge/", "tests/matrix/")
SPARK = ("tests/spark/", "tests/analysis/", "tests/cli/test_spark.py", "tests/views/test_answers.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group[0] for group in (KAFKA, SPARK) if nodeid.startswith(group)), nodeid)

    return Together(config, log)
