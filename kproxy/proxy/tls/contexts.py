"""TLS contexts from PEM files: for a listener, with a certificate for each server name, and for brokers.

All faults visible in the files and settings are reported when a context is made: ConfigError names the setting, the
file and the fix. A `Reloading` context is made again when one of its files changes, also through the swap of a symbolic
link as in Kubernetes: later handshakes use it, existing connections continue. Invalid new files leave the old context
in place. Bounded: files of 1 MiB, read every CHECK_S. Refuses to know sockets and clusters.
"""

import hashlib
import logging
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kproxy.errors import ConfigError, Malformed
from kproxy.proxy.config.files import named, open_regular
from kproxy.proxy.config.tls import ClientTls, KeyPair, UpstreamTls
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.tls.certificates import Certificate, is_for, read_pem
from kproxy.proxy.tls.other_forms import CERTIFICATES, KEY, remedy
from kproxy.proxy.tls.principals import PrincipalRules

CHECK_S = 5.0
_MAX_FILE = 1024 * 1024
_SOON_S = 14 * 86400  # a certificate that expires within this time gets a log line at start
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_VERIFIES = {"none": ssl.CERT_NONE, "wanted": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

log = logging.getLogger("kproxy.tls")

Contents = dict[Path, bytes]


class Asked(ssl.SSLObject):
    """The server side of a connection, with the client's server name."""

    has_hello = False  # its ClientHello is complete
    server_name: str | None = None
    refused_name = False  # the listener does not serve that name


@dataclass(frozen=True)
class Built:
    """A context, a digest of its files, and warnings about them."""

    context: ssl.SSLContext
    contents: str  # digest of all files
    expiries: dict[str, int]  # file -> earliest expiry of its certificates, in seconds since the epoch
    warnings: tuple[str, ...] = ()


@dataclass
class _Files:
    """Reads each file once and collects the faults, to report them together."""

    place: str
    contents: Contents = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    expiries: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def fault(self, setting: str, text: str) -> None:
        self.faults.append((f"{self.place}.{setting}", text))

    def read(self, setting: str, path: Path) -> bytes | None:
        try:
            with open_regular(path) as file:
                data = file.read(_MAX_FILE + 1)
        except OSError as fault:
            self.fault(setting, f"{named(path)} cannot be read: {fault.strerror or fault}")
            return None
        if len(data) > _MAX_FILE:
            self.fault(setting, f"{path} has more than {_MAX_FILE} bytes: it should hold certificates or a key")
            return None
        self.contents[path] = data
        return data

    def certificates(self, setting: str, path: Path) -> list[Certificate]:
        """Return the certificates of a PEM file; an empty list after a fault."""
        data = self.read(setting, path)
        if data is None:
            return []
        try:
            found = read_pem(data)
        except Malformed as fault:
            self.fault(setting, f"{path} is damaged: {fault}")
            return []
        if not found:
            why = remedy(path, data, CERTIFICATES) or "it should be PEM, -----BEGIN CERTIFICATE-----"
            self.fault(setting, f"{path} holds no certificate: {why}")
            return []
        return found

    def note_expiry(self, path: Path, certificates: Sequence[Certificate]) -> None:
        first = min(certificates, key=lambda each: each.not_after)
        self.expiries[str(path)] = first.not_after
        left = first.not_after - time.time()
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.not_after))
        if left < 0:
            self.warnings.append(
                f"{path}: {first.subject or 'the certificate'} expired at {when}: peers will refuse it. Put "
                "a new one in its place: it is read as soon as the file changes"
            )
        elif left < _SOON_S:
            self.warnings.append(f"{path}: {first.subject or 'the certificate'} expires at {when}")

    def digest(self) -> str:
        whole = hashlib.sha256()
        for path, data in sorted(self.contents.items()):
            whole.update(f"{path}\0{len(data)}\0".encode())
            whole.update(data)
        return whole.hexdigest()

    def built(self, context: ssl.SSLContext) -> Built:
        """Return the context with its files' digest. Raises ConfigError with all faults."""
        if self.faults:
            raise ConfigError(self.faults)
        return Built(context, self.digest(), self.expiries, tuple(self.warnings))


