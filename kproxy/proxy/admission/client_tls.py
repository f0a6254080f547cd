"""TLS with clients: the admission step from a client's first byte to the completed handshake.

A failed client gets a RefusedClient, which has a text with the cause and the fix, and the result that metrics count.
Bounded in time by the caller, in number by `Handshakes`. Refuses to know brokers, and how files are read.
"""

import logging
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, time

from kproxy.errors import Malformed, RefusedClient
from kproxy.metrics.counters.tls import TlsSide
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets.streams import readable
from kproxy.proxy.tls.certificates import read
from kproxy.proxy.tls.contexts import Asked
from kproxy.proxy.tls.handshakes import AT_ONCE, Handshakes, Stalled
from kproxy.proxy.tls.principals import MAX_SUBJECT, PrincipalRules
from kproxy.proxy.tls.tls_socket import TlsSocket
from kproxy.wire.frames import sniff

_HANDSHAKE = 0x16  # the first byte of every TLS connection
_LOOKED_AT = 16
_JUDGED_FROM = 5  # bytes: the header of a TLS record; health checks send fewer, if any
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_HTTP = re.compile(rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS|CONNECT|PATCH|TRACE|PRI) ")  # PRI: HTTP/2
_SSL_2 = re.compile(rb"[\x80-\xff].\x01(\0\x02|\x03[\0-\x03])", re.DOTALL)  # a ClientHello (RFC 5246, E.2)

log = logging.getLogger("kproxy.tls")


