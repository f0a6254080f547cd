"""`kproxy demo`: a miniature cluster and its clients in a process of their own, kproxy between, and the view.

The composition root of the demo. The figures shown are read from the metrics' cells of the kproxy in this process.
"""

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from kproxy.errors import UpstreamError
from kproxy.metrics.summary import summarise
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.control.server import Server
from kproxy.views.live import View
from kproxy.views.terminal import can_redraw

_HOST = "127.0.0.1"
_FIRST_PORT = 19092  # where clients bootstrap; the brokers' ports and the admin port follow
_PORTS = 10
_SCREEN_EVERY_S = 1.0
_LINE_EVERY_S = 2.0
_COARSE_S = 0.01  # the loop's timers end a little early, which would show the last figures twice


def run(seconds: float | None, record: Path | None = None) -> None:
    """For so many seconds, or until SIGINT or SIGTERM."""
    import uvloop

    uvloop.run(_run(seconds, record))


async def _run(seconds: float | None, record: Path | None) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a script
            loop.add_signal_handler(number, over.set)
    port, claim = claim_ports(_FIRST_PORT, _PORTS)
    with claim:
        await _play(port, over, seconds, record)


async def _play(port: int, over: asyncio.Event, seconds: float | None, record: Path | None) -> None:
    world = await _start_world()
    await world.begin()
    # There is little traffic, and every metric and table to be seen: detail "batches".
    cluster = Cluster(name="demo", listen=Address(_HOST, port), bootstrap=tuple(world.brokers), detail="batches")
    admin = Address(_HOST, port + _PORTS - 1)
    settings = {"cluster": (cluster,), "admin": admin, "max_connections": 256, "drain_timeout_s": 1.0, "record": record}
    server = Server(Config.model_validate(settings))
    watch = asyncio.create_task(world.watch(over))
    try:
        await server.start()
        while server.not_ready() and not over.is_set():  # noqa: ASYNC110 (readiness is polled by everybody who asks)
            await asyncio.sleep(0.02)
        world.admit(Address(_HOST, port))
        await _show(server, over, seconds)
    finally:
        watch.cancel()
        try:
            await world.end()  # the clients first, then the proxy
        finally:
            await server.stop()
    if record is not None:
        print(f"kproxy demo: recorded into {record}")


async def _show(server: Server, over: asyncio.Event, seconds: float | None) -> None:
    (bootstrap,) = server.addresses.values()
    metrics_url = f"http://{server.admin_address}/metrics"
    view = View("demo · 3 brokers, 11 clients", (("metrics", metrics_url), ("bootstrap", str(bootstrap))))
    view.add(summarise(server.metrics, time.monotonic_ns()))
    console = Console()
    if not can_redraw(console):
        print(f"kproxy demo: metrics at {metrics_url}, clients bootstrap at {bootstrap}", flush=True)

        async def show() -> None:
            print(_cut(view.line(), console), flush=True)

        await _ticks(server, view, over, seconds, _LINE_EVERY_S, show)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        # The log would write over the screen, which counts what the log reports.
        logging.getLogger("kproxy").setLevel(logging.CRITICAL)

        def draw() -> None:
            live.update(view.screen(*console.size), refresh=True)

        async def show() -> None:
            await asyncio.to_thread(draw)  # the relay goes on meanwhile

        await _ticks(server, view, over, seconds, _SCREEN_EVERY_S, show)
    print(_cut(view.line(), console))


def _cut(line: str, console: Console) -> str:
    """A line that a terminal shows as one; a pipe and a file get all of it."""
    return line[: console.width - 1] if sys.stdout.isatty() else line


async def _ticks(
    server: Server,
    view: View,
    over: asyncio.Event,
    seconds: float | None,
    every_s: float,
    show: Callable[[], Awaitable[None]],
) -> None:
    """Read the figures and show them, again and again."""
    end = None if seconds is None else time.monotonic() + seconds
    while not over.is_set() and (end is None or time.monotonic() < end - _COARSE_S):
        pause_s = every_s if end is None else max(0.0, min(every_s, end - time.monotonic()))
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), pause_s)
        view.add(summarise(server.metrics, time.monotonic_ns()))
        await show()


class _World:
    """The process with the cluster and its clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.brokers: list[Address] = []
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stderr_lines: deque[str] = deque(maxlen=20)  # the screen would hide standard error
        self._listening = asyncio.create_task(self._listen(process.stderr))

    async def begin(self) -> None:
        line = await self._stdout.readline()
        if not line:
            raise await self._fault()
        self.brokers += [Address(host, port) for host, port in json.loads(line)]

    def admit(self, bootstrap: Address) -> None:
        """Start the clients, which bootstrap at this address."""
        self._stdin.write(json.dumps(bootstrap).encode() + b"\n")

    async def watch(self, over: asyncio.Event) -> None:
        """End the demo if the process ends by itself."""
        await self._process.wait()
        over.set()

    async def end(self) -> None:
        failed = self._process.returncode is not None
        self._stdin.close()  # it ends when its input does
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if failed:
            raise await self._fault()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while line := await stderr.readline():
            self._stderr_lines.append(line.decode(errors="replace"))

    async def _fault(self) -> UpstreamError:
        await self._listening
        return UpstreamError(
            f"the demo's cluster ended with code {await self._process.wait()}\n{''.join(self._stderr_lines)}"
        )


async def _start_world() -> _World:
    pipe = asyncio.subprocess.PIPE
    return _World(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kproxy.demo.world"), stdin=pipe, stdout=pipe, stderr=pipe
        )
    )


def claim_ports(first: int, count: int) -> tuple[int, socket.socket]:
    """The first of `count` free ports in a row, from `first` on, and a socket that keeps other demos away from them.

    It is bound to the second port, which would be that of a broker 0.
    """
    for start in range(first, 60_000, count):
        claim = socket.socket()
        try:
            claim.bind((_HOST, start + 1))
            for port in (start, *range(start + 2, start + count)):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((_HOST, port))
        except OSError:
            claim.close()
            continue
        return start, claim
    raise UpstreamError(f"no {count} free ports in a row from {first} on")