def for_clients(settings: ClientTls, serves: Callable[[str], bool] | None = None, place: str = "tls") -> Built:
    """Return the context of a listener. Raises ConfigError.

    serves: whether a server name is valid here; others are refused with the alert unrecognized_name. None: all are.
    place: the settings table, for faults.
    """
    files = _Files(place)
    choices: list[tuple[list[Certificate], ssl.SSLContext]] = []
    trusted = _trusted(settings.ca, files) if settings.ca is not None else ""
    if settings.ca is not None and settings.client_certificates == "none":
        files.fault("ca", "has no effect without client_certificates = 'wanted' or 'required'")
    try:
        PrincipalRules(settings.principal_mapping_rules)
    except ValueError as fault:
        files.fault("principal_mapping_rules", str(fault))
    for number, pair in enumerate((settings, *settings.certificates)):
        context = _context(ssl.PROTOCOL_TLS_SERVER, settings.min_version, settings.ciphers, files)
        context.sslobject_class = Asked
        prefix = f"certificates[{number - 1}]." if number else ""
        choices.append((_load_pair(context, pair, files, prefix), context))
        if settings.ca is not None:
            _trust(context, settings.ca, trusted, files)
        elif settings.client_certificates != "none":
            if number == 0:
                files.fault(
                    "ca",
                    f"is missing: client_certificates = {settings.client_certificates!r} needs the "
                    "CAs of clients' certificates",
                )
            continue
        context.verify_mode = _VERIFIES[settings.client_certificates]
    context = choices[0][1]
    context.sni_callback = _by_name(choices, serves)
    if sys.unraisablehook is not _unraisable:
        _Hook.former = sys.unraisablehook
        sys.unraisablehook = _unraisable
    return files.built(context)


def for_brokers(settings: UpstreamTls, place: str = "upstream_tls") -> Built:
    """Return the context for connections to brokers. Raises ConfigError."""
    files = _Files(place)
    context = _context(ssl.PROTOCOL_TLS_CLIENT, settings.min_version, settings.ciphers, files)
    context.check_hostname = settings.verify_hostname
    if settings.ca is not None:
        _trust(context, settings.ca, _trusted(settings.ca, files), files)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if settings.pair is not None:
        _load_pair(context, settings.pair, files, "")
    elif settings.key is not None or settings.key_password_file is not None:
        files.fault("certificate", "is missing: a key alone proves nothing")
    return files.built(context)


