"""The columns of the matrix: how a client reaches a broker, with and without kproxy between them.

Through kproxy, TLS ends there and begins anew towards the broker. A login passes through kproxy to the broker, or
kproxy checks it and logs in at the broker itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kproxy.proxy.sasl import users
from tests.broker.kproxy import KPROXY, Kproxy
from tests.broker.security import AUDIENCE, ISSUER, LISTENERS, STORE_PASSWORD, USERS, Security
from tests.matrix.brokers import Brokers
from tests.ports import free_ports

USER = "alice"


@dataclass(frozen=True)
class Way:
    """One column. listener: of the broker, and of kproxy towards the client; own: kproxy is who checks the login."""

    name: str
    listener: str
    mechanism: str = ""
    own: bool = False

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "-")

    def client(self, security: Security, *, proxied: bool) -> dict[str, str]:
        """The job's `security`: the same through kproxy and without it, since one CA vouches for both.

        But for tokens: kproxy takes signed ones only, and brokers before 3.1 only those that are not.
        """
        protocol = LISTENERS[self.listener]
        found = {"protocol": protocol, "user": USER}
        if "SSL" in protocol:
            found |= {"ca": str(security.authority.bundle), "truststore": str(security.truststore())}
            found["store_password"] = STORE_PASSWORD
        if self.listener == "MTLS":
            certificate = security.client(USER)
            found |= {"certificate": str(certificate.certificate), "key": str(certificate.key)}
            found["keystore"] = str(security.keystore(certificate))
        if self.mechanism:
            token = security.tokens.token(USER, signed=True if self.own and proxied else None)
            found |= {"mechanism": self.mechanism, "password": USERS[USER], "token": token}
        return found


WAYS = (
    Way("plaintext", "CLIENT"),
    Way("TLS", "SSL"),
    Way("mTLS", "MTLS"),
    Way("PLAIN", "SASL_SSL", "PLAIN"),
    Way("SCRAM", "SASL_SSL", "SCRAM-SHA-256"),
    Way("OAUTHBEARER", "SASL_SSL", "OAUTHBEARER"),
    Way("PLAIN by kproxy", "SASL_SSL", "PLAIN", own=True),
    Way("SCRAM by kproxy", "SASL_SSL", "SCRAM-SHA-512", own=True),
    Way("OAUTHBEARER by kproxy", "SASL_SSL", "OAUTHBEARER", own=True),
)


class Proxy(Kproxy):
    """`kproxy run` before the brokers of one release: a `[[cluster]]` for each way, all in one process."""

    def __init__(self, brokers: Brokers, ways: Sequence[Way], folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.brokers = brokers
        self.ways = [way for way in ways if not way.mechanism or way.mechanism in brokers.release.mechanisms]
        security = brokers.security
        each = len(brokers.hosts) + 2  # bootstrap, what would be broker 0, and each broker
        first = free_ports(1 + each * len(self.ways))
        self.bootstrap = self.admin = f"127.0.0.1:{first}"
        self.listens = {way: f"127.0.0.1:{first + 1 + each * place}" for place, way in enumerate(self.ways)}
        self.log = folder / "kproxy.log"
        file = folder / "kproxy.toml"
        text = f'admin = "{self.admin}"\nlog_level = "debug"\n'
        file.write_text(text + "".join(self._cluster(way, security) for way in self.ways))
        self.command = [str(KPROXY), "run", "--config", str(file)]
        self._process = None

    def _cluster(self, way: Way, security: Security) -> str:
        settings: dict[str, Any] = {
            "name": way.slug,
            "listen": self.listens[way],
            "bootstrap": self.brokers.bootstrap(way.listener).split(","),
        }
        tables: dict[str, dict[str, Any]] = {}
        if way.listener != "CLIENT":
            server = security.authority.server(file="kproxy-server")  # for localhost and 127.0.0.1
            tables["tls"] = {"certificate": str(server.certificate), "key": str(server.key)}
            tables["upstream_tls"] = {"ca": str(security.authority.bundle)}
        if way.listener == "MTLS":
            own = security.client("kproxy")
            tables["tls"] |= {"ca": str(security.authority.bundle), "client_certificates": "required"}
            tables["upstream_tls"] |= {"certificate": str(own.certificate), "key": str(own.key)}
        if way.own:
            tables |= self._login(way, security)
        lines = ["", "[[cluster]]", *_assignments(settings)]
        for name, table in tables.items():
            lines += ["", f"[cluster.{name}]", *_assignments(table)]
        if way.mechanism and not way.own:  # brokers that kproxy cannot ask, since they want a login first
            for place in range(len(self.brokers.hosts)):
                declared = {
                    "ids": str(place + 1),
                    "port": int(self.listens[way].split(":")[1]) + 2 + place,
                    "upstream": self.brokers.address(way.listener, place),
                }
                lines += ["", "[[cluster.brokers]]", *_assignments(declared)]
        return "\n".join(lines) + "\n"

    def _login(self, way: Way, security: Security) -> dict[str, dict[str, Any]]:
        login: dict[str, Any] = {"mechanism": way.mechanism}
        authentication: dict[str, Any] = {"mechanisms": [way.mechanism]}
        if way.mechanism == "OAUTHBEARER":
            login["token_file"] = str(security.tokens.file("kproxy"))
            authentication |= {"jwks_file": str(security.tokens.jwks), "issuer": ISSUER, "audience": AUDIENCE}
        else:
            password = self.folder / "password"
            password.write_text(USERS["kproxy"])
            password.chmod(0o600)
            login |= {"username": "kproxy", "password_file": str(password)}
            authentication["users_file"] = str(users_file(self.folder))
        return {"authentication": authentication, "login": login}

    def bootstrap_of(self, way: Way) -> str:
        return self.listens[way]


def users_file(folder: Path) -> Path:
    """The file of those whom kproxy lets in, as `kproxy users add` writes it."""
    path = folder / "users"
    if not path.exists():
        users.change(path, USER, USERS[USER])
    return path


def _assignments(table: dict[str, Any]) -> list[str]:
    def value(given: Any) -> str:
        if isinstance(given, list):
            return "[" + ", ".join(map(value, given)) + "]"
        return f'"{given}"' if isinstance(given, str) else str(given).lower()

    return [f"{name} = {value(given)}" for name, given in table.items()]
