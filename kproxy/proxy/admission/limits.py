"""Limits on clients: how many at once and how many a second, per listener and per address.

`ConnectionLimits` counts the connections that it admitted, and names the limit that a client exceeds. The rates are
token buckets with a capacity of one second. It remembers the addresses with open connections, and those whose bucket is
not full yet; at most MAX_ADDRESSES of the latter, the rest share one bucket. A flood from many addresses is therefore
limited like one address, and memory stays bounded. Refuses to know sockets and clocks: the caller passes monotonic
seconds.
"""

from kproxy.proxy.config.addresses import network_of
from kproxy.proxy.config.limits import Limits, is_in

MAX_ADDRESSES = 16_384

# The limits that keep a client out, by setting, and the unit of each.
CONNECTIONS = "max_connections"
CONNECTIONS_PER_ADDRESS = "max_connections_per_address"
RATE = "max_connection_rate"
RATE_PER_ADDRESS = "max_connection_rate_per_address"
_WHAT = {
    CONNECTIONS: "connections are open",
    CONNECTIONS_PER_ADDRESS: "connections are open from this address",
    RATE: "new connections a second",
    RATE_PER_ADDRESS: "new connections a second from this address",
}


class Bucket:
    """A token bucket, stored as the time when it will be full. Bursts up to one second's worth pass at once."""

    __slots__ = ("_burst_s", "_cost_s", "full_at")

    def __init__(self, rate: float) -> None:
        self._cost_s = 1 / rate
        self._burst_s = max(1.0, self._cost_s)  # at least one connection
        self.full_at = float("-inf")

    def take(self, now: float) -> bool:
        """Take one token, if there is one; returns whether there was."""
        full_at = max(self.full_at, now) + self._cost_s
        if full_at - now > self._burst_s + 1e-9:
            return False
        self.full_at = full_at
        return True


class ConnectionLimits:
    """The counts of one listener, and of the addresses that connect to it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections = 0
        self._open: dict[str, int] = {}  # by address, if limited
        self._bucket = Bucket(limits.max_connection_rate) if limits.max_connection_rate else None
        self._buckets: dict[str, Bucket] = {}
        self._others: Bucket | None = None
        self._swept_at = float("-inf")

    @property
    def limits_addresses(self) -> bool:
        """Whether a client's address is needed."""
        return bool(self.limits.max_connections_per_address or self.limits.max_connection_rate_per_address)

    def enter(self, now: float) -> str | None:
        """Count a new connection of this listener, unless that exceeds a limit; returns this limit."""
        limits = self.limits
        if limits.max_connections is not None and self.connections >= limits.max_connections:
            return CONNECTIONS
        if self._bucket is not None and not self._bucket.take(now):
            return RATE
        self.connections += 1
        return None

    def leave(self) -> None:
        """Uncount an ended connection."""
        self.connections -= 1

    def enter_from(self, host: str, now: float) -> str | None:
        """Count a new connection from an address, unless that exceeds a limit; returns this limit."""
        limits = self.limits
        if self._is_unlimited(host):
            return None
        host = network_of(host, limits.ipv6_prefix)
        most, rate = limits.max_connections_per_address, limits.max_connection_rate_per_address
        if most is not None and self._open.get(host, 0) >= most:
            return CONNECTIONS_PER_ADDRESS
        if rate is not None and not self._bucket_of(host, rate, now).take(now):
            return RATE_PER_ADDRESS
        if most is not None:
            self._open[host] = self._open.get(host, 0) + 1
        return None

    def leave_from(self, host: str) -> None:
        """Uncount an ended connection from an address."""
        if self._is_unlimited(host):
            return  # other addresses of its network may be counted
        host = network_of(host, self.limits.ipv6_prefix)
        count = self._open.get(host, 0) - 1
        if count > 0:
            self._open[host] = count
        else:
            self._open.pop(host, None)

    def _is_unlimited(self, host: str) -> bool:
        return bool(self.limits.unlimited_addresses) and is_in(host, self.limits.unlimited_addresses)

    def why(self, limit: str) -> str:
        """Return the log text about a client beyond that limit, with the fix."""
        value = getattr(self.limits, limit)
        hint = ""
        if "address" in limit:
            hint = "; addresses that many clients share belong in unlimited_addresses"
            if self.limits.ipv6_prefix < 128:
                hint += f", and addresses of one IPv6 /{self.limits.ipv6_prefix} count as one (ipv6_prefix)"
        return f"{value:g} {_WHAT[limit]}, the limit: raise {limit} in [cluster.limits], or see who connects{hint}"

    def _bucket_of(self, host: str, rate: float, now: float) -> Bucket:
        bucket = self._buckets.get(host)
        if bucket is not None:
            return bucket
        if len(self._buckets) >= MAX_ADDRESSES and now - self._swept_at >= 1.0:
            self._swept_at = now  # a full bucket can be dropped
            self._buckets = {known: bucket for known, bucket in self._buckets.items() if bucket.full_at > now}
        if len(self._buckets) >= MAX_ADDRESSES:
            if self._others is None:
                self._others = Bucket(rate)
            return self._others
        bucket = self._buckets[host] = Bucket(rate)
        return bucket
