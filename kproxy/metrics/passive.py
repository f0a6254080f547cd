"""What is counted of a passive kproxy: packets of interfaces, and what they do not show.

Bounded: the interfaces that were named at the start, and the kinds of `capture.quality`. Runs on the thread of the
event loop; a scrape reads from another one and copies each container in one step. Refuses to know sockets and flows.
"""

from collections.abc import Callable, Iterable, Mapping

# Why a connection ended, as it is seen from beside it.
ENDS = ("broker_closed", "broker_reset", "client_closed", "client_reset", "idle", "reused")


class InterfaceCells:
    """What is counted of one interface, or of all of them together."""

    __slots__ = ("dropped", "is_up", "packets")

    def __init__(self) -> None:
        self.packets = 0  # that passed the filter, those that were dropped left out
        self.dropped = 0  # by the kernel, since the ring was full
        self.is_up = True


class PassiveCells:
    """The cells of one `kproxy watch`."""

    def __init__(self, interface: str, kinds: Iterable[str]) -> None:
        """kinds: of findings that the capture's quality has."""
        self.interfaces = {interface: InterfaceCells()}
        self.duplicates = 0  # packets that another interface had shown already
        self.copies: dict[str, int] = {}  # by cluster: connections that are another one under other addresses
        self.behind_ns = 0  # how long the last packet had waited when it was read
        self.findings: Callable[[], Mapping[str, int]] = dict  # by kind, as they are now
        self._found = dict.fromkeys(kinds, 0)

    def found(self) -> Mapping[str, int]:
        """How often each kind was found, which only grows."""
        for kind, count in self.findings().items():
            if kind in self._found:
                self._found[kind] = max(self._found[kind], count)
        return self._found.copy()
