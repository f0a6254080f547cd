"""TLS and logins of real brokers and their clients: certificates, users, tokens, and the settings that refer to them.

Brokers of every release can read these files: PKCS #12 stores, which Java has always supported, and for OAUTHBEARER
signed tokens with the keys in a file (Kafka 3.1 and later) or unsigned ones (Kafka 2.0 and later).
"""

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

from tests.certificates import Authority, Certificate

PLAIN, SCRAM_256, SCRAM_512, OAUTHBEARER = "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"
MECHANISMS = (PLAIN, SCRAM_256, SCRAM_512, OAUTHBEARER)
# Security protocol by listener. CLIENT is the plaintext listener everywhere.
LISTENERS = {
    "CLIENT": "PLAINTEXT",
    "SSL": "SSL",
    "MTLS": "SSL",  # requires a client certificate
    "SASL": "SASL_PLAINTEXT",
    "SASL_SSL": "SASL_SSL",
}
USERS = {"alice": "password-of-alice", "bob": "password-of-bob", "kproxy": "password-of-kproxy"}
STORE_PASSWORD = "password-of-stores"
AUDIENCE = "kafka"
ISSUER = "https://issuer.example"

_COMMON = "org.apache.kafka.common.security"
_MODULES = {
    PLAIN: f"{_COMMON}.plain.PlainLoginModule",
    SCRAM_256: f"{_COMMON}.scram.ScramLoginModule",
    SCRAM_512: f"{_COMMON}.scram.ScramLoginModule",
    OAUTHBEARER: f"{_COMMON}.oauthbearer.OAuthBearerLoginModule",
}


