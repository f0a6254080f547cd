"""kproxy as a process under load, while it is changed: brokers that answer everything, clients that lose nothing.

A client sends a few requests at once, waits for all their answers and sends the next. Before it sends it looks whether
its connection has ended, as clients of Kafka do; if so it connects anew. A request without an answer, or a connection
refused, is what the tests are about.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, METADATA
from tests.proxy.live import HOST, Wire, request, response

# More than kproxy gives a new one until it is ready (upgrade.START_S): on a machine that is busy it may well take that.
PATIENCE_S = 90
_CLIENTS = itertools.count(1)  # of all loads: each has correlation ids of its own
KPROXY = (sys.executable, "-c", "from kproxy.cli import main; main()")


class Brokers:
    """One socket that stands for brokers with these node ids, and answers whatever is asked, a little late."""

    seen: ClassVar[set[int]] = set()  # correlation ids of requests that arrived at any

    def __init__(self, *node_ids: int, port: int = 0) -> None:
        self.node_ids = list(node_ids)
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.bind((HOST, port))
        self.sock.listen(512)
        self.sock.setblocking(False)
        self.address = f"{HOST}:{self.sock.getsockname()[1]}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._accept())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self.sock)
            self._spawn(self._serve(Wire(sock)))

    async def _serve(self, wire: Wire) -> None:
        with suppress(OSError):
            while len(frame := await wire.frame()) > 4:
                api, correlation = int.from_bytes(frame[4:6], "big"), int.from_bytes(frame[8:12], "big")
                self.seen.add(correlation)
                await asyncio.sleep(0.001)
                await wire.send(self._answer(api, int.from_bytes(frame[6:8], "big"), correlation))
        wire.close()

    def _answer(self, api: int, version: int, correlation: int) -> bytes:
        host, _, port = self.address.rpartition(":")
        if api == API_VERSIONS:
            offers = [{"apiKey": METADATA, "minVersion": 0, "maxVersion": 12}]
            return response(API_VERSIONS, 0, correlation, {"apiKeys": offers})
        if api == METADATA:
            brokers = [{"nodeId": node_id, "host": host, "port": int(port)} for node_id in self.node_ids]
            return response(METADATA, version, correlation, {"brokers": brokers})
        return response(HEARTBEAT, 4, correlation)

    def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        self.sock.close()


class Load:
    """Clients of one port, for as long as its `async with` lasts.

    unanswered: requests that reached a broker and whose answers did not come. What is sent while the end of a
    connection is on its way reaches none, as with any server: a client sends it again.
    """

    def __init__(self, port: int, clients: int = 4, depth: int = 3, pause_s: float = 0.001) -> None:
        self.port = port
        self.answered = 0
        self.refused = 0
        self.unanswered = 0
        self.ports: list[set[int]] = [set() for _ in range(clients)]  # of this machine, that each client had
        self.reconnects = 0
        self._depth = depth
        self._pause_s = pause_s
        self._stopping = False
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(clients)]

    async def _ask(self, number: int) -> None:
        correlation = next(_CLIENTS) << 16
        while not self._stopping:
            try:
                wire = await Wire.dial(self.port)
            except OSError:
                self.refused += 1
                await asyncio.sleep(0.05)
                continue
            self.ports[number].add(wire.sock.getsockname()[1])
            due = 0
            try:
                while not self._stopping and not has_ended(wire):
                    due = self._depth
                    await wire.send(b"".join(request(HEARTBEAT, 4, correlation + each) for each in range(due)))
                    for each in range(self._depth):
                        assert await wire.frame() == response(HEARTBEAT, 4, correlation + each)
                        due -= 1
                        self.answered += 1
                    correlation += self._depth
                    await asyncio.sleep(self._pause_s)
            except (OSError, AssertionError):
                last = correlation + self._depth
                self.unanswered += sum(each in Brokers.seen for each in range(last - due, last))
                correlation = last
            wire.close()
            self.reconnects += not self._stopping

    async def more(self, count: int = 200) -> None:
        """Return when so many further requests were answered."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted)

    async def __aenter__(self) -> "Load":
        await self.more()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def assert_lossless(self) -> None:
        assert (self.refused, self.unanswered) == (0, 0), (self.refused, self.unanswered)
        assert self.answered

    def assert_same_connections(self) -> None:
        assert [len(ports) for ports in self.ports] == [1] * len(self.ports)


def has_ended(wire: Wire) -> bool:
    """As a client finds out that polls its connection before it sends."""
    try:
        return not wire.sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Kproxy:
    """`kproxy run --config FILE` as a process of its own."""

    def __init__(self, file: Path, admin: int, command: Sequence[str] = KPROXY) -> None:
        self.file = file
        self.admin = admin
        self._command = command
        self.lines: list[str] = []
        self.process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]

    async def start(self, **variables: str) -> "Kproxy":
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
        self.process = await asyncio.create_subprocess_exec(
            *(*self._command, "run", "--config", str(self.file)),
            env=environment | variables,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def says(self, text: str, since: int = 0) -> str:
        """The first line with that text, from the line with that number on."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    for line in self.lines[since:]:
                        if text in line:
                            return line
                    assert not self._reading.done(), f"it ended without saying {text!r}: {self.lines}"
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"it has not said {text!r}: {self.lines}") from None

    async def get(self, path: str, *, post: bool = False) -> tuple[int, str]:
        """(HTTP status, body)"""

        def ask() -> tuple[int, str]:
            asked = urllib.request.Request(f"http://{HOST}:{self.admin}{path}", method="POST" if post else "GET")
            asked.add_header("X-Kproxy", "yes")
            try:
                with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as fault:
                return fault.code, fault.read().decode()

        return await asyncio.to_thread(ask)

    async def json(self, path: str, *, post: bool = False) -> Any:
        return json.loads((await self.get(path, post=post))[1])

    async def metric(self, name: str) -> float:
        """The value of a sample, by its name and labels as they are written."""
        _, text = await self.get("/metrics")
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(OSError):
                    if (await self.get("/ready"))[0] == 200:
                        return
                assert self.process.returncode is None, self.lines
                await asyncio.sleep(0.02)

    async def end(self) -> int:
        """Have it drain; returns its exit status."""
        if self.process.returncode is None:
            self.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            status = await self.process.wait()
        await asyncio.wait([self._reading], timeout=5)  # processes that it left may have its stderr
        return status

    async def kill(self) -> None:
        for pid in (*descendants(self.pid), self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of other processes, which have no event for it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def kproxy_process(file: Path, admin: int, **variables: str) -> Any:
    """A kproxy that is ready; whatever a test leaves of it is killed."""
    kproxy = await Kproxy(file, admin).start(**variables)
    try:
        await kproxy.ready()
        yield kproxy
        await kproxy.end()
    finally:
        await kproxy.kill()