def _context(protocol: Any, version: str, ciphers: str | None, files: _Files) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = _VERSIONS[version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    if ciphers is not None:
        try:
            context.set_ciphers(ciphers)
        except ssl.SSLError:
            if "ciphers" not in "".join(path for path, _ in files.faults):
                text = f"{ciphers!r} names no cipher of TLS 1.2 that OpenSSL knows: see openssl ciphers -s -tls1_2"
                files.fault("ciphers", text)
    return context


def _trusted(ca: Path, files: _Files) -> str:
    """Return the PEM text of a CA bundle; "" after a fault."""
    certificates = files.certificates("ca", ca)
    if not certificates:
        return ""
    files.note_expiry(ca, certificates)
    return files.contents[ca].decode("ascii", "ignore")


def _trust(context: ssl.SSLContext, ca: Path, bundle: str, files: _Files) -> None:
    try:
        if bundle:
            context.load_verify_locations(cadata=bundle)
    except ssl.SSLError as fault:
        files.fault("ca", f"{ca} is not accepted by OpenSSL: {fault.reason or fault}")


def _load_pair(context: ssl.SSLContext, pair: KeyPair, files: _Files, prefix: str) -> list[Certificate]:
    """Load certificate and key; returns the certificates of the chain, none after a fault."""
    chain = files.certificates(f"{prefix}certificate", pair.certificate)
    key_path = pair.key or pair.certificate
    of_key = f"{prefix}key" if pair.key is not None else f"{prefix}certificate"
    key = files.read(of_key, key_path) if pair.key is not None else files.contents.get(key_path)
    password: bytes | None = None
    if pair.key_password_file is not None:
        password = files.read(f"{prefix}key_password_file", pair.key_password_file)
        if password is None:
            return []
        password = password.rstrip(b"\r\n")
    if not chain or key is None:
        return []
    if b"PRIVATE KEY-----" not in key:
        fix = "" if pair.key is not None else "; give the key's file as `key`"
        why = remedy(key_path, key, KEY) or f"it should be PEM, -----BEGIN PRIVATE KEY-----{fix}"
        files.fault(of_key, f"{key_path} holds no private key: {why}")
        return []
    if password is None and b"ENCRYPTED" in key:
        files.fault(of_key, f"{key_path} is encrypted: give key_password_file")
        return []
    try:
        context.load_cert_chain(pair.certificate, key_path, password or b"")
    except ssl.SSLError as fault:
        files.fault(*_why_not(fault, pair, key_path, of_key, prefix))
        return []
    except OSError as fault:
        files.fault(of_key, f"{key_path} cannot be read: {fault.strerror or fault}")
        return []
    files.note_expiry(pair.certificate, chain)
    return chain


def _why_not(fault: ssl.SSLError, pair: KeyPair, key_path: Path, of_key: str, prefix: str) -> tuple[str, str]:
    reason = (fault.reason or str(fault)).upper().replace(" ", "_")
    if "KEY_VALUES_MISMATCH" in reason or "KEY_TYPE_MISMATCH" in reason:
        return of_key, (
            f"{key_path} is not the key of {pair.certificate}, whose first certificate must be the server's own: "
            "put the chain behind it"
        )
    if pair.key_password_file is not None and ("DECRYPT" in reason or "PASSWORD" in reason or "PEM_LIB" in reason):
        return f"{prefix}key_password_file", f"{pair.key_password_file} does not open {key_path}"
    return of_key, f"{pair.certificate} and {key_path} are not accepted by OpenSSL: {fault.reason or fault}"


def _by_name(
    choices: Sequence[tuple[list[Certificate], ssl.SSLContext]], serves: Callable[[str], bool] | None
) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], int | None]:
    """Return the callback that selects a certificate by server name; it runs on the handshake's thread."""
    leaves = [(chain[0], context) for chain, context in choices if chain]

    def choose(connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> int | None:
        assert isinstance(connection, Asked)
        connection.has_hello = True
        connection.server_name = server_name
        if server_name is None:
            return None
        if serves is not None and not serves(server_name):
            connection.refused_name = True
            return int(ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)
        for leaf, context in leaves:
            if is_for(leaf, server_name):
                connection.context = context
                break
        return None

    return choose


class _Hook:
    former: Callable[[Any], Any] = sys.unraisablehook


def _unraisable(event: Any) -> None:
    """Ignore the exception about a server name that is not ASCII: ssl would write a traceback for each client.

    The handshake fails because of the name, and kproxy reports that like any other refusal.
    """
    fault = event.exc_value
    if not (isinstance(fault, UnicodeDecodeError) and isinstance(event.object, bytes) and fault.object == event.object):
        _Hook.former(event)


class Reloading:
    """A context that is reloaded when its files change.

    build: makes it, and raises ConfigError. whose: for log lines. failures, reloads: counts since the start.
    """

    def __init__(self, whose: str, build: Callable[[], Built]) -> None:
        self._build = build
        self._whose = whose
        self._built = build()
        self._refused = ""  # the latest fault, already logged
        self._limiter = LogLimiter(log)
        self.failures = 0
        self.reloads = 0
        self._warn()

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next handshake."""
        return self._built.context

    @property
    def expiries(self) -> dict[str, int]:
        """File -> earliest expiry of its certificates, in seconds since the epoch."""
        return self._built.expiries

    def reload(self) -> bool:
        """Read the files again; returns whether changed content is in use. Any thread may call it, one at a time."""
        try:
            built = self._build()
        except ConfigError as fault:
            if str(fault) != self._refused:
                self._refused = str(fault)
                self.failures += 1
                text = "%s: new certificates are not used, the old ones stay: %s"
                log.error(text, self._whose, "; ".join(f"{path}: {text}" for path, text in fault.faults))
            return False
        self._refused = ""
        if built.contents == self._built.contents:
            return False
        self._built = built
        self.reloads += 1
        until = ", ".join(f"{file} until {_day(at)}" for file, at in built.expiries.items())
        log.info("%s: certificates were read anew: %s", self._whose, until)
        self._warn()
        return True

    def _warn(self) -> None:
        for text in self._built.warnings:
            log.warning("%s: %s", self._whose, text)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def tls_faults(tls: ClientTls | None, upstream_tls: UpstreamTls | None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield all faults of a cluster's files: (place, fault and fix)."""
    builds: list[Callable[[], Built]] = []
    if tls is not None:
        builds.append(lambda: for_clients(tls, place=f"{prefix}tls"))
    if upstream_tls is not None:
        builds.append(lambda: for_brokers(upstream_tls, place=f"{prefix}upstream_tls"))
    for build in builds:
        try:
            build()
        except ConfigError as fault:
            yield from fault.faults
