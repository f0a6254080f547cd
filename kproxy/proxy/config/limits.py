"""Settings of the gate: `[cluster.limits]`, and the addresses whose PROXY headers are trusted.

Refuses to count connections (`admission/limits.py`).
"""

import ipaddress
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kproxy.addresses import numeric
from kproxy.proxy.config.model import Frozen

HANDSHAKE_TIMEOUT_S = 10.0
AGE_JITTER = 0.1  # connections opened at the same time end within a tenth of `max_age_s`, not all at once

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def network(value: Any) -> Network:
    """Return the network that a text means; an IPv4-mapped IPv6 network becomes IPv4, as do addresses of clients."""
    try:
        found = value if isinstance(value, Network) else ipaddress.ip_network(str(value).strip())
        mapped = found.network_address.ipv4_mapped if isinstance(found, ipaddress.IPv6Network) else None
        if mapped is not None and found.prefixlen >= _MAPPED:
            return ipaddress.IPv4Network((int(mapped), found.prefixlen - _MAPPED))
        return found
    except ValueError:
        text = f"{value!r} is neither an address nor a network of them, like 10.0.0.0/8"
        with suppress(ValueError):
            text += f"; did you mean {ipaddress.ip_network(str(value).strip(), strict=False)}?"
        raise ValueError(text) from None


_MAPPED = 96  # bits before the IPv4 address in an IPv4-mapped IPv6 address

Networks = tuple[Annotated[Network, BeforeValidator(network)], ...]

_Count = Annotated[int, Field(ge=1)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Prefix = Annotated[int, Field(ge=16, le=128)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(Frozen):
    """`[cluster.limits]`: limits for the clients of one listener. Without a value there is no such limit."""

    max_connections: _Count | None = None  # open connections of this cluster's ports together
    max_connections_per_address: _Count | None = None  # open connections of one client address
    max_connection_rate: _Rate | None = None  # new connections per second; a burst of as many is allowed
    max_connection_rate_per_address: _Rate | None = None  # new connections per second of one client address
    unlimited_addresses: Networks = ()  # balancers and NAT gateways, exempt from the limits per address
    # bits of the IPv6 prefix that counts as one address in the limits per address; 128: each address alone
    ipv6_prefix: _Prefix = 64
    handshake_timeout_s: _Seconds = HANDSHAKE_TIMEOUT_S  # seconds for a PROXY header, TLS and a login together
    # seconds without a request, and without an answer to wait for, after which a connection is closed
    idle_timeout_s: _Seconds | None = None
    # seconds after which a connection is closed, between two requests; its client reconnects
    max_age_s: _Seconds | None = None
    max_requests_in_flight: _Count | None = None  # of one connection; further requests wait unread

    @property
    def ends_some(self) -> bool:
        """Whether some limit ends open connections."""
        return self.idle_timeout_s is not None or self.max_age_s is not None

    @property
    def admits_some(self) -> bool:
        """Whether some limit applies to new connections."""
        names = ("max_connections", "max_connections_per_address", "max_connection_rate")
        return any(getattr(self, name) is not None for name in (*names, "max_connection_rate_per_address"))


def is_in(host: str, networks: Networks) -> bool:
    """Whether a numeric address is in one of these networks; False for a host name."""
    address = numeric(host)
    return address is not None and any(
        address.version == network.version and address in network for network in networks
    )
