"""A real broker behind a transparent kproxy, each in a network namespace of its own, and librdkafka before it."""

import sys
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from tests.broker import cluster
from tests.broker.cluster import SETTINGS, Broker
from tests.deploy.test_transparent import MARK, Kproxy, rules, talk, until
from tests.namespaces import Namespace, network, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

HOST = "10.91.2.1"
TOPIC = """
import sys
from confluent_kafka.admin import AdminClient, NewTopic
admin = AdminClient({"bootstrap.servers": sys.argv[1]})
if "orders" not in admin.list_topics(timeout=60).topics:
    admin.create_topics([NewTopic("orders", 6, 1)])["orders"].result(60)
"""


def test_a_real_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with network((1,)) as (client, gateway, kafka):
        java = cluster.java
        monkeypatch.setattr(cluster, "java", lambda *given, **options: kafka.command(*java(*given, **options)))
        broker = Broker(1, tmp_path, controls=True)
        broker.host = HOST
        broker.ports["CLIENT"] = 9092
        alone = {name: "1" for name in SETTINGS if name.endswith((".replication.factor", ".min.isr"))}
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        broker.format(cluster_id, f"1@{HOST}:{broker.ports['CONTROLLER']}", {**SETTINGS, **alone})
        broker.start()
        try:
            probe = f"import socket; socket.create_connection(('{HOST}', 9092), 1)"
            until("the broker", lambda: kafka.run(sys.executable, "-c", probe, check=False).returncode == 0)
            for ruleset in ("redirect.nft", "tproxy.nft"):
                behind_kproxy(client, gateway, broker, tmp_path, ruleset)
        finally:
            broker.stop(kill=True)


def behind_kproxy(client: Namespace, gateway: Namespace, broker: Broker, folder: Path, ruleset: str) -> None:
    bootstrap = f"{HOST}:9092"
    with rules(gateway, ruleset), Kproxy(gateway, folder, settings=MARK, bootstrap=bootstrap) as kproxy:
        kproxy.until_ready()
        client.run(sys.executable, "-c", TOPIC, bootstrap)
        assert talk(client, bootstrap)["brokers"] == {"1": bootstrap}
        assert kproxy.metric("kproxy_requests_total", broker="1", api="Produce") > 0
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        assert not {host for host, _ in broker.client_peers()} - {HOST, "10.91.2.254"}  # no client came past kproxy
