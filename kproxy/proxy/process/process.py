"""kproxy as a process of its own: signals, the service manager, changes of the settings file and upgrades.

    SIGTERM, SIGINT   drain and end; the second signal closes at once
    SIGHUP            reload
    SIGUSR2           upgrade in place: a new process takes over, this one drains

One change at a time: a reload waits for the previous one, and a failed upgrade leaves everything as it was. Refuses to
know how a change is made: `server` and `reload` do that.
"""

import asyncio
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kproxy import __version__
from kproxy.errors import ConfigError, KproxyError
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.changing import stand_in, systemd, upgrade
from kproxy.proxy.process.changing.watch import Watch
from kproxy.proxy.process.garbage import Collections
from kproxy.proxy.process.server import Server
from kproxy.proxy.sockets.given import GivenSockets
from kproxy.proxy.tasks import Tasks

KEEPER = "_KPROXY_STAND_IN_FD"
_POLL_S = 0.02
_ENDING = (signal.SIGTERM, signal.SIGINT)
_ALL = (*_ENDING, signal.SIGHUP, signal.SIGUSR2)

log = logging.getLogger("kproxy.process")


@dataclass
class Inheritance:
    """Resources inherited from the parent process. `of` removes their variables, so that children do not see them."""

    link: socket.socket | None = None  # channel to the kproxy that this one replaces
    keeper: socket.socket | None = None  # channel to the stand-in process
    given: GivenSockets = field(default_factory=GivenSockets)  # passed by systemd

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> "Inheritance":
        """Return the inherited resources. Raises ConfigError for sockets that kproxy cannot use."""
        found = cls(upgrade.inherited(environment))
        number = environment.pop(KEEPER, "")
        if number:
            found.keeper = socket.socket(fileno=int(number))
            found.keeper.set_inheritable(False)
        systemd.given_sockets(environment, found.given)
        return found


