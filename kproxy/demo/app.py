"""`kproxy demo`: a miniature cluster and its clients in a separate process, kproxy in between, `kproxy top` on it.

The composition root of the demo. All values shown come from the admin port, as for any kproxy; the screen is a separate
process (`screen.py`). Without a terminal it prints lines.
"""

import asyncio
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kproxy.admin.asking import AdminPort
from kproxy.analysis.findings.following import Following
from kproxy.errors import KproxyError, UpstreamError, install_command
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.process.server import Server
from kproxy.proxy.tasks import waited
from kproxy.views.top.once import can_draw, line
from kproxy.views.top.source import Source

_HOST = "127.0.0.1"
_FIRST_PORT = 19092  # the bootstrap port; the brokers' ports and the admin port follow
_PORTS = 10
_LINE_EVERY_S = 2.0
_ENDS_S = 5.0


def run(seconds: float | None, record: Path | None = None) -> None:
    """Run for so many seconds, or until SIGINT or SIGTERM."""
    import uvloop

    uvloop.run(_run(seconds, record))


async def _run(seconds: float | None, record: Path | None) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored in the background of a script
            loop.add_signal_handler(number, over.set)
    screen = None
    if can_draw(sys.stdin, sys.stdout, sys.stderr):
        if importlib.util.find_spec("textual") is None:
            print(f"kproxy demo: lines for want of a screen: {install_command('top')}")
        else:
            print("kproxy demo: starting three brokers and their clients", flush=True)
            screen = await _start_screen(over)  # starts meanwhile
    port, claim = claim_ports(_FIRST_PORT, _PORTS)
    try:
        with claim:
            await _play(port, over, seconds, record, screen)
    finally:
        if screen is not None:
            await screen.end()


async def _play(
    port: int, over: asyncio.Event, seconds: float | None, record: Path | None, screen: "_Screen | None"
) -> None:
    world = await _start_world()
    await world.begin()
    # There is little traffic, and every metric and table is to be shown: detail "batches".
    cluster = Cluster(name="demo", listen=Address(_HOST, port), bootstrap=tuple(world.brokers), detail="batches")
    admin = Address(_HOST, port + _PORTS - 1)
    settings = {"cluster": (cluster,), "admin": admin, "max_connections": 256, "drain_timeout_s": 1.0, "record": record}
    server = Server(Config.model_validate(settings))
    server.questions["findings"] = Following(server.counted)
    watch = asyncio.create_task(world.watch(over))
    try:
        await server.start()
        while server.not_ready() and not over.is_set():  # noqa: ASYNC110 (readiness is polled by everybody who asks)
            await asyncio.sleep(0.02)
        world.admit(Address(_HOST, port))
        await _show(server, over, seconds, record, screen)
    finally:
        watch.cancel()
        try:
            await world.end()  # the clients first, then the proxy
        finally:
            await server.stop()
    if record is not None:
        lost = sum(server.metrics.recorder_dropped.values())
        if lost:  # with a screen, nobody has seen the log
            raise KproxyError(f"not all was recorded into {record}: {lost} events are lost; is there room on the disk?")
        print(f"kproxy demo: recorded into {record}")


async def _show(
    server: Server, over: asyncio.Event, seconds: float | None, record: Path | None, screen: "_Screen | None"
) -> None:
    if over.is_set():
        return
    (bootstrap,) = server.addresses.values()
    url = f"http://{server.admin_address}"
    source = Source(AdminPort(url))
    end_s = time.monotonic() + (seconds if seconds is not None else 1e9)
    await asyncio.to_thread(source.ask)
    if screen is None:
        where = f"kproxy demo: page at {url}/, metrics at {url}/metrics, clients bootstrap at {bootstrap}"
        print(where if record is None else f"{where}, tables go into {record}", flush=True)
        while await _until(over, min(end_s, time.monotonic() + _LINE_EVERY_S)):
            await asyncio.to_thread(source.ask)
            print(_cut(line(source)), flush=True)
            if time.monotonic() >= end_s:
                return
        return
    # The log would write over the screen, which shows the same events as counters.
    logging.getLogger("kproxy").setLevel(logging.CRITICAL)
    tables = "" if record is None else f"   tables go into {record}"
    where = f"page {url}/{tables}   bootstrap {bootstrap}"
    screen.show(url, ("Demo: 3 brokers, 11 clients, kproxy between. Press 1 to 9, Enter; q ends it.", where))
    await _until(over, end_s)
    await screen.end()
    await asyncio.to_thread(source.ask)
    print(_cut(line(source)))  # of the whole run


async def _until(over: asyncio.Event, end_s: float) -> bool:
    """Wait for a moment of the monotonic clock; returns False if the demo ends before."""
    return not await waited(over, end_s - time.monotonic())


def _cut(text: str) -> str:
    """Return the text cut to the width of the terminal; unchanged for a pipe or a file."""
    return text[: os.get_terminal_size(sys.stdout.fileno()).columns - 1] if sys.stdout.isatty() else text


class _Screen:
    """The process with the screen; it waits for `show`."""

    def __init__(self, process: asyncio.subprocess.Process, orders: int, over: asyncio.Event) -> None:
        self._process = process
        self._orders = orders  # pipe to the process; -1: closed
        self._watching = asyncio.create_task(self._watch(over))

    def show(self, admin: str, about: Sequence[str]) -> None:
        with suppress(BrokenPipeError):  # it has already ended
            os.write(self._orders, json.dumps([admin, about]).encode() + b"\n")

    async def end(self) -> None:
        """End the screen, which restores the terminal. Raises UpstreamError if it ended by a fault."""
        if self._orders < 0:
            return
        os.close(self._orders)  # the screen ends with its input
        self._orders = -1
        try:
            async with asyncio.timeout(_ENDS_S):
                await asyncio.shield(self._watching)
        except TimeoutError:
            self._process.kill()
            await self._watching
        if self._process.returncode:
            raise UpstreamError(f"the demo's screen ended with code {self._process.returncode}")

    async def _watch(self, over: asyncio.Event) -> None:
        """End the demo with the screen."""
        await self._process.wait()
        over.set()


async def _start_screen(over: asyncio.Event) -> _Screen:
    theirs, ours = os.pipe()
    command = (sys.executable, "-m", "kproxy.demo.screen", str(theirs))
    try:
        process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs,))
    finally:
        os.close(theirs)
    return _Screen(process, ours, over)


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
        self._stdin.close()  # the process ends with its input
        try:
            async with asyncio.timeout(_ENDS_S):
                await self._process.wait()
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
            *(sys.executable, "-m", "kproxy.demo.world"),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C is for the demo only, also while this process still imports
        )
    )


def claim_ports(first: int, count: int) -> tuple[int, socket.socket]:
    """Return the first of `count` free ports in a row from `first` on, and a socket that reserves them against other
    demos.

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
