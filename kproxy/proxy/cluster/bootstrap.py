"""The order of a cluster's bootstrap addresses for dialling. Pure.

Refuses to know sockets. The caller provides the clock.
"""

from collections.abc import Callable, Sequence
from time import monotonic

from kproxy.proxy.config.addresses import Address

AVOIDED_S = 30.0  # s during which an address that failed comes last


class BootstrapAddresses:
    """Rotates the bootstrap addresses; addresses that failed in the last AVOIDED_S come last."""

    def __init__(self, addresses: Sequence[Address], clock: Callable[[], float] = monotonic) -> None:
        self._addresses = list(addresses)
        self._clock = clock
        self._failed_at: dict[Address, float] = {}
        self._turn = 0

    def failed(self, address: Address) -> None:
        self._failed_at[address] = self._clock()

    def in_order(self) -> list[Address]:
        """Return all addresses, the one to try first at the front."""
        addresses = self._addresses
        self._turn = (self._turn + 1) % len(addresses)
        since = self._clock() - AVOIDED_S
        return sorted(
            addresses[self._turn :] + addresses[: self._turn],
            key=lambda address: self._failed_at.get(address, since) > since,
        )
