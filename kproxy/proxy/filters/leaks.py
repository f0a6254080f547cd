"""Finds addresses of brokers in answers to clients: rewriting must have replaced all of them.

The search matches a host in Kafka's encoding, with its length before it (int16, or a varint of length plus one),
and its port after it as int32. Text that mentions an address, like advertised.listeners in DescribeConfigs, is no leak.
Addresses in other encodings are not found. Known addresses are the bootstrap addresses, addresses that brokers
advertised, MAX_KNOWN at most, and the last MAX_MOVED former addresses of brokers, since a broker may still name them.
Addresses that clients receive on purpose are excluded.

A search reads an answer's first SEARCHED_BYTES: a large Metadata answer begins with the brokers. It covers all known
addresses. Up to FEW distinct hosts, or ports, cost a pass of bytes.find each. More of them cost one pass of a pattern
of all ports, and for each match a look-up per distinct length of a host.
"""

import logging
import re
from collections.abc import Callable, Iterable
from struct import Struct

from kproxy.metrics.counters.cells import ClusterCells
from kproxy.protocol.primitives import write_uvarint
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster

MAX_KNOWN = 8192
MAX_MOVED = 1024
FEW = 8
SEARCHED_BYTES = 128 * 1024

_INT16 = Struct(">H")
_INT32 = Struct(">i")

log = logging.getLogger("kproxy.cluster")


class KnownAddresses:
    """The addresses of one cluster's brokers, and the search for them.

    advertised(node id, host): the address that clients receive for a broker; if that is its own, it is no leak.
    """

    def __init__(self, bootstrap: Iterable[Address], advertised: Callable[[int, str], Address]) -> None:
        self._advertised = advertised
        self._bootstrap = tuple(bootstrap)
        self.brokers: dict[int, Address] = {}  # by node id; `learn` changes it
        self._hosts: dict[bytes, set[bytes]] = {}  # host -> its ports, as on the wire
        self._ports: dict[bytes, set[bytes]] = {}  # port -> its hosts
        self._moved: dict[Address, None] = {}  # former addresses of brokers, the oldest first
        self._lengths: tuple[int, ...] = ()  # distinct lengths of hosts in bytes
        self._any_port: re.Pattern[bytes] | None = None  # set if there are more than FEW hosts and ports
        self._is_stale = True

    def learn(self, node_id: int, address: Address) -> None:
        """Record the address that a broker advertises."""
        if self.brokers.get(node_id) != address and (node_id in self.brokers or len(self.brokers) < MAX_KNOWN):
            before = self.brokers.get(node_id)
            if before is not None:
                self._leave(before)
            self.brokers[node_id] = address
            self._is_stale = True

    def forget(self, node_id: int) -> None:
        """Treat the address of a broker that has gone for good as a former address."""
        before = self.brokers.pop(node_id, None)
        if before is not None:
            self._leave(before)

    def _leave(self, before: Address) -> None:
        self._moved.pop(before, None)
        self._moved[before] = None
        if len(self._moved) > MAX_MOVED:
            del self._moved[next(iter(self._moved))]
        self._is_stale = True

    def find(self, answer: bytes | memoryview) -> Address | None:
        """Return a known address that the answer contains, or None."""
        if self._is_stale:
            self._index()
        data = bytes(answer[:SEARCHED_BYTES])
        if self._any_port is not None:
            return self._find_among_many(data, self._any_port)
        by_host = len(self._hosts) <= len(self._ports)
        for needle in self._hosts if by_host else self._ports:
            at = data.find(needle)
            while at >= 0:
                found = self._host_at(data, at, needle) if by_host else self._before_port(data, at, needle)
                if found is not None:
                    return found
                at = data.find(needle, at + 1)
        return None

    def _find_among_many(self, data: bytes, any_port: re.Pattern[bytes]) -> Address | None:
        at = -1
        while (match := any_port.search(data, at + 1)) is not None:
            at = match.start()
            for length in self._lengths:
                if length <= at and data[at - length : at] in self._hosts:
                    found = self._host_at(data, at - length, data[at - length : at])
                    if found is not None:
                        return found
        return None

    def _host_at(self, data: bytes, at: int, host: bytes) -> Address | None:
        end = at + len(host)
        port = data[end : end + 4]
        if port in self._hosts[host] and any(data.endswith(prefix, 0, at) for prefix in _prefixes(host)):
            return Address(host.decode(), _INT32.unpack(port)[0])
        return None

    def _before_port(self, data: bytes, at: int, port: bytes) -> Address | None:
        for host in self._ports[port]:
            if data.endswith(host, 0, at):
                return self._host_at(data, at - len(host), host)
        return None

    def _index(self) -> None:
        self._is_stale = False
        self._hosts.clear()
        self._ports.clear()
        given = {self._advertised(node_id, address.host) for node_id, address in self.brokers.items()}
        for address in (*self._bootstrap, *self.brokers.values(), *self._moved):
            if not address.host or not -(1 << 31) <= address.port < 1 << 31 or address in given:
                continue
            host, port = address.host.encode(errors="replace"), _INT32.pack(address.port)
            self._hosts.setdefault(host, set()).add(port)
            self._ports.setdefault(port, set()).add(host)
        self._lengths = tuple(sorted(set(map(len, self._hosts))))
        self._any_port = _pattern(self._ports) if min(len(self._hosts), len(self._ports)) > FEW else None


class Leaks:
    """Counts the answers of one cluster that contain a broker's own address, and logs each API's first."""

    def __init__(self, cluster: Cluster, known: KnownAddresses, cells: ClusterCells) -> None:
        self._cluster = cluster.name
        self._closes = cluster.on_address_leak == "close"
        self._known = known
        self._cells = cells
        self._logged: set[str] = set()  # labels of APIs

    def found(self, api: str, version: int, answer: bytes | memoryview) -> str:
        """Count an answer that contains a broker's own address; returns why it must not leave, or an empty text."""
        address = self._known.find(answer)
        if address is None:
            return ""
        label = self._cells.leaked(api)
        text = f"the {api} v{version} answer names {address}, which would lead clients around kproxy"
        if label not in self._logged:
            self._logged.add(label)
            log.error(
                "leak cluster=%s: %s. It is %s (on_address_leak); this is logged once per API. Please report it",
                self._cluster,
                text,
                "not forwarded, and the connection is closed" if self._closes else "forwarded",
            )
        return text if self._closes else ""


def _pattern(ports: Iterable[bytes]) -> re.Pattern[bytes]:
    """Return a pattern of ports, encoded as on the wire; ports that differ only in the last byte share a branch."""
    lasts: dict[bytes, list[bytes]] = {}
    for port in ports:
        lasts.setdefault(port[:3], []).append(b"\\x%02x" % port[3])
    return re.compile(
        b"|".join(re.escape(head) + b"[" + b"".join(last) + b"]" for head, last in lasts.items()), re.DOTALL
    )


def _prefixes(host: bytes) -> tuple[bytes, bytes]:
    """Return the length prefix of a string, as int16 and as the varint of compact strings."""
    return _INT16.pack(min(len(host), 0xFFFF)), write_uvarint(len(host) + 1)
