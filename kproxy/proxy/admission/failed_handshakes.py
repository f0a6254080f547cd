"""Warnings about clients whose handshake fails: the first of each kind at once, then one line a minute.

Clients that retry without end, or a scanner, cannot fill the log: the line of a minute has how many failed, by kind and
by address. A minute without a failure ends the series with one more line, and the next failure is a first one again.
Bounded: kinds are few (`metrics/counters/tls.py`); MAX_ADDRESSES addresses or networks are counted, others together.
Refuses to know TLS.
"""

import asyncio
import logging
from collections import Counter

from kproxy.errors import RefusedClient
from kproxy.proxy.config.addresses import Address, network_of

INTERVAL_S = 60.0
MAX_ADDRESSES = 64
NAMED = 5  # addresses in a line

log = logging.getLogger("kproxy.cluster")


def is_failed_handshake(fault: RefusedClient) -> bool:
    """Whether a client was refused because its TLS failed, or its handshake took too long."""
    return fault.cause in ("tls", "handshake_timeout") and not fault.said_nothing


class FailedHandshakes:
    """The failed handshakes of one cluster's clients. admitted: how many clients got past theirs; its owner counts."""

    def __init__(self, cluster: str) -> None:
        self.admitted = 0
        self._cluster = cluster
        self._admitted_before = 0  # the current minute
        self._known: set[str] = set()  # kinds of this series
        self._kinds: Counter[str] = Counter()  # since the last line, as are the addresses
        self._addresses: Counter[str] = Counter()  # "": beyond MAX_ADDRESSES
        self._series = 0  # failures of this series
        self._timer: asyncio.TimerHandle | None = None

    def add(self, client: Address, fault: RefusedClient) -> None:
        """Count a failed handshake; log it if it is the first of its kind."""
        self._series += 1
        if self._timer is None:
            self._start()
        if fault.kind not in self._known:
            self._known.add(fault.kind)
            log.warning("refused=%s cluster=%s client=%s: %s", fault.cause, self._cluster, client, fault)
            return
        self._kinds[fault.kind] += 1
        host = network_of(client.host)
        self._addresses[host if host in self._addresses or len(self._addresses) < MAX_ADDRESSES else ""] += 1

    def stop(self) -> None:
        """Log what was counted since the last line, and no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._kinds:
                self._report()

    def _start(self) -> None:
        self._admitted_before = self.admitted
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._minute)

    def _minute(self) -> None:
        self._timer = None
        if self._kinds:
            self._report()
            self._start()
            return
        log.info(
            "cluster=%s no handshake of a client has failed for %d s, and %d clients were admitted; before, %d failed",
            self._cluster,
            INTERVAL_S,
            self.admitted - self._admitted_before,
            self._series,
        )
        self._known.clear()
        self._series = 0

    def _report(self) -> None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        beyond = self._addresses.pop("", 0)
        named = self._addresses.most_common(NAMED)
        hosts = [f"{host} ({count})" for host, count in named]
        others = len(self._addresses) - len(named)
        rest = self._addresses.total() + beyond - sum(count for _, count in named)
        if rest:
            hosts.append(f"{others}{' or more' if beyond else ''} other addresses ({rest})")
        failed = self._kinds.total()
        log.warning(
            "cluster=%s %d more handshakes of clients failed within %d s: %s; from %s",
            self._cluster,
            failed,
            INTERVAL_S,
            kinds,
            ", ".join(hosts),
            extra={"left_out": failed},
        )
        self._kinds.clear()
        self._addresses.clear()
