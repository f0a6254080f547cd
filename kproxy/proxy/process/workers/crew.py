"""The parent's view of the workers of a kproxy: starts them, gives them clients, and replaces those that end.

A client goes to the worker with the fewest connections of its port and, among equals, the fewest in all: this spreads
the clients of a busy broker over all workers. The parent keeps a client's socket until the worker has taken it, so a
worker that dies loses only connections that it had taken. Its replacement starts at once, or after a pause if workers
end soon after their start. A worker that takes nothing for LATE_S gets no further client until it does. The parent
kills a worker that answers neither a request within HANGS_S nor a repeated one.

The template may die as well (the kernel's OOM killer chooses among all processes): the parent starts another one, and
the workers of the former continue.

Bounded: UNTAKEN clients on their way to one worker, and as many in it as it has descriptors for; further clients wait
here, and the gate counts all of them. Refuses to know how workers serve a client, and the meaning of their messages.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from kproxy.proxy.config.addresses import Address
from kproxy.proxy.process.workers.template import Template
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sockets.channel import Channel, Gone, Handler, pair
from kproxy.proxy.sockets.listeners import normal
from kproxy.proxy.tasks import waited

UNTAKEN = 64
LATE_S = 0.5
BEAT_S = 5.0  # s between two checks that a worker's event loop runs
HANGS_S = 30.0
_STEADY_S = 1.0  # a worker that lived at least this long is replaced at once
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 10.0
_STATUS_S = 5.0  # s to wait for a worker's end after the end of its channel
_STEADY_TEMPLATE_S = 60.0
_TEMPLATES = 6  # consecutive templates that forked no worker, after which kproxy starts no further one

Port = tuple[str, int | None]  # cluster, and node id or None for the bootstrap port

log = logging.getLogger("kproxy.processes")


class Client(NamedTuple):
    """A client that the parent has accepted."""

    number: int
    port: Port
    peer: Address
    own: Address  # the address that it dialled
    sock: socket.socket  # closed once a worker has taken it
    uncount: Callable[[], None] = lambda: None  # releases its place in the connection limits
    count_address: Callable[[str], str | None] = lambda host: None  # returns the limit that the address exceeds


class Member:
    """One worker: its clients, and the channel to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.channel: Channel
        self.is_ready = False
        self.is_gone = False
        self.started_s = time.monotonic()
        self.untaken: dict[int, Client] = {}
        self.waits_since_s = 0.0  # when it last took a client, or got one while it had none pending
        self.clients: dict[int, Client] = {}  # taken clients and `untaken`
        self.by_port: Counter[Port] = Counter()

    def __str__(self) -> str:
        return f"worker {self.number}"

    @property
    def fits(self) -> bool:
        """Whether it can be given another client."""
        is_late = self.untaken and time.monotonic() - self.waits_since_s > LATE_S
        return len(self.untaken) < UNTAKEN and not is_late


def _status(pid: int) -> int | None:
    """Return the wait status of a process if it is a child of this one; None if another process has reaped it."""
    try:
        of, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if of else None


