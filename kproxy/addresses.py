"""Numeric addresses in their one form, as tables, metrics, limits and policies of all rooms name a host."""

import ipaddress
from functools import lru_cache

_MAPPED = "::ffff:"  # begins an IPv4 address that is mapped into IPv6 (RFC 4291), as sockets of both families name it


@lru_cache(maxsize=4096)
def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A numeric address in its one form: IPv4 mapped into IPv6 becomes IPv4, a scope is left out; None: a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def unmapped(host: str) -> str:
    """An address as the kernel writes it, IPv4 mapped into IPv6 as IPv4; a scope stays."""
    return host.removeprefix(_MAPPED) if "." in host else host
