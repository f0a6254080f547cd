"""`[cluster.tls]` towards clients and `[cluster.upstream_tls]` towards brokers: the settings of TLS.

Files are named here and opened elsewhere (`tls.contexts`), since they change while kproxy runs. Refuses to know what
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

    certificate: File  # file with the certificate first, then those between it and the root
    key: File | None = None  # file of the private key; default: the file of the certificate
    # file of the key's password, which is the whole file but a newline at its end
    key_password_file: File | None = None


class ClientTls(KeyPair):
    """`[cluster.tls]`: how clients are spoken to."""

    certificates: tuple[KeyPair, ...] = ()  # further ones, each for the server names that it holds
    ca: File | None = None  # file of the CAs that vouch for clients
    client_certificates: Literal["none", "wanted", "required"] = "none"  # whether clients show a certificate
    # from a certificate's subject to a principal, as a broker's ssl.principal.mapping.rules
    principal_mapping_rules: str = "DEFAULT"
    min_version: Version = "1.2"  # lowest version of TLS
    ciphers: str | None = None  # of TLS 1.2, in OpenSSL's notation; default: OpenSSL's own


class UpstreamTls(Frozen):
    """`[cluster.upstream_tls]`: how brokers are spoken to; with a certificate, who kproxy is."""

    ca: File | None = None  # file of the CAs that vouch for brokers; default: those of the system
    certificate: File | None = None  # file of the certificate that kproxy shows to brokers
    key: File | None = None  # file of its private key; default: the file of the certificate
    key_password_file: File | None = None  # file of the key's password
    verify_hostname: bool = True  # whether a broker's certificate must hold its name
    server_name: str | None = None  # the name that is asked for and verified; default: the one that is dialled
    min_version: Version = "1.2"  # lowest version of TLS
    ciphers: str | None = None  # of TLS 1.2, in OpenSSL's notation; default: OpenSSL's own

    @property
    def pair(self) -> KeyPair | None:
        """The certificate that brokers may ask for."""
        if self.certificate is None:
            return None
        return KeyPair(certificate=self.certificate, key=self.key, key_password_file=self.key_password_file)
