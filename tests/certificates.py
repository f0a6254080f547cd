"""Certificates for tests, as PEM files in a folder: what a CA issues, and what it should not have.

An `Authority` is a root (or, below another, an intermediate) that writes a `Certificate` per call: the file of the
certificate with its chain, the file of its key, and the bundle of the CA that vouches for it. Keys are ECDSA unless RSA
is asked for: an RSA key takes ten times as long to make.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)

HOST = "127.0.0.1"
PASSWORD = "of the key, not of a store"


@dataclass(frozen=True)
class Certificate:
    """The files of one certificate. `certificate` holds the chain below the root, the leaf first."""

    certificate: Path
    key: Path
    ca: Path
    password: str = ""  # of `key`

    def settings(self) -> dict[str, str]:
        """`certificate` and `key`, as `[cluster.tls]` calls them."""
        return {"certificate": str(self.certificate), "key": str(self.key)}

    def pkcs12(self, path: Path, password: str) -> Path:
        """Write certificate, chain and key as a PKCS #12 store, which Java reads too; returns its path."""
        leaf, *chain = x509.load_pem_x509_certificates(self.certificate.read_bytes())
        key: Any = load_pem_private_key(self.key.read_bytes(), self.password.encode() or None)
        encryption = BestAvailableEncryption(password.encode())
        path.write_bytes(pkcs12.serialize_key_and_certificates(b"key", key, leaf, chain, encryption))
        return path


class Authority:
    """A CA whose files stand in `folder`; several CAs of one folder have different names.

    of: the CA that this one is an intermediate of; None: a root of its own.
    """

    def __init__(self, folder: Path, name: str = "ca", *, of: "Authority | None" = None, rsa: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        self._key_type = trustme.KeyType.RSA if rsa else trustme.KeyType.ECDSA
        if of is None:
            self._ca = trustme.CA(organization_name=f"test {name}", key_type=self._key_type)
        else:
            self._ca = of._ca.create_child_ca(key_type=self._key_type)
        self.root: Authority = of.root if of is not None else self
        self.bundle = folder / f"{name}.pem"  # of the root: what those who verify are given
        self.root._ca.cert_pem.write_to_path(str(self.bundle))

    def server(self, *names: str, file: str = "server", **options: Any) -> Certificate:
        """A server's certificate for these names and addresses (default: localhost and 127.0.0.1).

        A name may be a wildcard: `*.kafka.example`. options: those of `issue`.
        """
        return self.issue(file, *(names or ("localhost", HOST)), **options)

    def wildcard(self, domain: str = "kafka.example", file: str = "wildcard", **options: Any) -> Certificate:
        """For all names right below a domain, and for no other."""
        return self.issue(file, f"*.{domain}", **options)

    def other_name(self, file: str = "other", **options: Any) -> Certificate:
        """Sound, but for a host that no test dials."""
        return self.issue(file, "other.example", **options)

    def expired(self, *names: str, file: str = "expired", **options: Any) -> Certificate:
        """Of yesterday: valid for a day and no longer."""
        yesterday = now() - datetime.timedelta(days=1)
        return self.issue(file, *(names or ("localhost", HOST)), not_after=yesterday, **options)

    def client(
        self, common_name: str = "alice", file: str | None = None, *, organization: str = "Example", **options: Any
    ) -> Certificate:
        """A client's certificate, of the subject CN=common_name,OU=kafka clients,O=organization."""
        options = {"organization_name": organization, "organization_unit_name": "kafka clients"} | options
        return self.issue(
            file or common_name, f"{file or 'client'}@clients.example", common_name=common_name, **options
        )

    def issue(
        self,
        file: str,
        *identities: str,
        common_name: str | None = None,
        password: str = "",
        rsa: bool = False,
        not_after: datetime.datetime | None = None,
        **options: Any,
    ) -> Certificate:
        """Write FILE.pem (the certificate with its chain) and FILE.key, encrypted where there is a password."""
        issued = self._ca.issue_cert(
            *identities,
            common_name=common_name,
            not_before=not_after - datetime.timedelta(days=1) if not_after else None,
            not_after=not_after,
            key_type=trustme.KeyType.RSA if rsa else self._key_type,
            **options,
        )
        certificate, key = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        if password:
            encrypt(key, password)
        return Certificate(certificate, key, self.bundle, password)

    def with_subject(self, subject: x509.Name, file: str) -> Certificate:
        """A client's certificate of exactly that subject, with all its peculiarities."""
        model = self.client(file=file)
        (leaf, *_) = x509.load_pem_x509_certificates(model.certificate.read_bytes())
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.subject)
            .public_key(leaf.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(leaf.not_valid_before_utc)
            .not_valid_after(leaf.not_valid_after_utc)
        )
        for extension in leaf.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        signed = builder.sign(_key(self._ca.private_key_pem.bytes()), hashes.SHA256())
        model.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        return model


def encrypt(key: Path, password: str) -> None:
    """Encrypt a key's file in place, as PKCS #8."""
    pem = _key(key.read_bytes()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode()) if password else NoEncryption()
    )
    key.write_bytes(pem)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _key(pem: bytes) -> Any:
    return load_pem_private_key(pem, None)
