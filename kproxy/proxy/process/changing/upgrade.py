"""A new kproxy takes the place of one that runs: its listening sockets, and what it has learnt.

The one that runs starts the other and they talk over a pair of sockets, a JSON object per message:

    old -> new   {"is": "sockets", "names": [...]}, with their file descriptors; as many messages as it takes
    old -> new   {"is": "state", ...}: see `State`; all sockets that there are have been sent
    new -> old   {"is": "ready"}: it has read its settings, bound the rest, and its brokers have answered
    old -> new   {"is": "sockets", ...} bound since, {"is": "state", ...}: the old one has stopped accepting
    new -> old   {"is": "serving"}: it accepts
    old -> new   {"is": "yours"}: the service manager knows of it
    old -> new   {"is": "drains", "connections": N}, once in a while; the end of the channel: it is gone

Both have the same sockets, so that clients wait in the backlog and none is refused. Until `serving`, whatever happens
to the new one leaves the old one as it was. Bounded: START_S for the new one to be ready. Refuses to know clusters'
insides, signals, and what the processes are called.
"""

import asyncio
import json
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kproxy.errors import KproxyError
from kproxy.proxy.sockets.given import GivenSockets

START_S = 60.0  # for the new one to be ready
SWITCH_S = 10.0  # for each step after that
REPORT_S = 1.0
VARIABLE = "_KPROXY_UPGRADE_FD"
_MAX_MESSAGE = 256 * 1024
_FILES = 128  # in a message; Linux takes 253
_LEARNT = 512  # brokers in a message


@dataclass
class State:
    """What the old one knows and the new one needs."""

    generation: int = 1  # 1: nobody was before it
    waits_for: list[str] = field(default_factory=list)  # clusters that are ready, and have to be in the new one
    bootstraps: dict[str, list[str]] = field(default_factory=dict)  # cluster -> its addresses, as texts
    learnt: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # cluster -> node id -> [host, port]
    record: str = ""  # the folder into which it records, and goes on to while it drains
    # cluster -> node id -> [port, seconds for which the cluster has not named it], of ports given out as ids appeared
    ports: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


class Link:
    """One end of the channel between the two."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    async def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Raises OSError."""
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
        """The next message and its file descriptors. Raises EOFError at the other's end."""
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
        """The next message, which is of that kind. Raises KproxyError."""
        try:
            async with asyncio.timeout(within_s):
                message, _ = await self.receive()
        except TimeoutError:
            raise KproxyError(f"it was not {kind} within {within_s:g} s") from None
        except EOFError:
            raise KproxyError(f"it ended before it was {kind}: see its lines above") from None
        if message["is"] != kind:
            raise KproxyError(f"it said {message['is']!r} in place of {kind!r}")
        return message

    async def send_sockets(self, sockets: Sequence[tuple[str, socket.socket]]) -> None:
        for start in range(0, len(sockets), _FILES):
            part = sockets[start : start + _FILES]
            names = [name for name, _ in part]
            await self.send({"is": "sockets", "names": names}, [sock.fileno() for _, sock in part])

    async def send_state(self, state: State) -> None:
        """In as many messages as its brokers take."""
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
        """Everything up to the state: the sockets go into the pool. Raises KproxyError."""
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
                    for name in message.get("ports", {}):  # that of a cluster may be empty
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
    """The two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def inherited(environment: MutableMapping[str, str]) -> socket.socket | None:
    """The end of the channel of a process that an old kproxy has started; None: nobody has."""
    number = environment.pop(VARIABLE, "")
    if not number:
        return None
    sock = socket.socket(fileno=int(number))
    sock.set_inheritable(False)
    return sock


def for_child(environment: MutableMapping[str, str], file: int) -> dict[str, str]:
    """The environment of a new kproxy."""
    left_out = ("WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    return {name: value for name, value in environment.items() if name not in left_out} | {VARIABLE: str(file)}
