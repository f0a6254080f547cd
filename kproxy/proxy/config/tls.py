"""`[cluster.tls]` towards clients and `[cluster.upstream_tls]` towards brokers: the settings of TLS.

Files are named here and opened elsewhere (`tls.contexts`), since they change while kproxy runs. Refuses to know their
contents.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kproxy.proxy.config.model import Frozen

Version = Literal["1.2", "1.3"]


def _file(value: Any) -> Any:
    """A path; "" means that a variable is not set, and would be the folder that kproxy runs in."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("names no file")
    return value


File = Annotated[Path, BeforeValidator(_file)]


class KeyPair(Frozen):
    """A certificate with its chain, and its private key: PEM files, as Kubernetes mounts a Secret of type tls."""

    certificate: File  # file with the certificate first, then its intermediates
    key: File | None = None  # file of the private key; default: the file of the certificate
    # file of the key's password; a newline at its end is ignored
    key_password_file: File | None = None


class ClientTls(KeyPair):
    """`[cluster.tls]`: TLS with clients."""

    certificates: tuple[KeyPair, ...] = ()  # further certificates, each for the server names in it
    ca: File | None = None  # file of the CAs that vouch for clients
    client_certificates: Literal["none", "wanted", "required"] = "none"  # whether clients show a certificate
    # maps a certificate's subject to a principal, like a broker's ssl.principal.mapping.rules
    principal_mapping_rules: str = "DEFAULT"
    min_version: Version = "1.2"  # lowest version of TLS
    ciphers: str | None = None  # cipher suites of TLS 1.2, in OpenSSL's notation; default: OpenSSL's own


class UpstreamTls(Frozen):
    """`[cluster.upstream_tls]`: TLS with brokers; a certificate identifies kproxy."""

    ca: File | None = None  # file of the CAs that vouch for brokers; default: those of the system
    certificate: File | None = None  # file of the certificate that kproxy shows to brokers
    key: File | None = None  # file of its private key; default: the file of the certificate
    key_password_file: File | None = None  # file of the key's password
    verify_hostname: bool = True  # whether a broker's certificate must hold its name
    server_name: str | None = None  # name for SNI and verification; default: the host that is dialled
    min_version: Version = "1.2"  # lowest version of TLS
    ciphers: str | None = None  # cipher suites of TLS 1.2, in OpenSSL's notation; default: OpenSSL's own

    @property
    def pair(self) -> KeyPair | None:
        """The certificate that brokers may ask for."""
        if self.certificate is None:
            return None
        return KeyPair(certificate=self.certificate, key=self.key, key_password_file=self.key_password_file)
