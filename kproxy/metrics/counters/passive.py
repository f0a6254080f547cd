"""Counters of a passive kproxy: packets of interfaces, and findings about the capture's quality.

Bounds: the interfaces given at the start, and the kinds of `capture.quality`. Runs on the event loop's thread; a scrape
reads from another thread and copies each container in one step. Refuses to know sockets and flows.
"""

from collections.abc import Callable, Iterable, Mapping

# Causes of the end of a connection that passive capture can see.
ENDS = ("broker_closed", "broker_reset", "client_closed", "client_reset", "idle", "reused")


class InterfaceCells:
    """The counters of one interface, or of all of them together."""

    __slots__ = ("dropped", "is_up", "packets")

    def __init__(self) -> None:
        self.packets = 0  # packets that passed the filter and were not dropped
        self.dropped = 0  # packets that the kernel dropped because the ring was full
        self.is_up = True


class PassiveCells:
    """The cells of one `kproxy watch`."""

    def __init__(self, interface: str, kinds: Iterable[str]) -> None:
        """kinds: the kinds of findings of `capture.quality`."""
        self.interfaces = {interface: InterfaceCells()}
        self.duplicates = 0  # packets already seen on another interface
        self.copies: dict[str, int] = {}  # by cluster: copies of another connection, with translated addresses
        self.behind_ns = 0  # how long the last packet waited in the ring
        self.findings: Callable[[], Mapping[str, int]] = dict  # current counts by kind
        self._found = dict.fromkeys(kinds, 0)

    def found(self) -> Mapping[str, int]:
        """Return the count of each kind of finding; counts never decrease."""
        for kind, count in self.findings().items():
            if kind in self._found:
                self._found[kind] = max(self._found[kind], count)
        return self._found.copy()
