"""The PROXY protocol's header, version 1 or 2, before a client's first bytes: its length, and the client's address.

Source: https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, section 2. Refuses to know whether a header can be
trusted.
"""

import re
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple

from kproxy.addresses import numeric

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_FIXED = 16  # bytes of version 2 before addresses
_LONGEST_LINE = 107  # bytes of a header of version 1, including CRLF
_MOST_ADDRESSES = 4096  # largest plausible size of addresses and TLVs of version 2
_LINE = re.compile(rb"PROXY (?:UNKNOWN[^\r\n]*|TCP[46] ([0-9a-fA-F:.]+) [0-9a-fA-F:.]+ (\d{1,5}) \d{1,5})\r\n")
_FAMILIES = {0x11: (AF_INET, 4), 0x21: (AF_INET6, 16)}  # TCP over IPv4, over IPv6

PENDING = -1


class Header(NamedTuple):
    """length: in bytes; 0: no header, PENDING: incomplete. client: the client's address and port, if it has them."""

    length: int
    client: tuple[str, int] | None = None


NONE = Header(0)


def header(head: bytes | bytearray) -> Header:
    """The header that a client's first bytes begin with."""
    if head[:6] == b"PROXY "[: len(head[:6])]:
        return _version_1(bytes(head[:_LONGEST_LINE]))
    if head[:12] == _SIGNATURE[: len(head[:12])]:
        return _version_2(bytes(head[: _FIXED + _MOST_ADDRESSES]))
    return NONE


def _version_1(head: bytes) -> Header:
    found = _LINE.match(head)
    if found is None:
        return Header(PENDING) if b"\n" not in head and len(head) < _LONGEST_LINE else NONE
    client = None if found[1] is None else (_one_form(found[1].decode()), int(found[2]))
    return Header(found.end(), client)


def _version_2(head: bytes) -> Header:
    if len(head) < _FIXED:
        return Header(PENDING)
    command, family, size = head[12], head[13], int.from_bytes(head[14:16])
    if command not in (0x20, 0x21) or size > _MOST_ADDRESSES:
        return NONE
    if len(head) < _FIXED + size:
        return Header(PENDING)
    kind, width = _FAMILIES.get(family, (None, 0))
    if command == 0x20 or kind is None or size < 2 * width + 4:
        return Header(_FIXED + size)
    port = int.from_bytes(head[_FIXED + 2 * width :][:2])
    return Header(_FIXED + size, (_one_form(inet_ntop(kind, head[_FIXED:][:width])), port))


def _one_form(host: str) -> str:
    """Return an address as a running kproxy writes it; other text stays as it is."""
    return str(numeric(host) or host)