class ClientHandshakes:
    """Runs the TLS handshakes of one cluster's clients.

    context(): for the next handshake. node_of(server name): the broker's node id, None for bootstrap; called for names
    that `context` serves, if server names select brokers.
    """

    def __init__(
        self,
        cluster: str,
        settings: ClientTls,
        context: Callable[[], ssl.SSLContext],
        handshakes: Handshakes,
        cells: TlsSide,
        node_of: Callable[[str], int | None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._asks = settings.client_certificates != "none"
        self._rules = PrincipalRules(settings.principal_mapping_rules)
        self._context = context
        self._handshakes = handshakes
        self._cells = cells
        self._node_of = node_of
        self._limiter = LogLimiter(log)

    async def __call__(self, client: Incoming) -> None:
        """Replace the client's socket by a TLS socket; a step of the admission. Raises RefusedClient."""
        start = monotonic_ns()
        result = "timeout"  # the caller cancels it at the time limit
        try:
            await self._shake(client)
            result = "ok"
        except RefusedClient as fault:
            result = fault.kind
            raise
        finally:
            self._cells.ended(result, monotonic_ns() - start)

    async def _shake(self, client: Incoming) -> None:
        await _begins(client.sock)
        tls = client.sock = TlsSocket(client.sock, self._context(), self._handshakes.buffer, server_side=True)
        connection = tls.tls
        assert isinstance(connection, Asked)
        try:
            await self._handshakes.run(tls)
        except (OSError, EOFError) as fault:
            raise self._refusal(connection, fault) from None
        client.server_name = connection.server_name
        if self._node_of is not None:
            if client.server_name is not None:
                client.node_id = self._node_of(client.server_name)
            else:
                self._limiter.log(
                    logging.WARNING,
                    "no name",
                    "cluster=%s client=%s sent no server name (SNI) and is served as one that bootstraps: only names "
                    "lead to brokers here; let it dial a name, not an IP address, and have its library send it "
                    "(kafka-python 3.0: ssl_check_hostname=True; kafkajs: servername in ssl)",
                    self._cluster,
                    client.peer,
                )
        if self._asks:
            self._identify(client, connection)

    def _identify(self, client: Incoming, connection: ssl.SSLObject) -> None:
        der = connection.getpeercert(binary_form=True)
        if der is None:
            return
        try:
            certificate = read(der)
        except Malformed as fault:
            raise RefusedClient("tls", f"its certificate cannot be read: {fault}", "certificate") from None
        subject = certificate.subject
        if certificate.not_after < time():  # OpenSSL does not check the expiry when a session is resumed
            text = "its certificate is not accepted: certificate has expired since its session began; give it a new one"
            raise RefusedClient("tls", text, "certificate", claimed=subject)
        principal = self._rules.principal(subject)
        if len(subject) > MAX_SUBJECT:
            text = f"its certificate's subject has {len(subject)} characters: kproxy takes {MAX_SUBJECT} at most"
            raise RefusedClient("tls", text, "principal", claimed=subject)
        if principal is None:
            text = (
                f"no rule of principal_mapping_rules takes its certificate's subject {subject!r}; end them with DEFAULT"
            )
            raise RefusedClient("tls", text, "principal", claimed=subject)
        client.principal = principal

    def _refusal(self, connection: Asked, fault: Exception) -> RefusedClient:
        name = connection.server_name
        asked = f", which asked for {name!r}," if name is not None else ""
        reason = (getattr(fault, "reason", None) or "").upper()
        if isinstance(fault, Stalled):
            text = (
                f"{AT_ONCE} TLS handshakes were under way, others waited, and it{asked} had kept kproxy waiting for "
                "longest: see who connects, or limit clients by max_connections_per_address in [cluster.limits]"
            )
            return RefusedClient("handshake_timeout", text, "timeout")
        if connection.refused_name:
            text = f"{name!r} is no server name of this listener (SNI): clients get names from it, as advertised"
            return RefusedClient("tls", text, "server_name")
        if "CALLBACK_FAILED" in reason:
            text = "its server name (SNI) is not ASCII: names of other scripts are asked for in their form xn--"
            return RefusedClient("tls", text, "server_name")
        if isinstance(fault, ssl.SSLCertVerificationError):
            fix = "give it a new one" if fault.verify_code == _EXPIRED else "set `ca` to the CAs of clients"
            text = f"its certificate is not accepted: {fault.verify_message}; {fix}"
            return RefusedClient("tls", text, "certificate")
        if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
            text = "it has no certificate, and client_certificates = 'required': give it a keystore"
            return RefusedClient("tls", text, "no_certificate")
        if "ALERT" in reason and "VERSION" not in reason and "HANDSHAKE_FAILURE" not in reason:
            text = (
                f"the client{asked} rejected kproxy's certificate ({_plain(reason)}): does its truststore have the CA, "
                "and the certificate the name that it dials?"
            )
            return RefusedClient("tls", text, "rejected")
        if any(word in reason for word in ("VERSION", "PROTOCOL", "CIPHER", "SIGALG", "GROUP", "HANDSHAKE_FAILURE")):
            text = f"no version, cipher or key type in common ({_plain(reason)}): see min_version and ciphers"
            return RefusedClient("tls", text, "version")
        if isinstance(fault, ssl.SSLError):
            return RefusedClient("tls", f"the TLS handshake failed: {_plain(reason) or fault}", "other")
        if not connection.has_hello:
            text = "it closed the connection before its TLS handshake was answered, as health checks do"
            return RefusedClient("tls", text, "closed", said_nothing=True)
        text = f"the client{asked} closed the connection in the TLS handshake: does it trust the CA of `certificate`?"
        return RefusedClient("tls", text, "closed")


async def _begins(sock: socket.socket) -> None:
    """Wait for a client's first bytes, without consuming them. Raises RefusedClient if they are not TLS."""
    first = await _first_bytes(sock)
    if len(first) < _JUDGED_FROM:
        sent = "enough to tell TLS from plaintext" if first else "anything"
        text = f"it closed the connection before it sent {sent}, as health checks do"
        raise RefusedClient("tls", text, "closed", said_nothing=True)
    if first[0] == _HANDSHAKE:
        return
    if _HTTP.match(first):
        raise RefusedClient("tls", "HTTP on a port for Kafka over TLS: the admin port is another one", "http")
    if _SSL_2.match(first):
        text = (
            "its ClientHello is in the format of SSL 2.0, as health checks and clients of 2010 send it: have it use "
            "TLS 1.2 or newer"
        )
        raise RefusedClient("tls", text, "version")
    kind, text = sniff(first)
    if kind == "proxy_protocol":  # from a balancer: the client behind it may use TLS
        raise RefusedClient("tls", text, "other")
    text = (
        "it does not use TLS, but this listener does: set security.protocol=SSL (or SASL_SSL) in the client, or point "
        "it at a plaintext listener"
    )
    raise RefusedClient("tls", text, "plaintext")


async def _first_bytes(sock: socket.socket) -> bytes:
    """Return a client's first bytes, which stay in the socket; fewer than _JUDGED_FROM only if they are all it sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _JUDGED_FROM)  # fewer make it readable only at its end
    try:
        first = _peeked(sock)
        if first is None or 0 < len(first) < _JUDGED_FROM:
            await readable(sock)
            first = _peeked(sock)
        return first or b""
    finally:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _peeked(sock: socket.socket) -> bytes | None:
    """Return the first bytes that are there, none at the end of the connection; None if it goes on without any."""
    try:
        return sock.recv(_LOOKED_AT, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


def _plain(reason: str) -> str:
    return reason.lower().replace("_", " ")