class Process:
    """Runs a server until a signal ends it.

    load(): reads the settings anew, None if they come from no file; file: watched for changes if `watch_config` is set.
    """

    def __init__(
        self,
        server: Server,
        inheritance: Inheritance,
        environment: MutableMapping[str, str],
        load: Callable[[], Config] | None = None,
        file: Path | None = None,
    ) -> None:
        self._server = server
        self._environment = environment
        self._keeper = inheritance.keeper
        self._file = file
        self._given = inheritance.given
        self._link = upgrade.Link(inheritance.link) if inheritance.link is not None else None
        self._notifier = systemd.Notifier(environment)
        self._generation = 1
        self._started = asyncio.Event()
        self._asked = asyncio.Event()
        self._again = asyncio.Event()
        self._ends = 0  # signals that ask this process to end
        self._upgrading: asyncio.Task[None] | None = None
        self._successor: subprocess.Popen[bytes] | None = None  # the process that has taken over
        self._ours: socket.socket | None = None  # our end of the channel to successors, while this process stands in
        self._stand_in = inspect.getsource(stand_in)
        self._current = 0  # the latest successor known to this process
        self._tasks = Tasks("process")
        server.given = inheritance.given
        server.reloader.reads(load)

    def run(self) -> None:
        """Serve until a signal ends the process or a successor takes over.

        After a takeover the process may become the stand-in, and this method never returns. If the process ends here,
        its signals stay ignored, so that a late one cannot change the exit status.
        """
        import uvloop

        uvloop.run(self._run())
        if self._successor is not None and self._ours is not None:
            self._ours.set_inheritable(True)
            logging.shutdown()
            command = stand_in.command(self._stand_in, self._current, self._ours.fileno())
            signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)  # later signals wait for the stand-in program
            with suppress(OSError):  # this interpreter was removed or replaced since the upgrade
                os.execv(command[0], command)
            sys.exit(stand_in.stand_in(self._current, self._ours.fileno()))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        # loop.add_signal_handler would not do: a loop that ends restores the default action, which kills the process.
        for number in _ALL:
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._signalled, number))
        if self._keeper is not None:
            loop.add_reader(self._keeper, self._nobody_stands_in)
        collections = Collections(self._server.objects)
        try:
            await self._start()
            self._started.set()
            collections.start()
            self._tasks.spawn(self._notifier.run(self._server.not_ready, self._describe))
            if self._file is not None:
                self._tasks.spawn(self._watch(self._file))
            await self._server.until(self._asked)
        finally:
            self._asked.set()
            self._server.reloader.close("it drains, and ends")
            config = self._server.config
            if self._successor is None:
                self._notifier.stopping("draining", config.drain_delay_s + config.drain_timeout_s + 10)
            try:
                await self._server.stop(self._again)
                if self._upgrading is not None:  # the upgrade was abandoned: wait until its process has ended
                    await asyncio.wait([self._upgrading])
            finally:
                collections.stop()
                await self._tasks.cancel()
                if self._keeper is not None:
                    loop.remove_reader(self._keeper)
                stands_in = self._successor is not None and self._ours is not None
                for number in _ALL:
                    signal.signal(number, self._passed_on if stands_in else signal.SIG_IGN)

    def _describe(self) -> str:
        return f"kproxy {__version__}: " + ", ".join(
            f"{name} at {address}" for name, address in self._server.addresses.items()
        )

    # --- starting ----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._link is not None:
            await self._follow(self._link)
            return
        await self._server.start()
        clusters = [cluster.name for cluster in self._server.config.clusters]
        wanted = [str(listener.address) for listener in self._server.listeners]
        faults = systemd.unused(self._given, clusters, wanted, self._server.is_broker_port)
        if faults:
            raise ConfigError(faults)

    async def _follow(self, link: upgrade.Link) -> None:
        """Take over from the kproxy at the other end. Raises KproxyError; the other kproxy then continues to serve."""
        server = self._server
        state = await link.receive_state(self._given)
        server.hold(True)
        server.records_beside = state.record == str(server.config.record)
        await server.start()
        server.learn_all(state.bootstraps, state.learnt, state.ports)
        self._generation = state.generation + 1
        while any(cluster.cluster.name in state.waits_for and any(cluster.not_ready()) for cluster in server.clusters):
            await asyncio.sleep(_POLL_S)
            if self._asked.is_set():
                raise KproxyError("it was ended before it had taken over")
        await link.send({"is": "ready"})
        state = await link.receive_state(self._given)
        server.learn_all(state.bootstraps, state.learnt, state.ports)
        self._given.close()  # sockets of ports that these settings do not use
        server.hold(False)
        await link.send({"is": "serving"})
        await link.expect("yours", upgrade.SWITCH_S)
        log.info("this kproxy follows process %d, which drains: generation %d", os.getppid(), self._generation)
        self._tasks.spawn(self._predecessor(link))

    async def _predecessor(self, link: upgrade.Link) -> None:
        """Keep the metric of the predecessor's open connections current until the predecessor has ended."""
        metrics = self._server.metrics
        try:
            while True:
                message, _ = await link.receive()
                metrics.predecessor_connections = int(message.get("connections", 0))
        except EOFError:
            log.info("the kproxy before this one has ended")
        finally:
            metrics.predecessor_connections = 0
            link.close()

    # --- signals -----------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._successor is not None and number not in _ENDING:
            self._pass_on(number)
        elif number in _ENDING:
            self._end(name)
            self._pass_on(number)
        elif number == signal.SIGHUP:
            self._tasks.spawn(self._reload(name))
        elif self._asked.is_set():
            log.warning("%s: refused, kproxy drains", name)
        elif self._upgrading is not None or not self._started.is_set():
            log.warning("%s: refused, %s is under way", name, "its start" if self._upgrading is None else "an upgrade")
        else:
            self._upgrading = self._tasks.spawn(self._upgrade(name))

    def _end(self, name: str) -> None:
        """Drain at the first signal, unless a drain has begun because of a successor; close at once at the second."""
        self._ends += 1
        if self._ends > 1:
            self._again.set()
        log.info("%s: %s", name, "closing at once" if self._ends > 1 else "draining")
        self._asked.set()

    def _pass_on(self, number: int) -> None:
        """Pass a signal to the latest successor: while this process drains, a third one may replace the second."""
        if self._successor is not None and self._ours is not None:
            self._current = stand_in.follower(self._ours.fileno(), self._current)
            with suppress(ProcessLookupError):
                os.kill(self._current, number)

    def _passed_on(self, number: int, _: object) -> None:
        """Handle a signal that arrives between the end of the loop and the start of the stand-in program."""
        self._pass_on(number)

    def _nobody_stands_in(self) -> None:
        """Drain: the stand-in process was killed. It never writes, so a readable socket means its end."""
        assert self._keeper is not None
        asyncio.get_running_loop().remove_reader(self._keeper)
        if not self._asked.is_set():
            log.warning("the process that stands in for this one has ended")
            self._end("end of the stand-in process")

    # --- reload ------------------------------------------------------------------------------------------------------

    async def _reload(self, asker: str) -> None:
        await self._started.wait()  # the start reads the previous settings
        self._notifier.reloading()
        await self._server.reloader.reload(asker)
        self._notifier.ready(self._describe())

    async def _watch(self, file: Path) -> None:
        watch = Watch(file)
        while True:
            await watch.changed()
            if self._server.config.watch_config:
                await self._reload("a change of the file")

    # --- upgrade -----------------------------------------------------------------------------------------------------

    async def _upgrade(self, asker: str) -> None:
        """Start a new kproxy and let it take over; if it cannot, this one continues unchanged.

        If this process is asked to end meanwhile, both end: the sender of the signal knows only this one.
        """
        log.info("%s: a new kproxy is started", asker)
        self._server.reloader.close("an upgrade is under way")
        child: subprocess.Popen[bytes] | None = None
        ours, theirs = ExitStack(), ExitStack()  # the ends of the channels between the two
        try:
            await self._server.reloader.settled()  # it may open ports that the new process also binds
            our_end, its_end = upgrade.pair()
            ours.enter_context(our_end)
            theirs.enter_context(its_end)
            link = upgrade.Link(our_end)
            keeper_ours, keeper = self._keeper_for_child(ours, theirs)
            child = await asyncio.to_thread(self._start_child, its_end, keeper)
            theirs.close()
            await self._unless_it_ends(self._hand_over(link, child))
        except (KproxyError, OSError, RuntimeError) as fault:  # RuntimeError: no further thread can be started
            self._server.hold(False)
            self._server.metrics.upgrades["failed"] += 1
            if child is not None:
                await asyncio.to_thread(_end_child, child)
            if not self._asked.is_set():
                self._server.reloader.close("")
            self._upgrading = None
            ours.close()
            goes_on = "drains" if self._asked.is_set() else "goes on"  # and accepts the next upgrade
            log.error("%s: the new kproxy has not taken over, this one %s: %s", asker, goes_on, fault)
            return
        finally:
            theirs.close()
        if keeper_ours is not None:
            stand_in.adopt_orphans()
        self._successor = child
        self._ours, self._current = keeper_ours, child.pid
        if self._ends:  # asked to end during the takeover
            child.terminate()
        log.info("process %d has taken over, this one drains", child.pid)
        self._tasks.spawn(self._report(link))
        self._asked.set()

    async def _unless_it_ends(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work` and raise its exception. Raises KproxyError if this process is asked to end before that."""
        working, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not working.cancel():
            working.result()
            return
        await asyncio.wait([working])
        raise KproxyError("this one was asked to end")

    def _keeper_for_child(
        self, ours: ExitStack, theirs: ExitStack
    ) -> tuple[socket.socket | None, socket.socket | None]:
        """Return (our end, child's end) if this process will stand in; (None, inherited end) if another one does."""
        if self._notifier:
            return None, None
        if self._keeper is not None:
            return None, self._keeper
        our_end, its_end = socket.socketpair()
        our_end.setblocking(False)
        return ours.enter_context(our_end), theirs.enter_context(its_end)

    def _start_child(self, link: socket.socket, keeper: socket.socket | None) -> "subprocess.Popen[bytes]":
        environment = upgrade.for_child(self._environment, link.fileno())
        files = [link.fileno()]
        if keeper is not None:
            environment[KEEPER] = str(keeper.fileno())
            files.append(keeper.fileno())
        command = [sys.executable, *sys.orig_argv[1:]]
        # Use a separate process group: the terminal sends Ctrl-C to the first process, which passes it on.
        return subprocess.Popen(command, env=environment, pass_fds=files, stdin=subprocess.DEVNULL, process_group=0)

    async def _hand_over(self, link: upgrade.Link, child: "subprocess.Popen[bytes]") -> None:
        server = self._server
        sent = _named_sockets(server)
        await link.send_sockets(sent)
        await link.send_state(self._state())
        await link.expect("ready", upgrade.START_S)
        server.hold(True)
        known = {sock.fileno() for _, sock in sent}
        await link.send_sockets([each for each in _named_sockets(server) if each[1].fileno() not in known])
        await link.send_state(self._state())
        await link.expect("serving", upgrade.SWITCH_S)
        self._notifier.say(f"MAINPID={child.pid}")
        if self._keeper is not None:
            self._keeper.send(f"{child.pid}\n".encode())
        with suppress(OSError):
            await link.send({"is": "yours"})

    def _state(self) -> upgrade.State:
        clusters = self._server.clusters
        return upgrade.State(
            self._generation,
            [each.cluster.name for each in clusters if not any(each.not_ready())],
            {each.cluster.name: [str(address) for address in each.cluster.bootstrap] for each in clusters},
            {each.cluster.name: {str(id): list(at) for id, at in each.routes.upstreams.items()} for each in clusters},
            str(self._server.config.record or ""),
            {
                each.cluster.name: {str(id): list(held) for id, held in each.given_ports.items()}
                for each in clusters
                if each.cluster.any_brokers is not None
            },
        )

    async def _report(self, link: upgrade.Link) -> None:
        """Report the number of connections still open here to the successor."""
        with suppress(OSError):
            while True:
                await link.send({"is": "drains", "connections": self._server.connections})
                await asyncio.sleep(upgrade.REPORT_S)


def _named_sockets(server: Server) -> list[tuple[str, socket.socket]]:
    return [(listener.name, sock) for listener in server.listeners for sock in listener.sockets]


def _end_child(child: "subprocess.Popen[bytes]") -> None:
    """End a new kproxy that is not to take over."""
    with suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