class Crew:
    """`size` workers. The owner provides the callbacks:

    handlers(member): returns the handlers of a worker's messages; begin(member): sends a new worker its initial state;
    ended(member): called when it has ended, with its clients; left(client): called when a connection has ended.
    """

    def __init__(
        self,
        size: int,
        template: Template,
        handlers: Callable[[Member], Mapping[str, Handler]],
        begin: Callable[[Member], None],
        ended: Callable[[Member], None],
        left: Callable[[Client], None],
    ) -> None:
        self.size = size
        self.restarts = 0
        self.most_in_each = sys.maxsize  # clients per worker
        self.connections: dict[tuple[Address, Address], Client] = {}  # by (peer, own)
        self._template = template
        self._handlers = handlers
        self._begin = begin
        self._on_end = ended
        self._on_left = left
        self._members: dict[int, Member] = {}
        self._by_pid: dict[int, asyncio.Future[int | None]] = {}  # wait status by pid, None: unknown
        self._orphans: set[int] = set()  # workers whose template has ended
        self._early: dict[int, int] = {}  # pid -> status of workers that ended before their start was reported
        self._waiting: deque[Client] = deque()  # clients without a worker yet
        self._numbers = 0
        self._failures = 0  # consecutive workers that ended soon
        self._forking = asyncio.Lock()
        self._has_template = asyncio.Event()
        self._has_template.set()
        self._templates = 0  # consecutive templates that ended soon and forked nothing
        self._template_since_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()

    def brokers_with_clients(self, cluster: str) -> set[int]:
        """Return the node ids whose ports have connections of a cluster, including clients that wait for a worker."""
        ports = (client.port for client in self.connections.values())
        return {node_id for name, node_id in ports if name == cluster and node_id is not None}

    # --- starting ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Fork all workers; returns when each is ready. Raises Gone if one ends before."""
        self._template.watch(self._worker_ended, self._template_lost)
        for number in range(1, self.size + 1):
            await self._fork(number)
        while len(self.ready) < self.size:
            if self.restarts or self._lost.is_set():
                raise Gone("a worker ended before it was ready: see the lines above")
            self._changed.clear()
            await self._changed.wait()
        self._spawn(self._watch())

    async def _watch(self) -> None:
        """Kill workers that hang; their ends are handled and counted like any other."""
        asked: set[Member] = set()

        async def ask(member: Member) -> None:
            try:
                if not await member.channel.has_beat(HANGS_S) and not member.is_gone and not self._stopping:
                    log.error("worker %d (pid %d) hangs: no answer for %g s", member.number, member.pid, HANGS_S)
                    with suppress(ProcessLookupError):
                        os.kill(member.pid, signal.SIGKILL)
            finally:
                asked.discard(member)

        while not self._stopping:
            for member in self.ready:
                if member not in asked:
                    asked.add(member)
                    self._spawn(ask(member))
            await asyncio.sleep(BEAT_S)

    async def _fork(self, number: int) -> None:
        member = Member(number)
        async with self._forking:
            await self._has_template.wait()
            ours, theirs = pair()
            try:
                member.pid = await self._template.fork(theirs)
            except BaseException:
                ours.close()
                raise
            self._templates = 0
        if self._stopping:  # the workers have been sent `drain` already: this one ends with its channel
            ours.close()
            return
        status = self._by_pid[member.pid] = asyncio.get_running_loop().create_future()
        if member.pid in self._early:
            status.set_result(self._early[member.pid])
        self._early.clear()
        handlers: dict[str, Handler] = {"ready": lambda: self._ready(member), "taken": lambda n: self._taken(member, n)}
        handlers |= {"left": lambda n: self._left(member, n)}
        member.channel = Channel(ours, handlers | dict(self._handlers(member)), lambda: self._gone(member))
        self._members[number] = member
        self._begin(member)

    def _ready(self, member: Member) -> None:
        member.is_ready = True
        log.debug("worker %d is ready: pid %d", member.number, member.pid)
        self._changed.set()
        self._give()

    # --- running workers ---------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """The running workers, ready or not."""
        return list(self._members.values())

    @property
    def ready(self) -> list[Member]:
        return [member for member in self._members.values() if member.is_ready]

    @property
    def is_lost(self) -> bool:
        """Whether no further worker can be started."""
        return self._lost.is_set()

    async def lost(self) -> None:
        """Return when no further worker can be started."""
        await self._lost.wait()

    def broadcast(self, name: str, *values: Any, but: Member | None = None) -> None:
        """Send a message to all workers, except `but`."""
        for member in self.members:
            if member is not but:
                member.channel.send(name, *values)

    async def ask_all(self, name: str, *values: Any, timeout_s: float) -> list[tuple[Member, Any]]:
        """Return the replies of the workers that answer in time."""
        asked = self.ready
        replies = await asyncio.gather(
            *(member.channel.ask(name, *values, timeout_s=timeout_s) for member in asked), return_exceptions=True
        )
        return [pair for pair in zip(asked, replies, strict=True) if not isinstance(pair[1], BaseException)]

    # --- clients -----------------------------------------------------------------------------------------------------

    def hand_over(
        self,
        port: Port,
        own: Address,
        incoming: Incoming,
        uncount: Callable[[], None],
        count: Callable[[str], str | None] = lambda host: None,
    ) -> None:
        """Give a client to a worker, now or as soon as one fits.

        uncount(): called when its connection has ended. count(host): counts its address; returns the limit that it
        exceeds.
        """
        self._numbers += 1
        client = Client(self._numbers, port, normal(incoming.peer), normal(own), incoming.sock, uncount, count)
        self.connections[client.peer, client.own] = client
        self._waiting.append(client)
        self._give()

    def _give(self) -> None:
        while self._waiting:
            port = self._waiting[0].port
            fit = [member for member in self.ready if member.fits and len(member.clients) < self.most_in_each]
            if not fit:
                return
            member = min(fit, key=lambda each: (each.by_port[port], len(each.clients), each.number))
            client = self._waiting.popleft()
            if not member.untaken:
                member.waits_since_s = time.monotonic()
            member.by_port[port] += 1
            member.clients[client.number] = member.untaken[client.number] = client
            member.channel.send("client", client.number, *port, tuple(client.peer), files=[client.sock.fileno()])

    def _taken(self, member: Member, number: int) -> None:
        client = member.untaken.pop(number, None)
        if client is not None:
            client.sock.close()
            member.waits_since_s = time.monotonic()
        self._give()

    def _left(self, member: Member, number: int) -> None:
        client = member.clients.pop(number, None)
        if client is None:
            return
        self._taken(member, number)
        member.by_port[client.port] -= 1
        if not member.by_port[client.port]:
            del member.by_port[client.port]
        self._forget(client)

    def _forget(self, client: Client) -> None:
        if self.connections.get((client.peer, client.own)) is client:
            del self.connections[client.peer, client.own]
        self._on_left(client)

    # --- ended workers -----------------------------------------------------------------------------------------------

    def _gone(self, member: Member) -> None:
        """Handle the end of a worker's channel: the worker has ended, or is about to."""
        if member.is_gone:
            return
        member.is_gone = True
        member.is_ready = False
        if member.channel.given_up:  # it must not serve clients that others get now
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        if self._members.get(member.number) is member:
            del self._members[member.number]
        untaken = list(member.untaken.values())
        for client in untaken:
            del member.clients[client.number]
        for client in member.clients.values():
            self._forget(client)
        self._on_end(member)
        member.clients.clear()
        self._waiting.extendleft(reversed(untaken))
        self._changed.set()
        if not self._stopping:
            self._spawn(self._replace(member))
            self._give()

    async def _replace(self, member: Member) -> None:
        """Log how a worker ended, and start another one in its place."""
        how = await self._how_it_ended(member)
        self.restarts += 1
        self._changed.set()
        lived_s = time.monotonic() - member.started_s
        self._failures = 0 if lived_s >= _STEADY_S else self._failures + 1
        pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._failures - 2)) if self._failures > 1 else 0.0
        log.error(
            "worker %d (pid %d) %s after %.1f s: its connections are lost, another one starts%s",
            member.number,
            member.pid,
            how,
            lived_s,
            f" in {pause_s:.1f} s" if pause_s else "",
        )
        await asyncio.sleep(pause_s)
        pause_s = _FIRST_PAUSE_S
        while not self._stopping and not self.is_lost:
            try:
                await self._fork(member.number)
                return
            except (OSError, TimeoutError) as fault:
                text = str(fault) or "the process that workers are forked from does not answer"
                log.error("worker %d cannot be started: %s; it is tried again", member.number, text)
                if isinstance(fault, TimeoutError):
                    self._template.kill()
                await asyncio.sleep(pause_s)
                pause_s = min(_LAST_PAUSE_S, pause_s * 2)

    async def _how_it_ended(self, member: Member) -> str:
        ended = self._by_pid[member.pid]
        try:
            async with asyncio.timeout(_STATUS_S):
                status = await asyncio.shield(ended)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            return "did not end after its channel had closed, and was killed"
        finally:
            self._by_pid.pop(member.pid, None)
        if status is None:
            return "has ended"
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with status {os.waitstatus_to_exitcode(status)}"

    def _worker_ended(self, pid: int, status: int | None) -> None:
        ended = self._by_pid.get(pid)
        if ended is None:
            if status is not None:
                self._early[pid] = status
        elif not ended.done():
            ended.set_result(status)

    def _template_lost(self) -> None:
        if self._stopping:
            return
        for pid in self._by_pid.keys() - self._orphans:
            self._watch_orphan(pid)
        self._has_template.clear()
        self._templates = 1 if time.monotonic() - self._template_since_s > _STEADY_TEMPLATE_S else self._templates + 1
        if self._templates < _TEMPLATES:
            log.error("the process that workers are forked from has gone: another one is started, workers go on")
            self._spawn(self._another_template())
            return
        log.error("the process that workers are forked from has ended again: kproxy drains and ends, for a restart")
        self._lost.set()
        self._changed.set()

    def _watch_orphan(self, pid: int) -> None:
        """Watch a worker whose template has ended, since nobody else reports its end."""
        try:
            file = os.pidfd_open(pid)
        except OSError:  # it has ended, or cannot be watched
            self._worker_ended(pid, _status(pid))
            return
        loop = asyncio.get_running_loop()
        self._orphans.add(pid)

        def has_ended() -> None:
            loop.remove_reader(file)
            os.close(file)
            self._orphans.discard(pid)
            self._worker_ended(pid, _status(pid))

        loop.add_reader(file, has_ended)

    async def _another_template(self) -> None:
        await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (self._templates - 1))
        self._template_since_s = time.monotonic()
        try:
            await self._template.anew()
        except OSError as fault:
            log.error("no process that forks workers can be started: %s", fault)
            self._template_lost()
        else:
            self._has_template.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- stopping ----------------------------------------------------------------------------------------------------

    def stop_replacing(self) -> None:
        """Replace no worker that ends from now on, and close clients that no worker has got."""
        self._stopping = True
        while self._waiting:
            client = self._waiting.popleft()
            client.sock.close()
            self._forget(client)

    async def close(self, within_s: float) -> None:
        """Wait until the workers have ended, and kill those that take longer than `within_s`."""
        self.stop_replacing()
        end = time.monotonic() + within_s
        while self._members and time.monotonic() < end:
            self._changed.clear()
            await waited(self._changed, end - time.monotonic())
        for member in self.members:
            log.error("worker %d (pid %d) does not end and is killed", member.number, member.pid)
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            member.channel.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._template.close()
        last = [self._by_pid[pid] for pid in self._orphans if pid in self._by_pid]
        if last:
            await asyncio.wait(last, timeout=_STATUS_S)
