"""Audit lines for failed logins: SASL logins at kproxy, and client certificates that it does not accept.

Guessing cannot fill the disk: one line a second per address, RATE a second per cluster in a process; the next line has
the number left out (`kproxy_authentications_total` and `kproxy_tls_handshakes_total` count all of them). The claimed
name is cut to MAX_NAME characters and escaped as JSON. Bounded: MAX_ADDRESSES are remembered. Refuses to know
mechanisms and sockets, and never has a secret.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

from kproxy.errors import RefusedClient
from kproxy.proxy.admission.limits import Bucket
from kproxy.proxy.config.addresses import Address, network_of
from kproxy.proxy.filters.policy.audit import MAX_NAME, Audit, timestamp

RATE = 10  # lines a second
MAX_ADDRESSES = 64
MAX_ERROR = 512  # characters
CERTIFICATE = "certificate"  # the mechanism of a login by a client certificate
_PER_ADDRESS_S = 1.0
_OF_CERTIFICATES = ("certificate", "no_certificate", "principal")


def is_failed_login(fault: RefusedClient) -> bool:
    """Whether a client was refused because it did not prove its identity."""
    if fault.cause == "tls":
        return fault.kind in _OF_CERTIFICATES
    return fault.cause == "authentication" and fault.kind != "no_room"


class FailedLogins:
    """The failed logins of one cluster. now_ns(): wall clock; clock(): monotonic seconds."""

    def __init__(
        self, cluster: str, audit: Audit, now_ns: Callable[[], int], clock: Callable[[], float] = monotonic
    ) -> None:
        self._cluster = cluster
        self._audit = audit
        self._now_ns = now_ns
        self._clock = clock
        self._bucket = Bucket(RATE)
        self._last: dict[str, float] = {}  # address -> time of its last line
        self._left_out = 0

    def add(self, client: Address, mechanism: str, claimed: str, reason: str, error: str, *, renewal: bool) -> None:
        """Record a failed login. mechanism, claimed: "" if the client has named none. reason: one of a few labels."""
        now, host = self._clock(), network_of(client.host)
        if now - self._last.get(host, float("-inf")) < _PER_ADDRESS_S or not self._bucket.take(now):
            self._left_out += 1
            return
        if len(self._last) >= MAX_ADDRESSES:
            self._last = {host: at for host, at in self._last.items() if now - at < _PER_ADDRESS_S}
        self._last[host] = now
        line: dict[str, Any] = {
            "time": timestamp(self._now_ns()),
            "cluster": self._cluster,
            "client": str(client),
            "login": "renewal" if renewal else "first",
            "mechanism": mechanism[:MAX_NAME] or None,
            "claimed": f"User:{claimed[:MAX_NAME]}" if claimed else None,
            "decision": "deny",
            "reason": reason,
            "error": error[:MAX_ERROR],
        }
        if self._left_out:
            line["left_out"] = self._left_out
            self._left_out = 0
        self._audit.add(line)
