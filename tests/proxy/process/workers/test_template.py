import os
import select
import socket
import subprocess
import sys

import pytest

from kproxy.proxy.process.workers import template
from kproxy.proxy.sockets.channel import pair

PATIENCE_S = 30.0
# A program of its own: it forks.
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
    select.select([template._sock], [], [])  # its template has told so, which is not read yet
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


@pytest.mark.parametrize("is_read", [True, False], ids=["heard", "unheard"])
def test_it_ends_without_a_word_when_its_parent_has_gone(capfd, is_read):
    """Also when the parent has not read that a worker was forked, or has ended: the kernel reports a reset then."""
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


def test_what_it_told_before_it_was_killed_is_heard_though_it_left_a_request_unread():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True [0]\n", "")
