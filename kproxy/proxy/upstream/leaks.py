"""Finds addresses of brokers in answers that are about to leave: rewriting must have replaced all of them.

Pure. What is looked for is a host as Kafka writes it, with its length before it (int16, or a varint of one more), and
its port behind it as int32: so text that mentions an address, like advertised.listeners in DescribeConfigs, is no leak.
Addresses in other forms are not found. Known are the bootstrap addresses and those that brokers gave for themselves,
MAX_KNOWN at most; left out are those that clients are given on purpose.

A search costs one pass over an answer's first SEARCHED_BYTES per distinct host or per distinct port, whichever are
fewer, MAX_PASSES at most: in large Metadata the brokers come first.
Refuses to know APIs, and what is done about a leak.
"""

from collections.abc import Callable, Iterable
from struct import Struct

from kproxy.protocol.primitives import write_uvarint
from kproxy.proxy.config import Address

MAX_KNOWN = 8192
MAX_PASSES = 64
SEARCHED_BYTES = 128 * 1024

_INT16 = Struct(">H")
_INT32 = Struct(">i")


class KnownAddresses:
    """The addresses of one cluster's brokers, and the search for them.

    advertised(node id, host): the address that clients are given for a broker; if that is its own, it is no leak.
    """

    def __init__(self, bootstrap: Iterable[Address], advertised: Callable[[int, str], Address]) -> None:
        self._advertised = advertised
        self._bootstrap = tuple(bootstrap)
        self._brokers: dict[int, Address] = {}  # by node id
        self._hosts: dict[bytes, set[bytes]] = {}  # host -> its ports, as on the wire
        self._ports: dict[bytes, set[bytes]] = {}  # port -> its hosts
        self._is_stale = True

    def learn(self, node_id: int, address: Address) -> None:
        """Take in where a broker says it is."""
        if self._brokers.get(node_id) != address and (node_id in self._brokers or len(self._brokers) < MAX_KNOWN):
            self._brokers[node_id] = address
            self._is_stale = True

    def find(self, answer: bytes | memoryview) -> Address | None:
        """One of the known addresses that the answer has in it, or None."""
        if self._is_stale:
            self._index()
        data = bytes(answer[:SEARCHED_BYTES])
        by_host = len(self._hosts) <= len(self._ports)
        for needle in list(self._hosts if by_host else self._ports)[:MAX_PASSES]:
            at = data.find(needle)
            while at >= 0:
                found = self._host_at(data, at, needle) if by_host else self._before_port(data, at, needle)
                if found is not None:
                    return found
                at = data.find(needle, at + 1)
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
        given = {self._advertised(node_id, address.host) for node_id, address in self._brokers.items()}
        for address in (*self._bootstrap, *self._brokers.values()):
            if not address.host or not -(1 << 31) <= address.port < 1 << 31 or address in given:
                continue
            host, port = address.host.encode(errors="replace"), _INT32.pack(address.port)
            self._hosts.setdefault(host, set()).add(port)
            self._ports.setdefault(port, set()).add(host)


def _prefixes(host: bytes) -> tuple[bytes, bytes]:
    """The length before a string, as int16 and as the varint of compact strings."""
    return _INT16.pack(min(len(host), 0xFFFF)), write_uvarint(len(host) + 1)
