"""TLS with brokers: a step of `BrokerConnector`.

A fault is an UpstreamError with the cause "tls", whose text names the reason and the fix. Bounded in time by the
connector, in number by `Handshakes`. Refuses to know how files are read, and whose connection it is.
"""

import re
import ssl
from collections.abc import Callable
from time import monotonic_ns

from kproxy.addresses import numeric
from kproxy.errors import UpstreamError
from kproxy.metrics.counters.tls import TlsSide
from kproxy.proxy.config.tls import UpstreamTls
from kproxy.proxy.relay.ends import Outgoing
from kproxy.proxy.tls.handshakes import Handshakes
from kproxy.proxy.tls.tls_socket import TlsSocket

CAUSE = "tls"
_NAME_MISMATCHES = frozenset((62, 64))  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_GIVE_NAME = "give a name that its certificate holds as server_name in [cluster.upstream_tls]"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_TIMES = frozenset((9, 10))  # not valid yet, expired
_UNKNOWN_ISSUERS = frozenset((2, 18, 19, 20, 21))  # missing issuer's certificate, self-signed certificates


class BrokerHandshakes:
    """Runs the TLS handshakes with the brokers of one cluster. `context()`: for the next handshake."""

    def __init__(
        self,
        settings: UpstreamTls,
        context: Callable[[], ssl.SSLContext],
        handshakes: Handshakes,
        cells: TlsSide,
    ) -> None:
        self._settings = settings
        self._context = context
        self._handshakes = handshakes
        self._cells = cells

    async def __call__(self, outgoing: Outgoing) -> None:
        """Replace the socket by a TLS socket; a step of the connector. Raises UpstreamError."""
        name = self._settings.server_name or outgoing.address.host.rstrip(".")
        start = monotonic_ns()
        result = "timeout"  # the connector cancels it, or the connector's caller
        try:
            tls = TlsSocket(
                outgoing.sock, self._context(), self._handshakes.buffer, server_side=False, server_name=name
            )
            outgoing.sock = tls
            await self._handshakes.run(tls)
            result = "ok"
        except (OSError, EOFError, ValueError) as fault:
            result, text = self._why(fault, name)
            raise UpstreamError(f"{outgoing.address}: {text}", CAUSE) from None
        finally:
            self._cells.ended(result, monotonic_ns() - start)

    def _why(self, fault: Exception, name: str) -> tuple[str, str]:
        """Return (the result that metrics count, the reason and the fix)."""
        reason = (getattr(fault, "reason", None) or "").upper()
        plain = reason.lower().replace("_", " ")
        if isinstance(fault, ssl.SSLCertVerificationError):
            if fault.verify_code in _NAME_MISMATCHES:
                return "name", (
                    f"its certificate is not for {name!r}: dial the name that it holds, or give that as server_name "
                    "in [cluster.upstream_tls]"
                )
            if fault.verify_code in _UNKNOWN_ISSUERS:
                whose = "`ca`" if self._settings.ca is not None else "the system's CAs (no `ca` is given)"
                return "certificate", f"its certificate is not signed by {whose}: {fault.verify_message}"
            fix = ": renew it, or set the clock of this host" if fault.verify_code in _TIMES else ""
            return "certificate", f"its certificate is not accepted: {fault.verify_message}{fix}"
        if isinstance(fault, ValueError) and not isinstance(fault, OSError):
            return "name", f"{name!r} is no server name ({fault}): {_GIVE_NAME}"
        if _is_refusal(fault, reason) and not _is_server_name(name):
            return "name", (
                f"the broker ended the TLS handshake ({plain or 'closed'}), as brokers in Java do for {name!r}: a "
                f"server name has letters, digits and hyphens alone; {_GIVE_NAME}"
            )
        if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
            return "plaintext", "that port does not use TLS: remove [cluster.upstream_tls], or give the TLS port"
        if "VERSION" in reason or "PROTOCOL" in reason or "HANDSHAKE_FAILURE" in reason or "CIPHER" in reason:
            return "version", f"no version or cipher of TLS in common ({plain}), or it requires a certificate of kproxy"
        if "ALERT" in reason:
            return "rejected", f"the broker rejected the TLS handshake ({plain}): {of_alert(reason)}"
        if isinstance(fault, EOFError | ConnectionError):
            return "closed", (
                "the broker closed the connection in the TLS handshake: a plaintext port does so, and one that wants "
                "another certificate"
            )
        return "other", f"the TLS handshake failed: {plain or fault}"


def of_alert(reason: str) -> str:
    """Return the meaning of a broker's TLS alert for kproxy's certificate, and the fix.

    reason: OpenSSL's, in upper case.
    """
    if "EXPIRED" in reason:
        return "kproxy's own certificate (`certificate` in [cluster.upstream_tls]) has expired: give it a new one"
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
        return (
            "it does not accept kproxy's certificate: put the CA of `certificate` in [cluster.upstream_tls] into the "
            "broker's truststore"
        )
    return "does it want a certificate of kproxy? Give `certificate` and `key` in [cluster.upstream_tls]"


def _is_refusal(fault: Exception, reason: str) -> bool:
    """Whether the broker ended the handshake for another reason than version, cipher or certificate."""
    about = ("VERSION", "CIPHER", "CERTIFICATE", "UNKNOWN_CA", "WRONG", "HTTP_REQUEST")
    return isinstance(fault, EOFError) or ("ALERT" in reason and not any(word in reason for word in about))


def _is_server_name(name: str) -> bool:
    """Whether Java's SNIHostName accepts a name (RFC 6066, 3; STD 3): no underscores. Addresses are not sent."""
    return numeric(name) is not None or (len(name) < 254 and all(map(_LABEL.fullmatch, name.split("."))))
