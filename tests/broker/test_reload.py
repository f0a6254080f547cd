"""A reload changes everything that it can change at once, in all workers, while clients of a real broker continue."""

import json
import ssl
import threading
import uuid
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from tests.broker.cluster import wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.secured import SecuredBroker
from tests.broker.security import PLAIN, SCRAM_512
from tests.broker.test_clients import consume
from tests.broker.test_login import kproxy_with, login
from tests.broker.test_policy import sent
from tests.certificates import Certificate


class Load:
    """An idempotent producer that never stops; every record that is not acknowledged is a fault."""

    def __init__(self, topic: str, settings: dict[str, object]) -> None:
        self.sent = 0
        self.faults: list[object] = []
        self._topic = topic
        self._producer = Producer({"enable.idempotence": True, "linger.ms": 2} | settings)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(0.005):
            self._producer.produce(self._topic, b"%d" % self.sent, b"key", on_delivery=self._delivered)
            self.sent += 1
            self._producer.poll(0)

    def _delivered(self, fault: object, _: object) -> None:
        if fault is not None:
            self.faults.append(fault)

    def more(self, count: int) -> None:
        wanted = self.sent + count
        wait_for("more records", lambda: self.sent >= wanted, 60)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
        assert self._producer.flush(60) == 0
        assert not self.faults


def settings(certificate: Certificate, login: str, policy: str = "") -> str:
    return (
        f'[cluster.tls]\ncertificate = "{certificate.certificate}"\nkey = "{certificate.key}"\n'
        f"[cluster.login]\n{login}{policy}"
    )


def connections(kproxy: Kproxy) -> set[int]:
    return {row["number"] for row in json.loads(kproxy.get("/api/connections"))}


def workers(kproxy: Kproxy) -> set[int]:
    return {row["worker"] for row in json.loads(kproxy.get("/api/connections"))}


def shown(kproxy: Kproxy) -> str:
    """The certificate that kproxy presents to clients now."""
    host, port = kproxy.bootstrap.split(":")
    return ssl.get_server_certificate((host, int(port)), timeout=10)


@pytest.mark.ring2
def test_tls_login_and_policy_change_at_once_in_all_workers(secured: SecuredBroker, tmp_path: Path) -> None:
    """The reload refuses and loses nothing; then the new settings apply to every connection."""
    authority = secured.security.authority
    old, new = authority.server(file="before"), authority.server(file="after")
    client = secured.security.librdkafka("SSL")
    topic, forbidden = f"topic-{uuid.uuid4()}", f"secret-{uuid.uuid4()}"
    before = settings(old, login(secured, PLAIN, tmp_path))
    (tmp_path / "after").mkdir()
    policy = '[[cluster.policy]]\naction = "deny"\ntopic = "secret-*"\n[[cluster.policy]]\naction = "allow"\n'
    after = settings(new, login(secured, SCRAM_512, tmp_path / "after", "bob"), policy)
    with kproxy_with(secured, tmp_path, before, "SASL", ("--workers", "2")) as kproxy:
        bootstrap = {"bootstrap.servers": kproxy.bootstrap}
        loads = [Load(topic, client | bootstrap) for _ in range(6)]  # enough for each worker to get some
        try:
            assert sent(Producer(client | bootstrap), forbidden) is None
            for load in loads:
                load.more(100)
            wait_for("clients of both workers", lambda: len(workers(kproxy)) == 2)
            former, logged = connections(kproxy), secured.logged_bytes()
            (tmp_path / "kproxy.toml").write_text(f"[[cluster]]\n{after}")
            kproxy.reload()
            for load in loads:
                load.more(100)
            wait_for("the connections of before to end", lambda: not former & connections(kproxy), 60)
            for load in loads:
                load.more(100)
            wait_for("clients of both workers again", lambda: len(workers(kproxy)) == 2)
            producers = [Producer(client | bootstrap) for _ in range(4)]  # each worker gets some: they stay connected
            for producer in producers:
                assert new.certificate.read_text().startswith(shown(kproxy).strip())
                fault = sent(producer, forbidden)
                assert fault is not None and fault.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        finally:
            for load in loads:
                load.end()
        sent_records = [b"%d" % number for load in loads for number in range(load.sent)]
        records = consume(kproxy.bootstrap, topic, len(sent_records), **client)
        assert sorted(value for _, value in records) == sorted(sent_records)
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        assert kproxy.metric("kproxy_limits_reached_total") == 0
    wait_for("the request log", lambda: "User:bob" in secured.principals("SASL", logged))
