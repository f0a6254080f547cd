"""One real cluster for all tests of this folder, kproxy before it, and the logs of both with every failure.

They stop after the last of these tests: three idle brokers use a seventh of a core.
"""

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.broker.apart import Apart
from tests.broker.apart import apart as made_apart
from tests.broker.cluster import Cluster
from tests.broker.kproxy import Kproxy
from tests.broker.secured import SecuredBroker


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for name in ("cluster", "secured", "apart", "kproxy"):
            if name in getattr(item, "funcargs", {}):
                report.sections.append((f"log of {name}", item.funcargs[name].log_tail()))  # type: ignore[attr-defined]
    return report


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("kafka"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="package")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A single broker with TLS, client certificates and every login: see secured.py."""
    broker = SecuredBroker(tmp_path_factory.mktemp("secured"))
    try:
        broker.start()
        broker.wait_until_started()
        yield broker
    finally:
        broker.stop(kill=True)


@pytest.fixture(scope="package")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """A single broker in network namespaces: see apart.py."""
    with made_apart(tmp_path_factory.mktemp("apart")) as broker:
        yield broker


@pytest.fixture(scope="package")
def kproxy(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kproxy]:
    with Kproxy(cluster.bootstrap, tmp_path_factory.mktemp("kproxy")) as kproxy:
        yield kproxy


@pytest.fixture
def bootstrap(kproxy: Kproxy, cluster: Cluster) -> Iterator[str]:
    """The bootstrap address for a test's clients: kproxy's.

    After the test, kproxy must be the only peer in the brokers' connection logs, and must have found no protocol fault
    in the traffic of real clients and brokers.
    """
    before = cluster.client_peers()
    yield kproxy.bootstrap
    peers = cluster.client_peers() - before
    assert peers
    assert not peers - kproxy.sources()
    assert kproxy.metric("kproxy_requests_total") > 0
    assert kproxy.metric("kproxy_protocol_faults_total") == 0
    assert kproxy.metric("kproxy_unbound_brokers_total") == 0
    assert "Traceback" not in kproxy.log.read_text()
