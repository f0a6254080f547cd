"""How tests are shared out among workers, those of a folder with something costly to start on one; and Hypothesis."""

from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no defect: how long one example takes is not what properties are about.
settings.register_profile("kproxy", deadline=None)
settings.load_profile("kproxy")

pytest_plugins = ["tests.spark_session"]

# One Kafka cluster, one Spark: what needs it runs in one process.
KAFKA = ("tests/broker/",)
SPARK = ("tests/spark/", "tests/analysis/", "tests/cli/test_spark.py", "tests/views/test_answers.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group[0] for group in (KAFKA, SPARK) if nodeid.startswith(group)), nodeid)

    return Together(config, log)
