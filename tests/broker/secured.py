"""One real broker with every kind of listener: see `security.LISTENERS`, `security.USERS`, `security.Security`.

Its addresses are `address_of("SSL")` and so on. Unlike the brokers of cluster.py it also reports its clients'
principals.
"""

import json
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path

from tests.broker.cluster import SETTINGS, Broker
from tests.broker.security import LISTENERS, USERS, Security

NODE_ID = 7  # differs from the nodes of a Cluster, so that its address differs too
_ALONE = {name: "1" for name in SETTINGS if name.endswith((".replication.factor", ".min.isr"))}


class SecuredBroker(Broker):
    """One node, its own controller, that accepts clients by TLS, by certificates and by every login.

    `security` has its CA, users and tokens, and the settings with which clients reach each listener. Topics are created
    at first use, with three partitions.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(NODE_ID, folder, controls=True, listeners=LISTENERS)
        self.security = Security.create(folder / "security", self.host)
        self.requests = self.folder / "requests.log"
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        plain = {name: value for name, value in SETTINGS.items() if "sasl" not in name and "reauth" not in name}
        settings = {**plain, **_ALONE, "auto.create.topics.enable": "true", **self.security.broker()}
        self.format(cluster_id, f"{NODE_ID}@{self.host}:{self.ports['CONTROLLER']}", settings, USERS)

    def start(self, *, options: Sequence[str] = ()) -> None:
        log = (f"-Drequest.log={self.requests}", "-Drequest.level=DEBUG")
        super().start(options=(*self.security.broker_options(), *log, *options))

    def logged_bytes(self) -> int:
        """The size of its request log, as a start for `principals`."""
        return self.requests.stat().st_size if self.requests.exists() else 0

    def principals(self, listener: str, since_bytes: int = 0) -> set[str]:
        """The principals that sent requests to a listener since then, from the broker's request log: {"User:alice",
        ...}."""
        found = set()
        written = self.requests.read_bytes()[since_bytes:]
        whole = written[: written.rfind(b"\n") + 1]  # the broker may be writing a line
        for line in whole.decode(errors="replace").splitlines():
            _, bracket, text = line.partition("{")
            if not line.startswith("Completed request:") or not bracket:
                continue
            request = json.loads(bracket + text)
            if request["listener"] == listener:
                found.add(request["principal"])
        return found
