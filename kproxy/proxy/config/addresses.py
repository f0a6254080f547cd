"""Addresses as users write them, HOST:PORT, and their properties without a resolver. Refuses to resolve names."""

import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple

from kproxy.addresses import numeric

MAX_PORT = 65535
_IPV6_BITS = 128
_6TO4_BITS = 48  # RFC 3056: one IPv4 address has a /48, and so 2^16 networks
# IPv4 addresses behind a translator (RFC 6052, RFC 8215, RFC 7915): one /64 of these can contain all IPv4 addresses.
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96")))
WILDCARDS = frozenset(("", "0.0.0.0", "::"))


class Address(NamedTuple):
    """A host and a port; its `str` is HOST:PORT, `[::1]:9092` for IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@lru_cache(maxsize=4096)
def network_of(host: str, ipv6_prefix: int = 64) -> str:
    """Return the network that identifies a client in limits per address: a host with IPv6 usually has 2^64 addresses.

    Each IPv4 address, translated or not, counts alone, and so does each link-local address, whose network contains all
    machines of the link. Tunnels give one IPv4 address many IPv6 networks: a 6to4 address (2002::/16) counts as its
    /48. A Teredo address (2001::/32, RFC 4380) counts as the client's IPv4 address, since its network is that of the
    server that the client chose.
    """
    address = numeric(host) if ":" in host else None
    if not isinstance(address, ipaddress.IPv6Address) or address.is_link_local or ipv6_prefix >= _IPV6_BITS:
        return host
    if any(address in network for network in _TRANSLATED):
        return host
    if address.teredo is not None:
        _, client = address.teredo
        return str(client)
    if address.sixtofour is not None:
        ipv6_prefix = min(ipv6_prefix, _6TO4_BITS)
    return f"{ipaddress.IPv6Address(int(address) >> (spare := _IPV6_BITS - ipv6_prefix) << spare)}/{ipv6_prefix}"


def parse_address(text: str, *, lowest_port: int = 1) -> Address:
    """Return the address that HOST:PORT means; port 0 (any free port) only with `lowest_port` 0. Raises ValueError."""
    if "@" in text:  # the text before it may be a password
        raise ValueError(f"what stands before {text[text.rfind('@') :]!r} is too much: HOST:PORT takes no user")
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]{}]*)):([0-9]{1,5})", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not HOST:PORT (IPv6: [ADDRESS]:PORT)")
    port = int(match[3])
    if not lowest_port <= port <= MAX_PORT:
        raise ValueError(f"port {port} of {text!r} is not between {lowest_port} and {MAX_PORT}")
    return Address(match[1] or match[2], port)


def is_wildcard(host: str) -> bool:
    """Whether a host means all addresses of a machine, in any spelling."""
    address = numeric(host)
    return host in WILDCARDS or (address is not None and address.is_unspecified)


def leads_to(host: str, listen: str) -> bool:
    """Whether a connection to a host certainly arrives at that listening address; compares texts, resolves nothing."""
    target, own = numeric("127.0.0.1" if host == "localhost" else host), numeric(listen)
    if target is None or own is None:
        return host == listen or (listen == "" and target is not None and target.is_loopback)
    return target == own or (own.is_unspecified and target.is_loopback and own.version == target.version)
