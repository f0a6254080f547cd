"""A proxy inside a program: `kproxy.Proxy`.

Duty: settings as keyword arguments, and the server's lifetime as an `async with`. It installs no signal handler and
leaves logging to the program. Refuses to know what the settings mean: `kproxy.proxy.config.load` reads and checks them.
"""

import asyncio
import difflib
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kproxy.errors import ConfigError, KproxyError, UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.filters.flight import FINDINGS
from kproxy.proxy.process.server import Server

_POLL_S = 0.02
_HOST = "127.0.0.1"
_PORTS_IN_A_ROW = 16  # the bootstrap port and up to 15 broker ports: enough for a test or a notebook
_TRIES = 100


class Proxy:
    """A proxy in front of one cluster, for as long as its `async with` lasts.

        async with kproxy.Proxy(listen="127.0.0.1:19092", bootstrap="kafka-1:9092") as proxy:
            print(proxy.address)

    The settings are those of the configuration file, of one `[[cluster]]` and of the process, under the same names
    (`broker_port_base=20000`). A table is a dict (`tls={"certificate": "tls.crt"}`), an array of tables a list of
    dicts. A value is a text or of the setting's own type. Entering binds the ports, asks the cluster for its brokers
    and returns when kproxy can serve clients; leaving finishes the requests in flight, for at most `drain_timeout_s`.
    A program may enter it again after leaving.

    Without `listen` it takes a free port of this machine, with free ports for the brokers behind it.

    Raises ConfigError for invalid settings, and on entering for an address that cannot be bound or a folder that cannot
    be written to; UpstreamError if no broker has answered within `ready_timeout_s` seconds; KproxyError if it is
    entered twice, or asked for its address before it is entered.
    """

    def __init__(
        self,
        *,
        bootstrap: str | Sequence[str],
        listen: str | None = None,
        ready_timeout_s: float = 30.0,
        **settings: Any,
    ) -> None:
        known = {*Cluster.model_fields, *Config.model_fields} - {"clusters"}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError([(name, _no_such(name, sorted(known))) for name in unknown])
        if not (isinstance(ready_timeout_s, int | float) and ready_timeout_s > 0):
            raise ConfigError([("ready_timeout_s", f"{ready_timeout_s!r} is no number of seconds")])
        listen = listen or f"{_HOST}:{_free_port()}"
        cluster = {name: value for name, value in settings.items() if name in Cluster.model_fields}
        process = {name: value for name, value in settings.items() if name not in cluster}
        found = load(given={**process, "cluster": [{"listen": listen, "bootstrap": bootstrap, **cluster}]})
        if found.workers > 1:
            raise ConfigError([("workers", "a proxy inside a program is one process: leave it out, or use kproxy run")])
        if found.flight is not None and FINDINGS in found.flight.triggers:
            raise ConfigError([("flight.triggers", "there are no findings inside a program: use kproxy run")])
        self._settings = found
        self._server: Server | None = None  # set while entered
        self._ready_timeout_s = ready_timeout_s

    @property
    def address(self) -> Address:
        """The (host, port) where clients bootstrap; its `str` is HOST:PORT. Available only inside the `async with`."""
        (address,) = self._running.addresses.values()
        return address

    @property
    def admin_address(self) -> Address | None:
        """The (host, port) of /metrics, /health and /ready; None without the setting `admin`."""
        return self._running.admin_address

    @property
    def _running(self) -> Server:
        if self._server is None:
            raise KproxyError("this Proxy does not run: it has addresses inside its `async with` only")
        return self._server

    async def __aenter__(self) -> "Proxy":
        if self._server is not None:
            raise KproxyError("this Proxy runs already: make another one, with ports of its own")
        server = self._server = Server(self._settings)
        try:
            await server.start()
            async with asyncio.timeout(self._ready_timeout_s):
                while server.not_ready():  # noqa: ASYNC110 (readiness is polled by everybody who asks)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            reasons = "; ".join(server.not_ready())
            await self.__aexit__()
            raise UpstreamError(f"not ready after {self._ready_timeout_s:g} s: {reasons}") from None
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        server = self._running
        try:
            await server.stop()
        finally:
            self._server = None


def _no_such(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"no such setting; did you mean {near[0]}?" if near else f"no such setting; there are: {', '.join(known)}"


def _free_port() -> int:
    """Return a free port N followed by free ones for brokers (N + 1 + id): the system offers only single ports."""
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
