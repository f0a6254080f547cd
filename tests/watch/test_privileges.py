"""kproxy drops root's privileges except those to keep. Each test runs in its own process, which loses them."""

import os
import subprocess
import sys

import pytest

from kproxy.errors import KproxyError
from kproxy.watch.privileges import user_to_become
from tests.watch.live import why_not

needs_root = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

DROP = """
import os, socket, sys, threading
from kproxy.watch import privileges
sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
user = None if sys.argv[1] == "-" else (int(sys.argv[1]), int(sys.argv[1]))
print(privileges.drop(user, [int(each) for each in sys.argv[2:]]))
print(os.getuid(), os.geteuid(), os.getgid(), os.getgroups())
status = {line.split()[0]: line.split()[1:] for line in open("/proc/self/status")}
print(*(int(status[name][0], 16) for name in ("CapPrm:", "CapEff:", "CapInh:", "CapAmb:")), status["NoNewPrivs:"][0])
sock.bind(("lo", 3))  # the socket is as good as ever
for make in (lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0), lambda: open("/etc/shadow")):
    try:
        make()
        print("may")
    except PermissionError:
        print("may not")
threading.Thread(target=lambda: print(privileges.has(13))).start()
"""


def dropped(*arguments, prefix=()):
    command = [*prefix, sys.executable, "-c", DROP, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


@needs_root
def test_another_user_has_nothing():
    who, ids, capabilities, *may, thread = dropped(65534)
    assert who == "uid=65534 gid=65534 capabilities=0x0"
    assert ids == "65534 65534 65534 []"
    assert capabilities == "0 0 0 0 1"
    assert may == ["may not", "may not"]
    assert thread == "False"


@needs_root
def test_root_without_capabilities():
    who, ids, capabilities, may_capture, *_ = dropped("-")
    assert who == "uid=0 gid=0 capabilities=0x0"
    assert ids.startswith("0 0 0")
    assert capabilities == "0 0 0 0 1"
    assert may_capture == "may not"


@needs_root
def test_a_capability_to_keep_is_kept():
    who, _, capabilities, *may, _ = dropped(65534, 2, 19)
    assert who.startswith("uid=65534")
    assert capabilities.split()[:2] == [str(1 << 2 | 1 << 19)] * 2
    assert may == ["may not", "may"]  # CAP_DAC_READ_SEARCH


@needs_root
def test_without_cap_setuid_it_keeps_its_user():
    """As in a container that has CAP_NET_RAW and nothing else."""
    only = ("capsh", "--drop=cap_setuid,cap_setgid,cap_setpcap", "--", "-c", 'exec "$@"', "-")
    who, ids, capabilities, *_ = dropped(65534, prefix=only)
    assert who == "uid=0 gid=0 capabilities=0x0"
    assert (ids.split()[0], capabilities) == ("0", "0 0 0 0 1")


def test_under_sudo_it_becomes_the_calling_user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert user_to_become(None, {"SUDO_UID": "1000", "SUDO_GID": "1001"}) == (1000, 1001)
    assert user_to_become(None, {"SUDO_UID": "0", "SUDO_GID": "0"}) is None
    assert user_to_become(None, {}) is None
    assert user_to_become("nobody", {"SUDO_UID": "1000", "SUDO_GID": "1001"}) == (65534, 65534)
    assert user_to_become("4321", {}) == (4321, 4321)
    with pytest.raises(KproxyError, match="there is no such user"):
        user_to_become("nobody-at-all", {})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert user_to_become(None, {"SUDO_UID": "1"}) is None
    with pytest.raises(KproxyError, match="only root can become another user"):
        user_to_become("nobody", {})