class Tokens:
    """Issues JSON Web Tokens (RFC 7519) for OAUTHBEARER. `jwks` is the file with the key that verifies them."""

    def __init__(self, folder: Path, *, signed: bool = True) -> None:
        self.signed = signed
        self.folder = folder
        self.jwks = folder / "jwks.json"
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public = self._key.public_key().public_numbers()
        key = {
            "kty": "RSA",
            "kid": "test",
            "use": "sig",
            "alg": "RS256",
            "n": _base64(public.n.to_bytes(256, "big")),
            "e": _base64(public.e.to_bytes(3, "big")),
        }
        self.jwks.write_text(json.dumps({"keys": [key]}))

    def token(self, user: str, lifetime_s: float = 3600, *, signed: bool | None = None, **claims: Any) -> str:
        """A token for a user, signed with RS256 if `signed`; the default is this issuer's."""
        signed = self.signed if signed is None else signed
        header = {"alg": "RS256", "kid": "test"} if signed else {"alg": "none"}
        now = time.time()
        body = {"iss": ISSUER, "sub": user, "aud": AUDIENCE, "iat": int(now) - 1, "exp": int(now + lifetime_s)} | claims
        signing = f"{_base64(json.dumps(header).encode())}.{_base64(json.dumps(body).encode())}"
        signature = self._key.sign(signing.encode(), padding.PKCS1v15(), hashes.SHA256()) if signed else b""
        return f"{signing}.{_base64(signature)}"

    def file(self, user: str, lifetime_s: float = 3600) -> Path:
        """A file with a token of this user, for clients and proxies."""
        path = self.folder / f"token-of-{user}"
        path.write_text(self.token(user, lifetime_s))
        return path


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@dataclass(frozen=True)
class Security:
    """Credentials shared by brokers on some addresses and their clients: one CA, one token issuer, USERS."""

    folder: Path
    authority: Authority
    server: Certificate
    tokens: Tokens
    mechanisms: Sequence[str]

    @classmethod
    def create(
        cls, folder: Path, *names: str, mechanisms: Sequence[str] = MECHANISMS, signed: bool = True
    ) -> "Security":
        """names: host names and addresses of the brokers' certificate, besides localhost."""
        folder.mkdir(parents=True, exist_ok=True)
        authority = Authority(folder, rsa=True)  # RSA, which every client and every old Java accepts
        server = authority.server("localhost", *names, file="broker")
        return cls(folder, authority, server, Tokens(folder, signed=signed), tuple(mechanisms))

    def client(self, user: str) -> Certificate:
        """A client's certificate, with the subject CN=user,OU=kafka clients,O=Example."""
        return self.authority.client(user)

    def truststore(self) -> Path:
        """The CA as a store for Java."""
        path = self.folder / "truststore.p12"
        if not path.exists():
            root = x509.load_pem_x509_certificate(self.authority.bundle.read_bytes())
            entry = pkcs12.PKCS12Certificate(root, b"ca")
            encryption = BestAvailableEncryption(STORE_PASSWORD.encode())
            path.write_bytes(pkcs12.serialize_java_truststore([entry], encryption))
        return path

    def keystore(self, certificate: Certificate) -> Path:
        """A certificate with its chain and key as a store for Java."""
        path = certificate.certificate.with_suffix(".p12")
        return path if path.exists() else certificate.pkcs12(path, STORE_PASSWORD)

    def stores(self, certificate: Certificate | None) -> dict[str, str]:
        """Kafka's `ssl.` settings for a broker or a client: the truststore, and the certificate to present."""
        settings = {
            "ssl.truststore.type": "PKCS12",
            "ssl.truststore.location": str(self.truststore()),
            "ssl.truststore.password": STORE_PASSWORD,
        }
        if certificate is not None:
            settings |= {
                "ssl.keystore.type": "PKCS12",
                "ssl.keystore.location": str(self.keystore(certificate)),
                "ssl.keystore.password": STORE_PASSWORD,
                "ssl.key.password": STORE_PASSWORD,
            }
        return settings

    def broker(self) -> dict[str, str]:
        """Settings of a broker with LISTENERS. SASL sessions expire after two seconds (KIP-368), SASL_SSL sessions
        never."""
        settings = {
            **self.stores(self.server),
            "listener.name.mtls.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": ",".join(self.mechanisms),
        }
        for listener in ("sasl", "sasl_ssl"):
            for mechanism in self.mechanisms:
                prefix = f"listener.name.{listener}.{mechanism.lower()}"
                settings[f"{prefix}.sasl.jaas.config"] = self.server_jaas(mechanism)
                if listener == "sasl":
                    settings[f"{prefix}.connections.max.reauth.ms"] = "2000"
                if mechanism == OAUTHBEARER and self.tokens.signed:
                    settings[f"{prefix}.sasl.server.callback.handler.class"] = (
                        f"{_COMMON}.oauthbearer.OAuthBearerValidatorCallbackHandler"
                    )
        if OAUTHBEARER in self.mechanisms and self.tokens.signed:
            settings["sasl.oauthbearer.jwks.endpoint.url"] = self.tokens.jwks.as_uri()
            settings["sasl.oauthbearer.expected.audience"] = AUDIENCE
            # Without this, Kafka 4.1.0 accepts a signature by any key.
            settings["sasl.oauthbearer.jwt.validator.class"] = f"{_COMMON}.oauthbearer.BrokerJwtValidator"
        return settings

    def broker_options(self) -> list[str]:
        """Options of a broker's JVM; without them Kafka 4 refuses to read a file of keys."""
        return [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.tokens.jwks.as_uri()}"]

    def server_jaas(self, mechanism: str) -> str:
        """The broker's side of a login, as `sasl.jaas.config`."""
        options = ""
        if mechanism == PLAIN:
            options = "".join(f' user_{name}="{password}"' for name, password in USERS.items())
        if mechanism == OAUTHBEARER and not self.tokens.signed:
            options = ' unsecuredLoginStringClaim_sub="broker"'
        return f"{_MODULES[mechanism]} required{options};"

    def librdkafka(self, listener: str, mechanism: str = "", user: str = "alice") -> dict[str, Any]:
        """librdkafka's settings for a client of one of LISTENERS, without bootstrap.servers."""
        settings: dict[str, Any] = {"security.protocol": LISTENERS[listener].lower()}
        if "SSL" in LISTENERS[listener]:
            settings["ssl.ca.location"] = str(self.authority.bundle)
        if listener == "MTLS":
            certificate = self.client(user)
            settings["ssl.certificate.location"] = str(certificate.certificate)
            settings["ssl.key.location"] = str(certificate.key)
        if mechanism:
            settings["sasl.mechanism"] = mechanism
        if mechanism == OAUTHBEARER:
            settings["oauth_cb"] = lambda _: (self.tokens.token(user), time.time() + 3600)
        elif mechanism:
            settings |= {"sasl.username": user, "sasl.password": USERS[user]}
        return settings

    def java(self, listener: str, mechanism: str = "", user: str = "alice") -> Mapping[str, str]:
        """The same for Kafka's own client; for OAUTHBEARER 4.0 and later (see `java_options`)."""
        protocol = LISTENERS[listener]
        settings = {"security.protocol": protocol}
        if "SSL" in protocol:
            settings |= self.stores(self.client(user) if listener == "MTLS" else None)
        if mechanism == OAUTHBEARER:
            settings |= {
                "sasl.mechanism": mechanism,
                "sasl.jaas.config": f"{_MODULES[mechanism]} required;",
                "sasl.login.callback.handler.class": f"{_COMMON}.oauthbearer.OAuthBearerLoginCallbackHandler",
                "sasl.oauthbearer.token.endpoint.url": self.tokens.file(user).as_uri(),
            }
        elif mechanism:
            login = f'username="{user}" password="{USERS[user]}"'
            settings |= {
                "sasl.mechanism": mechanism,
                "sasl.jaas.config": f"{_MODULES[mechanism]} required {login};",
            }
        return settings

    def java_options(self, user: str = "alice") -> list[str]:
        """Options of a client's JVM; without them Kafka 4 refuses to read a token from a file."""
        return [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.tokens.file(user).as_uri()}"]
