"""Lines of the audit for logins that fail: by SASL at kproxy, and by a client certificate that is not accepted.

Whoever guesses cannot fill the disk: one line a second for each address, RATE a second for each cluster in a process;
the next line says how many were left out (`kproxy_authentications_total` and `kproxy_tls_handshakes_total` have all of
them). What the client claims to be is cut to MAX_NAME characters and escaped as JSON. Bounded: MAX_ADDRESSES are
remembered. Refuses to know mechanisms and sockets, and never has a secret.
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
    """Whether a client was refused since it did not prove who it is."""
    if fault.cause == "tls":
        return fault.kind in _OF_CERTIFICATES
    return fault.cause == "authentication" and fault.kind != "no_room"


class FailedLogins:
    """Those of one cluster. now_ns(): the time of day; clock(): seconds that only grow."""

    def __init__(
        self, cluster: str, audit: Audit, now_ns: Callable[[], int], clock: Callable[[], float] = monotonic
    ) -> None:
        self._cluster = cluster
        self._audit = audit
        self._now_ns = now_ns
        self._clock = clock
        self._bucket = Bucket(RATE)
        self._last: dict[str, float] = {}  # by address: when its last line was written
        self._left_out = 0

    def add(self, client: Address, mechanism: str, claimed: str, reason: str, error: str, *, renewal: bool) -> None:
        """A login failed. mechanism, claimed: empty where the client has named none. reason: a label, one of few."""
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
