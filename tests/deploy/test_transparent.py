"""Transparent mode: the rulesets of deploy/transparent make the kernel redirect unmodified clients to kproxy.

Network namespaces hold a client, a gateway and a miniature cluster of three brokers. The client is librdkafka.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from kproxy.proxy.config.load import load
from tests.namespaces import Namespace, network, why_not

RULES = Path(__file__).parents[2] / "deploy/transparent"
KPROXY = Path(sys.executable).with_name("kproxy")
NODES = (1, 2, 3)
MARK = "upstream_mark = 0x6b70"

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CLUSTER = """
import asyncio, sys
from kproxy.demo.cluster import Cluster
async def main():
    cluster = Cluster(count=3, topics={"orders": 6})
    for node_id, broker in cluster.brokers.items():
        broker.host, broker.port = sys.argv[1].format(node_id), 9092
    await cluster.start()
    print("started", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""

TLS_SERVER = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
with socket.create_server(("10.91.2.4", 9092)) as listener:
    print("started", flush=True)
    with context.wrap_socket(listener.accept()[0], server_side=True) as sock:
        sock.sendall(sock.recv(100).upper())
        sock.recv(1)
"""

TLS_CLIENT = """
import socket, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[1])
with context.wrap_socket(socket.create_connection(("10.91.2.4", 9092), 10), server_hostname="10.91.2.4") as sock:
    sock.sendall(b"hello")
    print(sock.recv(100).decode(), end="")
"""

CLIENT = """
import json, os, sys
from confluent_kafka import Producer, Consumer, TopicPartition, OFFSET_BEGINNING
bootstrap, partitions, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
failed = []
producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 20000})
for number in range(count):
    delivered = lambda fault, _: fault and failed.append(str(fault))
    producer.produce("orders", str(number), partition=number % partitions, on_delivery=delivered)
producer.flush(30)
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g"})
consumer.assign([TopicPartition("orders", number, OFFSET_BEGINNING) for number in range(partitions)])
got = set()
for _ in range(400):
    for message in consumer.consume(100, 0.1):
        got.add(message.value().decode() if message.error() is None else str(message.error()))
    if len(got) >= count:
        break
print(json.dumps({"failed": failed, "got": sorted(got), "brokers": {k: f"{b.host}:{b.port}" for k, b in
      producer.list_topics(timeout=10).brokers.items()}}), flush=True)
