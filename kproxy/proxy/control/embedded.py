"""A proxy inside a program: `kproxy.Proxy`.

Duty: settings as keyword arguments, and the server's life as an `async with`. It installs no signal handler and leaves
logging to the program. Refuses to know what the settings mean: `kproxy.proxy.config.load` reads and checks them.
"""

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

from kproxy.errors import ConfigError, UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import CLUSTER_SETTINGS, PROCESS_SETTINGS
from kproxy.proxy.control.flight import FINDINGS
from kproxy.proxy.control.server import Server

_POLL_S = 0.02
_HOST = "127.0.0.1"
_PORTS_IN_A_ROW = 16  # bootstrap and the brokers behind it, as far as a test or a notebook has them
_TRIES = 100


class Proxy:
    """A proxy before one cluster, for as long as its `async with` lasts.

        async with kproxy.Proxy(listen="127.0.0.1:19092", bootstrap="kafka-1:9092") as proxy:
            print(proxy.address)

    The settings are those of `kproxy run`, by the names of the configuration file (`broker_port_base=...`); values are
    text or of the setting's own type. Entering binds the ports, asks the cluster for its brokers and returns when
    clients can be served; leaving finishes the requests under way, for `drain_timeout_s` at most.

    Without `listen` it takes a free port of this machine, with free ports for the brokers behind it.

    Raises ConfigError for settings that cannot be, and on entering, for an address that cannot be bound; UpstreamError
    where no broker has answered within `ready_timeout_s` seconds.
    """

    def __init__(
        self, *, bootstrap: str, listen: str | None = None, ready_timeout_s: float = 30.0, **settings: Any
    ) -> None:
        known = {*CLUSTER_SETTINGS, *PROCESS_SETTINGS}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError([(name, f"no such setting; there are: {', '.join(sorted(known))}") for name in unknown])
        listen = listen or f"{_HOST}:{_free_port()}"
        found = load(flags={"listen": listen, "bootstrap": bootstrap, **settings})
        if found.workers > 1:
            raise ConfigError([("workers", "a proxy inside a program is one process: leave it out, or use kproxy run")])
        if found.flight is not None and FINDINGS in found.flight.triggers:
            raise ConfigError([("flight.triggers", "nobody looks for findings inside a program: use kproxy run")])
        self._server = Server(found)
        self._ready_timeout_s = ready_timeout_s

    @property
    def address(self) -> Address:
        """(host, port) where clients bootstrap; `str` of it is HOST:PORT. Only inside the `async with`."""
        (address,) = self._server.addresses.values()
        return address

    @property
    def admin_address(self) -> Address | None:
        """(host, port) of /metrics, /health and /ready; None without the setting `admin`."""
        return self._server.admin_address

    async def __aenter__(self) -> "Proxy":
        try:
            await self._server.start()
            async with asyncio.timeout(self._ready_timeout_s):
                while self._server.not_ready():  # noqa: ASYNC110 (readiness is polled by everybody who asks)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            reasons = "; ".join(self._server.not_ready())
            await self._server.stop()
            raise UpstreamError(f"not ready after {self._ready_timeout_s:g} s: {reasons}") from None
        except BaseException:
            await self._server.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


def _free_port() -> int:
    """A free port that has free ones behind it: port N + 1 + id stands for a broker, and the system knows only of N."""
    port = 0
    for _ in range(_TRIES):
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind((_HOST, 0))
            port = first.getsockname()[1]
            try:
                for further in range(port + 1, port + _PORTS_IN_A_ROW):
                    stack.enter_context(socket.socket()).bind((_HOST, further))
            except (OSError, OverflowError):
                continue
        break
    return port
