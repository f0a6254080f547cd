"""The test plays systemd: it passes sockets by LISTEN_FDS and reads the messages to NOTIFY_SOCKET."""

import asyncio
import json
import os
import signal
import socket
import sys

import pytest
import uvloop

from tests.ports import free_ports
from tests.proxy.live import HOST
from tests.proxy.load import Brokers, Kproxy, Load, kproxy_process, until

# As under systemd, the sockets are descriptors 3 and up, and LISTEN_PID is the pid of the process itself.
ACTIVATE = """
import fcntl, os, sys
count, rest = int(sys.argv[1]), sys.argv[2:]
high = [fcntl.fcntl(int(file), fcntl.F_DUPFD, 100) for file in rest[:count]]
for number, file in enumerate(high):
    os.dup2(file, 3 + number)
    os.close(file)
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = str(os.getpid()), str(count)
sys.argv = rest[count:]
from kproxy.cli import main
sys.orig_argv = [sys.orig_argv[0], "-c", "from kproxy.cli import main; main()", *sys.argv[1:]]
main()
"""


class Manager:
    """The socket on which systemd receives notifications."""

    def __init__(self, folder):
        self.path = str(folder / "notify")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.sock.setblocking(False)
        self.received = []
        asyncio.get_running_loop().add_reader(self.sock, lambda: self.received.append(self.sock.recv(4096).decode()))

    async def waits_for(self, text, since=0):
        found = []
        await until(lambda: found.extend(each for each in self.received[since:] if text in each.splitlines()) or found)
        return found[0].splitlines()


def live(test):
    async def limited():
        async with asyncio.timeout(60):
            await test

    uvloop.run(limited())


def written(folder, brokers, port, admin, **settings):
    file = folder / "kproxy.toml"
    cluster = {"name": "main", "listen": f"{HOST}:{port}", "bootstrap": [brokers.address]}
    above = {"admin": f"{HOST}:{admin}", "drain_timeout_s": 1} | settings
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in above.items()]
    file.write_text(
        "".join([*lines, "[[cluster]]\n", *(f"{name} = {json.dumps(cluster[name])}\n" for name in cluster)])
    )
    return file


class Activated(Kproxy):
    """A kproxy that inherits these sockets from systemd."""

    def __init__(self, file, admin, sockets):
        self.sockets = list(sockets)
        files = [str(sock.fileno()) for sock in self.sockets]
        super().__init__(file, admin, (sys.executable, "-c", ACTIVATE, str(len(files)), *files, "kproxy"))

    async def start(self, **variables):
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
        self.process = await asyncio.create_subprocess_exec(
            *(*self._command, "run", "--config", str(self.file)),
            env=environment | variables,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=[sock.fileno() for sock in self.sockets],
        )
        self._reading = asyncio.create_task(self._read())
        return self


def test_a_client_can_connect_to_a_socket_of_systemd_before_kproxy_starts(tmp_path):
    async def test():
        brokers = Brokers(1)
        port, admin = free_ports(4), free_ports(1)
        sockets = [socket.create_server((HOST, each)) for each in (port, port + 2, admin)]
        early = asyncio.create_task(asyncio.to_thread(socket.create_connection, (HOST, port), 10))
        await early
        kproxy = await Activated(written(tmp_path, brokers, port, admin), admin, sockets).start(
            LISTEN_FDNAMES="main:main/1:admin"
        )
        try:
            await kproxy.ready()
            for sock in sockets:
                sock.close()
            async with Load(port) as load, Load(port + 2) as of_broker:
                await load.more()
            load.assert_lossless()
            of_broker.assert_lossless()
            assert await kproxy.metric('kproxy_listeners{cluster="main"}') == 2
            assert await kproxy.end() == 0
        finally:
            await kproxy.kill()

    live(test())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("other", "no cluster is called 'other': FileDescriptorName= is one of main, admin"),
        ("main", "no listener is there: make ListenStream= equal to one of "),
    ],
)
def test_a_socket_without_a_listener_is_an_error(tmp_path, name, reason):
    async def test():
        brokers = Brokers(1)
        port, admin = free_ports(4) + 1, free_ports(1)
        sock = socket.create_server((HOST, port - 1))
        kproxy = await Activated(written(tmp_path, brokers, port, admin), admin, [sock]).start(LISTEN_FDNAMES=name)
        try:
            await kproxy.says(reason)
            assert await kproxy.process.wait() == 2
        finally:
            await kproxy.kill()

    live(test())


def test_systemd_is_notified_of_start_reload_takeover_and_stop(tmp_path):
    async def test():
        brokers = Brokers(1)
        manager = Manager(tmp_path)
        port, admin = free_ports(4), free_ports(1)
        file = written(tmp_path, brokers, port, admin)
        variables = {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "300000"}
        async with kproxy_process(file, admin, **variables) as kproxy:
            ready = await manager.waits_for("READY=1")
            assert f"MAINPID={kproxy.pid}" in ready and "main at " in ready[-1]
            since = len(manager.received)
            await manager.waits_for("WATCHDOG=1", since)
            kproxy.signal(signal.SIGHUP)
            reloading = await manager.waits_for("RELOADING=1", since)
            assert any(line.startswith("MONOTONIC_USEC=") for line in reloading)
            await manager.waits_for("READY=1", since + 1)
            since = len(manager.received)
            kproxy.signal(signal.SIGUSR2)
            async with Load(port) as load:
                line = await kproxy.says("has taken over")
                new = line.split("process ")[-1].split()[0]
                await manager.waits_for(f"MAINPID={new}", since)
                await manager.waits_for("READY=1", since)
                await asyncio.wait_for(kproxy.process.wait(), 20)  # no stand-in remains: systemd has the new main pid
                await load.more()
                since = len(manager.received)
                os.kill(int(new), signal.SIGTERM)
                await manager.waits_for("STOPPING=1", since)
            assert load.unanswered == 0

    live(test())


def test_a_start_that_waits_for_its_cluster_extends_the_timeout_of_systemd(tmp_path):
    async def test():
        manager = Manager(tmp_path)
        port, admin = free_ports(4), free_ports(2)
        brokers = Brokers(1, port=admin + 1)
        brokers.close()
        file = written(tmp_path, brokers, port, admin)
        kproxy = await Kproxy(file, admin).start(NOTIFY_SOCKET=manager.path)
        try:
            waiting = await manager.waits_for("EXTEND_TIMEOUT_USEC=30000000")
            assert any(line.startswith("STATUS=waiting: cluster main") for line in waiting)
            Brokers(1, port=admin + 1)
            await manager.waits_for("READY=1")
            await kproxy.end()
        finally:
            await kproxy.kill()

    live(test())
