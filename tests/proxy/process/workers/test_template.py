import os
import select
import socket
import subprocess
import sys

import pytest

from kproxy.proxy.process.workers import template
from kproxy.proxy.sockets.channel import pair

PATIENCE_S = 30.0
# A separate program, because it forks.
KILLED = """
import asyncio, os, select, signal
import uvloop
from kproxy.proxy.sockets.channel import pair
from kproxy.proxy.process.workers.template import Template

async def main():
    ended, lost = [], asyncio.Event()
    template.watch(lambda *of: ended.append(of), lost.set)
    ours, theirs = pair()
    pid = await template.fork(theirs)
    ours.close()  # the worker ends
    select.select([template._sock], [], [])  # the template's report of that is there, unread
    os.kill(template.pid, signal.SIGSTOP)
    template._sock.send(b"unread")
    os.kill(template.pid, signal.SIGKILL)
    os.waitpid(template.pid, 0)
    await lost.wait()
    print({of for of, _ in ended} == {pid}, [status for _, status in ended])

template = Template(lambda sock: sock.recv(1), 0.1)
uvloop.run(main())
"""


def ends_at_once(sock: socket.socket) -> None:
    sock.close()


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
def test_the_template_exits_silently_if_its_parent_has_ended(capfd, is_read):
    """Also if the parent left the reports of a forked or ended worker unread: the kernel then reports a reset."""
    ours, theirs = pair()
    mine, worker = pair()
    with theirs:
        pid = template._start(theirs, ends_at_once, 0.1)
    with mine, worker, ours:
        socket.send_fds(ours, [b"1"], [worker.fileno()])
        ours.setblocking(False)
        for _ in ("forked", "ended") if is_read else ("forked",):
            assert select.select([ours], [], [], PATIENCE_S)[0]
            if is_read:
                assert ours.recv(4096)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert capfd.readouterr().err == ""


def test_reports_of_a_killed_template_arrive_although_it_left_a_request_unread():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True [0]\n", "")
