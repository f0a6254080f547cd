"""A real client and a real broker, with TLS and certificates on both sides of kproxy."""

import uuid
from pathlib import Path

import pytest

from tests.broker.cluster import wait_for
from tests.broker.secured import SecuredBroker
from tests.broker.test_clients import consume
from tests.broker.test_login import kproxy_with, produced


@pytest.mark.ring2
def test_certificates_on_both_sides_while_they_are_replaced(secured: SecuredBroker, tmp_path: Path) -> None:
    authority = secured.security.authority
    server, own = authority.server(file="of-kproxy"), authority.client("kproxy")
    topic = f"topic-{uuid.uuid4()}"
    settings = (
        f'[cluster.tls]\ncertificate = "{server.certificate}"\nkey = "{server.key}"\nca = "{authority.bundle}"\n'
        'client_certificates = "required"\n'
        f'[cluster.upstream_tls]\nca = "{authority.bundle}"\n'
        f'certificate = "{own.certificate}"\nkey = "{own.key}"\n'
    )
    with kproxy_with(secured, tmp_path, settings, "MTLS") as kproxy:
        client = secured.security.librdkafka("MTLS")
        records = produced(kproxy.bootstrap, topic, 500, **client)
        authority.server(file="of-kproxy")  # the same files with another key
        wait_for(
            "the new certificate", lambda: kproxy.metric("kproxy_certificate_reloads_total", side="client") == 1, 20
        )
        records += produced(kproxy.bootstrap, topic, 500, **client)
        assert sorted(consume(kproxy.bootstrap, topic, len(records), **client)) == sorted(records)
        assert kproxy.metric("kproxy_tls_handshakes_total", side="broker", result="ok") > 2
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
    wait_for("the request log", lambda: any("CN=kproxy" in name for name in secured.principals("MTLS")))
