"""Hands the listening sockets and the learned state of a running kproxy to a new process that replaces it.

The running process starts the new one, and they exchange a JSON object per message over a pair of sockets:

    old -> new   {"is": "sockets", "names": [...]}, with their file descriptors; one or several messages
    old -> new   {"is": "state", ...}: see `State`; all sockets have been sent
    new -> old   {"is": "ready"}: it has read its settings, bound the other ports, and its brokers have answered
    old -> new   {"is": "sockets", ...} bound since, {"is": "state", ...}: the old one has stopped accepting
    new -> old   {"is": "serving"}: it accepts
    old -> new   {"is": "yours"}: the service manager has been notified of the new process
    old -> new   {"is": "drains", "connections": N}, every REPORT_S; the channel ends when the old process does

Both have the same sockets, so that clients wait in the backlog and none is refused. A failure of the new process before
`serving` leaves the old one unchanged. Bounded: the new process has START_S to become ready. Refuses to know the
content of a cluster's state, signals, and the command lines of the processes.
"""

import asyncio
import json
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kproxy.errors import KproxyError
from kproxy.proxy.sockets.given import GivenSockets

START_S = 60.0  # s until the new process is ready
SWITCH_S = 10.0  # s for each later step
REPORT_S = 1.0
VARIABLE = "_KPROXY_UPGRADE_FD"
_MAX_MESSAGE = 256 * 1024
_FILES = 128  # per message; Linux allows 253
_LEARNT = 512  # brokers or ports per message


@dataclass
class State:
    """The state of the old process that the new one needs."""

    generation: int = 1  # 1: there was no predecessor
    waits_for: list[str] = field(default_factory=list)  # clusters ready here, and required to be ready in the new one
    bootstraps: dict[str, list[str]] = field(default_factory=dict)  # cluster -> bootstrap addresses
    learnt: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # cluster -> node id -> [host, port]
    record: str = ""  # the folder that it records into, also while it drains
    # cluster -> node id -> [port, seconds of absence of its broker]; ports assigned as node ids appeared
    ports: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


class Link:
    """One end of the channel between the two processes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    async def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message with file descriptors. Raises OSError."""
        data = json.dumps(message).encode()
        while True:
            try:
                if files:
                    socket.send_fds(self._sock, [data], list(files))
                else:
                    self._sock.send(data)
                return
            except (BlockingIOError, InterruptedError):
                await self._ready(for_room=True)

    async def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and its file descriptors. Raises EOFError at the end of the channel."""
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._sock, _MAX_MESSAGE, _FILES, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                await self._ready(for_room=False)
                continue
            except OSError:
                data, files = b"", []
            if not data:
                raise EOFError
            return json.loads(data), list(files)

    async def expect(self, kind: str, within_s: float) -> dict[str, Any]:
        """Return the next message, which must be of that kind. Raises KproxyError."""
        try:
            async with asyncio.timeout(within_s):
                message, _ = await self.receive()
        except TimeoutError:
            raise KproxyError(f"it was not {kind} within {within_s:g} s") from None
        except EOFError:
            raise KproxyError(f"it ended before it was {kind}: see its lines above") from None
        if message["is"] != kind:
            raise KproxyError(f"it sent {message['is']!r}, not {kind!r}")
        return message

    async def send_sockets(self, sockets: Sequence[tuple[str, socket.socket]]) -> None:
        for start in range(0, len(sockets), _FILES):
            part = sockets[start : start + _FILES]
            names = [name for name, _ in part]
            await self.send({"is": "sockets", "names": names}, [sock.fileno() for _, sock in part])

    async def send_state(self, state: State) -> None:
        """Send a state, in as many messages as its brokers and ports need."""
        rest = asdict(state)
        learnt = [(name, node_id, at) for name, brokers in state.learnt.items() for node_id, at in brokers.items()]
        rest["learnt"] = {}
        for start in range(0, len(learnt), _LEARNT):
            await self.send({"is": "learnt", "brokers": learnt[start : start + _LEARNT]})
        rest["ports"] = {name: {} for name in state.ports}
        given = [(name, node_id, held) for name, ports in state.ports.items() for node_id, held in ports.items()]
        for start in range(0, len(given), _LEARNT):
            await self.send({"is": "given", "ports": given[start : start + _LEARNT]})
        await self.send({"is": "state", **rest})

    async def receive_state(self, given: GivenSockets) -> State:
        """Receive messages up to the state; the sockets go into the pool. Raises KproxyError."""
        learnt: dict[str, dict[str, list[Any]]] = {}
        ports: dict[str, dict[str, list[Any]]] = {}
        while True:
            try:
                async with asyncio.timeout(SWITCH_S):
                    message, files = await self.receive()
            except (EOFError, TimeoutError):
                raise KproxyError("the kproxy that this one should follow is gone") from None
            match message.pop("is"):
                case "sockets":
                    for name, file in zip(message["names"], files, strict=True):
                        given.put(name, socket.socket(fileno=file))
                case "learnt":
                    for name, node_id, at in message["brokers"]:
                        learnt.setdefault(name, {})[node_id] = at
                case "given":
                    for name, node_id, held in message["ports"]:
                        ports.setdefault(name, {})[node_id] = held
                case "state":
                    known = {name: value for name, value in message.items() if name in State.__dataclass_fields__}
                    for name in message.get("ports", {}):  # a cluster may have no ports
                        ports.setdefault(name, {})
                    return State(**{**known, "learnt": learnt, "ports": ports})

    def close(self) -> None:
        self._sock.close()

    async def _ready(self, *, for_room: bool) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if for_room else (loop.add_reader, loop.remove_reader)

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(self._sock, wake)
        try:
            await ready
        finally:
            remove(self._sock)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def inherited(environment: MutableMapping[str, str]) -> socket.socket | None:
    """Return this process's end of the channel to the old kproxy that started it; None if none did."""
    number = environment.pop(VARIABLE, "")
    if not number:
        return None
    sock = socket.socket(fileno=int(number))
    sock.set_inheritable(False)
    return sock


def for_child(environment: MutableMapping[str, str], file: int) -> dict[str, str]:
    """Return the environment for a new kproxy."""
    left_out = ("WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    return {name: value for name, value in environment.items() if name not in left_out} | {VARIABLE: str(file)}
