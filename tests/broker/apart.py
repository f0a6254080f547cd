"""A real broker with network namespaces for the client, a gateway and the broker, joined by veth pairs."""

import sys
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.broker import cluster
from tests.broker.cluster import SETTINGS, Broker, wait_for
from tests.namespaces import Namespace, network

HOST = "10.91.2.1"


class Apart(NamedTuple):
    """The client is 10.91.1.9; the gateway between them is 10.91.1.254 and 10.91.2.254."""

    client: Namespace
    gateway: Namespace
    server: Namespace
    broker: Broker

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:9092"

    def log_tail(self) -> str:
        return self.broker.log_tail()


@contextmanager
def apart(folder: Path) -> Iterator[Apart]:
    """Needs root; see `namespaces.why_not`."""
    with network((1,)) as (client, gateway, kafka), pytest.MonkeyPatch.context() as patch:
        java = cluster.java
        patch.setattr(cluster, "java", lambda *given, **options: kafka.command(*java(*given, **options)))
        broker = Broker(1, folder, controls=True)
        broker.host = HOST
        broker.ports["CLIENT"] = 9092
        alone = {name: "1" for name in SETTINGS if name.endswith((".replication.factor", ".min.isr"))}
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        broker.format(cluster_id, f"1@{HOST}:{broker.ports['CONTROLLER']}", {**SETTINGS, **alone})
        broker.start()
        patch.undo()
        try:
            probe = f"import socket; socket.create_connection(('{HOST}', 9092), 1)"
            wait_for("the broker", lambda: kafka.run(sys.executable, "-c", probe, check=False).returncode == 0, 120)
            yield Apart(client, gateway, kafka, broker)
        finally:
            broker.stop(kill=True)
