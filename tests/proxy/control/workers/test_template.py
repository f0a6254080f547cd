import os
import select
import socket

import pytest

from kproxy.proxy.control.workers import template
from kproxy.proxy.control.workers.channel import pair

PATIENCE_S = 30.0


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
