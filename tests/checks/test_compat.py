"""The report on the API versions of a cluster, for a miniature cluster whose brokers offer the versions of the test."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from kproxy.checks.compat import clients_of, compatibility
from kproxy.checks.offers import compare, release_of
from kproxy.cli.compat import compat
from kproxy.errors import ConfigError, UpstreamError
from kproxy.protocol.apis import FETCH
from kproxy.protocol.schema import served_versions
from kproxy.proxy.config.load import load
from kproxy.views.compat import lines
from tests.checks.test_doctor import HOST, offering, running
from tests.ports import free_ports


def config(cluster):
    host, port = cluster.bootstrap[0]
    return load(flags={"listen": f"{HOST}:0", "bootstrap": f"{host}:{port}", "connect_timeout_s": "2"})


@pytest.fixture(scope="module")
def cluster():
    with running() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def newer():
    """Its brokers serve a Fetch beyond ours, an API that is not Kafka's, and one of them an older Produce."""
    change = offering(api1=(4, 99), api999=(0, 3))

    def other(broker):
        change(broker)
        offering(api0=(3, 12))(broker)

    with running(broker1=change, broker2=other, broker3=change) as cluster:
        yield cluster


def test_nothing_is_lost(cluster):
    (found,) = compatibility(config(cluster))
    shown = list(lines(found))
    assert shown[0] == "Nothing is lost: clients get every API and version that the brokers serve."
    assert len([one for one in found.brokers if one.offers]) == 3
    of_groups = ("JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "OffsetCommit", "OffsetFetch")
    assert {one.name: one.treatment for one in found.apis} == {
        **dict.fromkeys(("Produce", "Fetch", "Metadata", "FindCoordinator", "DescribeCluster"), "rewritten"),
        **dict.fromkeys(("ListOffsets", "ApiVersions", "InitProducerId", *of_groups), "passed"),
    }
    assert all(len(line) <= 80 for line in shown)


def test_what_a_newer_cluster_has_beyond_kproxy(newer):
    (found,) = compatibility(config(newer))
    by_key = {one.key: one for one in found.apis}
    assert (by_key[FETCH].treatment, by_key[FETCH].offered) == ("capped", (4, by_key[FETCH].kproxy[1]))
    assert (by_key[999].name, by_key[999].treatment, by_key[999].offered) == ("unknown_999", "unread", (0, 3))
    assert by_key[18].treatment == "rewritten"  # it must say so
    assert found.differing == ("Produce",)
    shown = "\n".join(lines(found))
    assert shown.startswith(f"Clients do not get Fetch above v{by_key[FETCH].kproxy[1]}: this kproxy is older")
    assert "brokers differ (a rolling upgrade?) in Produce" in shown


@contextmanager
def metrics(text):
    """The admin port of a kproxy whose clients are these."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with HTTPServer((HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{HOST}:{server.server_port}"
        server.shutdown()


INFO = 'kproxy_client_info{{cluster="default",client_id="{}",software_name="{}",software_version="{}"}} 1\n'


def test_clients_that_a_running_kproxy_sees(cluster, newer):
    seen = INFO.format("orders", "apache-kafka-java", "4.1.0") + INFO.format("audit", "librdkafka", "2.6.0")
    with metrics("# TYPE kproxy_client_info gauge\n" + seen) as url:
        clients = clients_of(url)
    assert [(one.name, one.software, one.software_version) for one in clients] == [
        ("audit", "librdkafka", "2.6.0"),
        ("orders", "apache-kafka-java", "4.1.0"),
    ]
    (found,) = compatibility(config(newer), clients)
    assert found.losses == ()  # a Java client of 4.1 has no Fetch version that kproxy lacks
    assert found.unknown == ("librdkafka 2.6.0",)
    shown = "\n".join(lines(found))
    assert "None of the 2 kinds of clients seen would use it." in shown
    (found,) = compatibility(config(cluster), clients)
    assert next(lines(found)).startswith("Nothing is lost: ")


def test_clients_that_tables_show(newer, tmp_path):
    rows = {"source": ["s"], "connection": [1]}
    for name, columns in (
        ("connections", {"software_name": ["exotic"], "software_version": ["9"]}),
        ("exchanges", {"client_id": ["orders"], "api_key": [FETCH], "api_version": [40]}),
    ):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(pyarrow.table({**rows, **columns}), tmp_path / name / "0.parquet")
    (found,) = compatibility(config(newer), clients_of(str(tmp_path)))
    (loss,) = found.losses
    assert (loss.client.name, loss.api, loss.knows) == ("orders", "Fetch", 40)
    assert f"orders exotic 9: Fetch: could use v40, gets v{loss.gets}" in "\n".join(lines(found))


@pytest.mark.parametrize("source", ["http://127.0.0.1:1", "/no/such/folder"])
def test_an_unusable_source_of_clients_is_an_error(source):
    with pytest.raises(ConfigError, match="--clients"):
        clients_of(source)


def test_a_cluster_that_does_not_answer():
    settings = load(flags={"listen": f"{HOST}:0", "bootstrap": f"{HOST}:{free_ports(1)}"})
    with pytest.raises(UpstreamError, match="Connection refused"):
        compatibility(settings)


def test_every_release_is_recognised_by_the_versions_that_it_serves():
    """All release lines that answer ApiVersions; two that serve clients the same are reported as the newer."""
    served = {release: versions for release, versions in served_versions().items() if 18 in versions}
    named = {
        release: release_of({key: (some[0], some[-1]) for key, some in versions.items() if len(some)})
        for release, versions in served.items()
    }
    releases = list(served)
    assert all(releases.index(named[release]) >= releases.index(release) for release in releases)
    assert len({*named.values()}) > len(releases) * 2 / 3
    assert all(
        one.treatment in ("rewritten", "passed")
        for one in compare({key: (some[0], some[-1]) for key, some in served["4.1.2"].items()})
    )


def test_only_the_versions_for_clients_identify_a_release():
    """One version less of any API for clients is an older release; other APIs depend on features and settings."""
    newest, versions = [*served_versions().items()][-1]
    offers = {key: (some[0], some[-1]) for key, some in versions.items() if len(some)}
    assert release_of(offers) == newest
    for_clients = {0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 18, 19, 22, 24, 32}
    for key, (lowest, highest) in offers.items():
        assert (release_of({**offers, key: (lowest, highest - 1)}) == newest) == (key not in for_clients), key
    without = {key: offer for key, offer in offers.items() if key != 32}
    assert release_of(without) != newest


def test_the_command(cluster):
    host, port = cluster.bootstrap[0]
    done = CliRunner().invoke(compat, ["--bootstrap", f"{host}:{port}"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Nothing is lost: ")
    done = CliRunner().invoke(compat, ["--bootstrap", f"{host}:{port}", "--json"])
    (found,) = json.loads(done.stdout)
    assert found["nothing_lost"]
    assert len(found["brokers"]) == 3
    assert isinstance(CliRunner().invoke(compat, []).exception, ConfigError)
