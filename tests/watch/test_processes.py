"""Whose a connection is: found in /proc, for processes here and in other network namespaces."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kproxy.watch import processes
from kproxy.watch.processes import look
from tests.watch.live import BROKER_PORT, Kproxy, machine, start_cluster, until, why_not

COMMAND = Path("/proc/self/comm").read_text().strip()
ID = "4f0a1b2c" * 8

# Stays connected until its standard input ends.
STAYS = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(bytes.fromhex("00000014 0012 0003 00000001 0004 73686f70 00 02 61 02 31 00".replace(" ", "")))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_ends_of_a_connection_of_this_process(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as client:
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            here, there = (*client.getsockname()[:2],), (*server.getsockname()[:2],)
            ends = (*here, *there), (*there, *here)
            found = look([*ends, ("192.0.2.1", 1, "192.0.2.2", 2)])
    assert {end: (process.pid, process.command) for end, process in found.items()} == dict.fromkeys(
        ends, (os.getpid(), COMMAND)
    )


def test_containers_by_their_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PROC", tmp_path)
    for pid, group in enumerate(
        (
            f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n",
            f"12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n",
            f"0::/machine.slice/libpod-{ID}.scope/container\n",
            "0::/user.slice/user-1000.slice/session-2.scope\n",
        )
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "comm").write_text("java\n")
        (folder / "cgroup").write_text(group)
    found = [processes._process(pid) for pid in range(5)]
    assert [each and each.container for each in found] == [*[ID[:12]] * 3, None, None]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_connections_show_their_processes(tmp_path):
    with machine("whose") as here:
        start_cluster(here)
        options = ("--interface", "lo", "--port", str(BROKER_PORT), "--processes", "--user", "nobody")
        watch = Kproxy(here, tmp_path, 9464, "watch", *options)
        command = here.command(sys.executable, "-c", STAYS, "127.0.1.1", str(BROKER_PORT))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            until("its process", lambda: any("client_process" in row for row in watch.api("connections")))
            (row,) = watch.api("connections")
            assert row["client_process"]["pid"] == client.pid
            assert row["broker_process"]["command"].startswith("python")
            assert row["client_id"] == "shop"
        assert "Traceback" not in watch.end()