os._exit(0)  # closing a consumer would wait for a coordinator, which the miniature cluster lacks
"""


BOTH_FAMILIES = """
import socket
from kproxy.proxy.sockets.redirected import original_destination
with socket.create_server(("::", 19092), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
    for host in ("127.0.0.5", "::1"):
        with socket.create_connection((host, 9092), 10), listener.accept()[0] as accepted:
            print(original_destination(accepted))
"""


def until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.05)


class Kproxy:
    """A kproxy process in a namespace."""

    def __init__(self, where: Namespace, folder: Path, *prefix: str, settings: str = "", bootstrap: str) -> None:
        file = folder / "kproxy.toml"
        file.write_text(
            f'admin = "127.0.0.1:9600"\ndrain_timeout_s = 0.1\n{settings}\n[[cluster]]\nroute = "transparent"\n'
            f'listen = ":19092"\nbootstrap = ["{bootstrap}"]\ndetail = "topics"\n'
        )
        folder.chmod(0o755)
        self.where = where
        self.log = folder / "kproxy.log"
        with self.log.open("w") as log:
            self.process = where.start(*prefix, KPROXY, "run", "--config", file, stderr=log)

    def __enter__(self) -> "Kproxy":
        until("kproxy to start", lambda: "admin at" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def until_ready(self) -> None:
        until(f"kproxy to be ready\n{self.log.read_text()}", lambda: self.metric("kproxy_ready") == 1)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0, self.log.read_text()
        finally:
            self.process.kill()
            self.process.wait()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        text = self.where.run("curl", "-s", "http://127.0.0.1:9600/metrics").stdout
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        found = re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", text, re.MULTILINE)
        return sum(float(value) for have, value in found if wanted <= set(have.split(",")))


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    with network(NODES) as (client, gateway, kafka):
        for host in ("10.91.2.{}", "fd00:91:2::{}"):
            cluster = kafka.start(sys.executable, "-c", CLUSTER, host, stdout=subprocess.PIPE)
            assert cluster.stdout is not None
            assert cluster.stdout.readline() == "started\n"
        yield client, gateway, kafka


@contextmanager
def rules(where: Namespace, name: str) -> Iterator[None]:
    """Apply that file and the ip commands in its comments; remove both at the end."""
    where.run("nft", "-f", RULES / name)
    routes = re.findall(
        r"^#   (ip (?:rule|route) add .*?)(?: {2,}.*| and the same.*)?$", (RULES / name).read_text(), re.M
    )
    for line in routes:
        for family in ("-4", "-6"):
            where.run("ip", family, *line.split()[1:])
    try:
        yield
    finally:
        for line in reversed(routes):
            for family in ("-4", "-6"):
                where.run("ip", family, *line.replace(" add ", " del ").split()[1:])
        where.run("nft", "delete", "table", "inet", "kproxy")


def talk(client: Namespace, bootstrap: str, partitions: int = 6, count: int = 300) -> dict:
    """Produce and consume from the client's namespace; return what the client reports."""
    done = client.run(sys.executable, "-c", CLIENT, bootstrap, str(partitions), str(count))
    found = json.loads(done.stdout)
    assert found["failed"] == []
    assert found["got"] == sorted(map(str, range(count)))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ruleset", ["redirect.nft", "tproxy.nft"])
@pytest.mark.parametrize("host", ["10.91.2.{}", "[fd00:91:2::{}]"])
def test_a_gateway_redirects_clients_to_kproxy(namespaces, tmp_path, ruleset, host):
    client, gateway, _ = namespaces
    bootstrap = f"{host.format(1)}:9092"
    with rules(gateway, ruleset), Kproxy(gateway, tmp_path, settings=MARK, bootstrap=bootstrap) as kproxy:
        kproxy.until_ready()
        found = talk(client, f"{host.format(2)}:9092")
        # Nothing is rewritten: the client learned the brokers' own addresses and connected to them.
        assert found["brokers"] == {str(n): f"{host.format(n).strip('[]')}:9092" for n in NODES}
        for node_id in map(str, NODES):
            assert kproxy.metric("kproxy_connections_total", broker=node_id, listener="transparent") > 0
            assert kproxy.metric("kproxy_requests_total", broker=node_id, api="Produce") > 0
        assert kproxy.metric("kproxy_topic_records_total", topic="orders", direction="request") >= 300
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        assert kproxy.metric("kproxy_rewritten_addresses_total") == 0


def test_several_workers_share_redirected_connections(namespaces, tmp_path):
    """The accepting process passes the connection on; the worker reads the destination from the same socket."""
    client, gateway, _ = namespaces
    settings = f"{MARK}\nworkers = 2"
    with (
        rules(gateway, "redirect.nft"),
        Kproxy(gateway, tmp_path, settings=settings, bootstrap="10.91.2.1:9092") as kproxy,
    ):
        kproxy.until_ready()
        talk(client, "10.91.2.2:9092")
        assert all(kproxy.metric("kproxy_requests_total", broker=str(node_id), api="Produce") > 0 for node_id in NODES)
        client.run("curl", "-s", "-m", "5", "http://10.91.1.254:19092/", check=False)
        until("the refusal", lambda: kproxy.metric("kproxy_disconnects_total", cause="not_redirected") == 1)


def test_on_the_clients_machine_rules_exclude_the_user_of_kproxy(namespaces, tmp_path):
    """Without CAP_NET_ADMIN: the rules exclude connections of kproxy's user."""
    client, _, _ = namespaces
    # Its only privilege is to read this Python wherever it is installed.
    user = "setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all,+dac_read_search"
    user += " --inh-caps -all,+dac_read_search --ambient-caps -all,+dac_read_search"
    with (
        rules(client, "redirect.nft"),
        Kproxy(client, tmp_path, *user.split(), bootstrap="10.91.2.1:9092") as kproxy,
    ):
        kproxy.until_ready()
        assert "REDIRECT works, TPROXY does not" in kproxy.log.read_text()
        talk(client, "10.91.2.3:9092")
        assert all(kproxy.metric("kproxy_requests_total", broker=str(node_id), api="Produce") > 0 for node_id in NODES)
        assert kproxy.metric("kproxy_loops_refused_total") == 0


def test_on_a_brokers_machine_only_connections_of_others_are_redirected(namespaces, tmp_path):
    """Connections of clients to the broker's port are redirected; those of kproxy itself are not."""
    client, _, kafka = namespaces
    with rules(kafka, "redirect.nft"), Kproxy(kafka, tmp_path, settings=MARK, bootstrap="10.91.2.1:9092") as kproxy:
        kproxy.until_ready()
        talk(client, "10.91.2.1:9092")
        assert kproxy.metric("kproxy_requests_total", broker="1", api="Produce") > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_rules_that_redirect_kproxy_itself_cause_no_loop(namespaces, tmp_path, workers):
    """It runs as root without a mark, so the rules cannot distinguish its connections from those of clients."""
    client, _, _ = namespaces
    settings = f"workers = {workers}"
    with (
        rules(client, "redirect.nft"),
        Kproxy(client, tmp_path, settings=settings, bootstrap="10.91.2.1:9092") as kproxy,
    ):
        until("the loop to be found", lambda: "rules of the kernel redirect kproxy's own" in kproxy.log.read_text())
        for _ in range(20):
            client.run("curl", "-s", "-m", "5", "http://10.91.2.2:9092/", check=False)
        assert kproxy.metric("kproxy_loops_refused_total") > 0
        assert kproxy.metric("kproxy_open_connections") == 0
        assert kproxy.metric("kproxy_ready") == 0
        assert kproxy.metric("kproxy_connections_total") < 60  # far fewer than a loop would open


def test_a_client_that_was_not_redirected_is_refused(namespaces, tmp_path):
    client, gateway, _ = namespaces
    with Kproxy(gateway, tmp_path, bootstrap="10.91.2.1:9092") as kproxy:
        kproxy.until_ready()
        assert client.run("curl", "-s", "-m", "5", "http://10.91.1.254:19092/", check=False).returncode != 0
        until("the refusal", lambda: kproxy.metric("kproxy_disconnects_total", cause="not_redirected") == 1)
        assert "it dialled 10.91.1.254:19092, this port of kproxy, and not a broker" in kproxy.log.read_text()


def test_tls_passes_unread_and_is_counted(namespaces, tmp_path):
    client, gateway, kafka = namespaces
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    ca.issue_cert("10.91.2.4").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    kafka.run("ip", "address", "add", "10.91.2.4/24", "dev", "uplink")
    server = kafka.start(sys.executable, "-c", TLS_SERVER, tmp_path / "server.pem", stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    settings = (gateway, tmp_path)
    with rules(gateway, "redirect.nft"), Kproxy(*settings, settings=MARK, bootstrap="10.91.2.1:9092") as kproxy:
        kproxy.until_ready()
        assert client.run(sys.executable, "-c", TLS_CLIENT, tmp_path / "ca.pem").stdout == "HELLO"
        assert kproxy.metric("kproxy_protocol_faults_total", kind="tls", side="client") == 1
        assert "TLS: what is inside cannot be read; from here on this connection is forwarded unread" in (
            kproxy.log.read_text()
        )


def test_the_documentation_matches_the_rules(tmp_path):
    page = (RULES.parents[1] / "docs/transparent.md").read_text()
    file = tmp_path / "kproxy.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    config = load(file)
    rules_text = (RULES / "redirect.nft").read_text()
    assert f"define kproxy_mark = {config.upstream_mark:#x} " in rules_text
    assert f"define kproxy = {config.clusters[0].listen.port} " in rules_text
    for name in re.findall(r"(\w+\.nft)", page):
        assert (RULES / name).exists()
    assert f"USER {re.search(r'kproxy_uid = ([0-9]+)', rules_text)[1]}:" in (RULES.parent / "Containerfile").read_text()


def test_a_dual_stack_socket_returns_the_original_destination_for_ipv4_and_ipv6() -> None:
    alone = Namespace("alone")
    alone.make()
    try:
        alone.run("nft", "-f", RULES / "redirect.nft")
        assert alone.run(sys.executable, "-c", BOTH_FAMILIES).stdout.split() == ["127.0.0.5:9092", "[::1]:9092"]
    finally:
        alone.remove()
