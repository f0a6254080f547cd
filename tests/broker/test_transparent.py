"""A real broker behind a transparent kproxy, each in its own network namespace, with librdkafka as the client."""

import sys
from pathlib import Path

import pytest

from tests.broker.apart import HOST, Apart
from tests.deploy.test_transparent import MARK, Kproxy, rules, talk
from tests.namespaces import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

TOPIC = """
import sys
from confluent_kafka.admin import AdminClient, NewTopic
admin = AdminClient({"bootstrap.servers": sys.argv[1]})
if "orders" not in admin.list_topics(timeout=60).topics:
    admin.create_topics([NewTopic("orders", 6, 1)])["orders"].result(60)
"""


@pytest.mark.parametrize("ruleset", ["redirect.nft", "tproxy.nft"])
def test_a_transparent_kproxy_serves_a_real_broker(apart: Apart, tmp_path: Path, ruleset: str) -> None:
    client, gateway, bootstrap = apart.client, apart.gateway, apart.bootstrap
    before = len(apart.broker.client_peers())
    with rules(gateway, ruleset), Kproxy(gateway, tmp_path, settings=MARK, bootstrap=bootstrap) as kproxy:
        kproxy.until_ready()
        client.run(sys.executable, "-c", TOPIC, bootstrap)
        assert talk(client, bootstrap)["brokers"] == {"1": bootstrap}
        assert kproxy.metric("kproxy_requests_total", broker="1", api="Produce") > 0
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        peers = {host for host, _ in apart.broker.client_peers()[before:]}
        assert not peers - {HOST, "10.91.2.254"}  # no client bypassed kproxy
