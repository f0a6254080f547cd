"""Drops the privileges of the process: none is needed once the packet socket is open.

Duty: `drop` becomes an ordinary user if root was only borrowed (sudo, --user), and drops all capabilities except those
to be kept. Call it before other threads start, since each thread has its own capabilities.

Formats: capabilities(7), capset(2), prctl(2). Refuses to know the purpose of the privileges.
"""

import ctypes
import os
import pwd
from collections.abc import Collection, Mapping
from contextlib import suppress
from struct import pack

from kproxy.errors import KproxyError

DAC_READ_SEARCH, NET_RAW, SYS_PTRACE = 2, 13, 19

_VERSION = 0x20080522  # field `version` of struct __user_cap_header_struct
_LAST = 63
_KEEP_CAPABILITIES, _DROP_BOUNDING, _NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_ALL = 8, 24, 38, 47, 4


def user_to_become(asked: str | None, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (uid, gid) to become: the requested user, else the caller of sudo; None: stay as it is.

    Raises KproxyError if there is no such user, or kproxy is not root and cannot become another.
    """
    if asked is not None:
        try:
            found = pwd.getpwuid(int(asked)) if asked.isdecimal() else pwd.getpwnam(asked)
            uid, gid = found.pw_uid, found.pw_gid
        except KeyError:
            if not asked.isdecimal():
                raise KproxyError(f"--user {asked}: there is no such user") from None
            uid = gid = int(asked)
        if uid != os.geteuid() and os.geteuid() != 0:
            raise KproxyError(f"--user {asked}: only root can become another user; leave it out")
        return (uid, gid) if uid != os.geteuid() else None
    if os.geteuid() == 0:
        caller, group = environment.get("SUDO_UID", ""), environment.get("SUDO_GID", "")
        if caller.isdecimal() and group.isdecimal() and caller != "0":
            return int(caller), int(group)
    return None


def drop(user: tuple[int, int] | None, keep: Collection[int] = ()) -> str:
    """Become that user, and drop all capabilities except those to `keep`; returns a text with the resulting identity.

    A process that may not become another user (a container without CAP_SETUID) keeps its user, without capabilities.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_LAST + 1):
        if number not in keep:
            libc.prctl(_DROP_BOUNDING, number, 0, 0, 0)  # needs CAP_SETPCAP; a process without it has less to lose
    if user is not None:
        libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
        with suppress(PermissionError):
            os.setgroups([])
        with suppress(PermissionError):
            os.setresgid(user[1], user[1], user[1])
            os.setresuid(user[0], user[0], user[0])
    libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    permitted = sum(1 << number for number in keep) & _permitted()
    low, high = permitted & 0xFFFFFFFF, permitted >> 32
    header = ctypes.create_string_buffer(pack("=Ii", _VERSION, 0))
    data = ctypes.create_string_buffer(pack("=6I", low, low, 0, high, high, 0))
    libc.capset(header, data)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return f"uid={os.geteuid()} gid={os.getegid()} capabilities={_permitted():#x}"


def has(capability: int) -> bool:
    """Whether this process has a capability now."""
    return bool(_permitted() >> capability & 1)


def _permitted() -> int:
    with suppress(OSError, ValueError), open("/proc/thread-self/status") as status:  # noqa: PTH123
        for line in status:
            if line.startswith("CapPrm:"):
                return int(line.split()[1], 16)
    return 0
