"""How tests are shared out among workers: those of a folder with something costly to start share it, on one worker."""

from typing import Any

import pytest

TOGETHER = ("tests/broker/", "tests/spark/")  # one Kafka cluster, one Spark


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid)

    return Together(config, log)
