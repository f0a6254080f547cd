"""`[cluster.tls]` towards clients and `[cluster.upstream_tls]` towards brokers: the settings of TLS.

Files are named here and opened elsewhere (`relay.contexts`), since they change while kproxy runs. Refuses to know what
is in them.
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

    certificate: File  # its own first, then those between it and the root
    key: File | None = None  # None: in the file of the certificate
    key_password_file: File | None = None  # the whole file but a newline at its end


class ClientTls(KeyPair):
    """`[cluster.tls]`: how clients are spoken to."""

    certificates: tuple[KeyPair, ...] = ()  # further ones, each for the server names that it holds
    ca: File | None = None  # who vouches for clients
    client_certificates: Literal["none", "wanted", "required"] = "none"
    principal_mapping_rules: str = "DEFAULT"  # as a broker's ssl.principal.mapping.rules
    min_version: Version = "1.2"
    ciphers: str | None = None  # of TLS 1.2, in OpenSSL's notation; None: OpenSSL's own


class UpstreamTls(Frozen):
    """`[cluster.upstream_tls]`: how brokers are spoken to; with a certificate, who kproxy is."""

    ca: File | None = None  # who vouches for brokers; None: whom the system trusts
    certificate: File | None = None
    key: File | None = None
    key_password_file: File | None = None
    verify_hostname: bool = True
    server_name: str | None = None  # the name asked for and verified; None: the one that is dialled
    min_version: Version = "1.2"
    ciphers: str | None = None

    @property
    def pair(self) -> KeyPair | None:
        """The certificate that brokers may ask for."""
        if self.certificate is None:
            return None
        return KeyPair(certificate=self.certificate, key=self.key, key_password_file=self.key_password_file)
