"""The processes that relay the clients of a kproxy: only the server's own (`Alone`), or workers (`workers/parent.py`).

Duty: everything that the server needs from all of them: counters, operations, open connections, the drain. Refuses to
know ports, the admin API and how settings change.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kproxy.metrics import Metrics
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.changing.changes import Changes
from kproxy.proxy.process.relays import Relays
from kproxy.proxy.sockets import descriptors
from kproxy.wire.connection import Sink

if TYPE_CHECKING:
    from kproxy.proxy.process.knowledge.feed_link import FeedLink

Render = Callable[[str], tuple[bytes, str]]  # (Accept header) -> (scrape, content type); called on a thread


class Owner(Protocol):
    """The server's attributes that a team uses."""

    config: Config
    metrics: Metrics
    sinks: Sequence[Sink]
    link: "FeedLink | None"


class Team(Protocol):
    """The relaying processes. A server first calls the methods in this order."""

    def relays(self, server: Owner, shares: descriptors.Shares) -> Relays:
        """Make the relays of the server's own process."""

    def keep(self, *, beside: bool) -> None:
        """Start the recorder and the flight recorder, if set; beside: another kproxy records into the same folder.

        Raises ConfigError for a folder that cannot be used.
        """

    async def start(self) -> None:
        """Start the other processes. Raises KproxyError."""

    def give_streams(self, link: "FeedLink") -> None:
        """Send relays' copies to the new decoding process, which has been restarted."""

    def not_ready(self) -> Sequence[str]:
        """Return the reasons why the team accepts no clients now."""

    async def lost(self) -> str:
        """Wait until no process relays and none can be started; returns the reason."""

    def reconfigured(self, new: Config, differing: Changes) -> None:
        """Apply other settings of the server."""

    async def counted(self, *, with_lags: bool = True) -> Metrics:
        """Return the current cells of all processes."""

    def renders(self) -> Render:
        """Return the function that renders a scrape of all processes."""

    async def operate(self, operation: str, *arguments: Any) -> list[Any]:
        """Run one of `operating.OPERATIONS` in each process; returns each result."""

    def connection_rows(self, after: int, limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield open connections of all processes, as `Relays.connection_rows` does."""

    async def drain(self, at_once: asyncio.Event) -> tuple[int, int]:
        """Let connections finish, as `Relays.drain` does."""


class Alone:
    """The server's own process relays all connections."""

    _metrics: Metrics
    _relays: Relays

    def relays(self, server: Owner, shares: descriptors.Shares) -> Relays:
        self._metrics = server.metrics
        self._relays = Relays(server.config, server.metrics, shares, server.sinks)
        return self._relays

    def keep(self, *, beside: bool) -> None:
        self._relays.record(beside=beside)
        self._relays.keep_flight()

    async def start(self) -> None:
        """There is no other process."""

    def give_streams(self, link: "FeedLink") -> None:
        self._relays.worker.feed.use(link.stream())

    def not_ready(self) -> Sequence[str]:
        return ()

    async def lost(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    def reconfigured(self, new: Config, differing: Changes) -> None:
        """Do nothing: the server has reconfigured the relays."""

    async def counted(self, *, with_lags: bool = True) -> Metrics:
        return self._metrics

    def renders(self) -> Render:
        from kproxy.metrics.scrape.collector import registry_of
        from kproxy.metrics.scrape.exposition import render

        registry = registry_of(self._metrics)
        return lambda accept: render(registry, accept)

    async def operate(self, operation: str, *arguments: Any) -> list[Any]:
        return [self._relays.operate(operation, *arguments)]

    async def connection_rows(self, after: int, limit: int) -> AsyncIterator[list[dict[str, Any]]]:
        for rows in self._relays.connection_rows(after, limit):
            yield rows

    async def drain(self, at_once: asyncio.Event) -> tuple[int, int]:
        return await self._relays.drain(at_once)
