"""The packet filter of the kernel: a program of classic BPF, made of ports and interfaces.

Duty: `program` generates the instructions. Packets begin at their IP header (the socket is SOCK_DGRAM), so one program
serves every kind of interface. ICMP errors that quote an undelivered TCP packet are matched by that packet's ports.
Packets that the kernel cannot classify cheaply are accepted and left to `capture`: fragments after the first, IPv6 with
extension headers, a second VLAN tag. A loopback interface shows each packet going out and again coming in: the former
is left out.

Format: linux/Documentation/networking/filter.rst; the offsets from -0x1000 on are "ancillary data". Bounded by
MAX_PORTS ports, and MAX_INTERFACES: jumps reach 255 instructions. Refuses to know sockets.
"""

from collections.abc import Collection
from struct import pack

MAX_PORTS = 64
MAX_INTERFACES = 32

SNAP = 0x40000  # bytes per packet at most: more than the largest that the kernel merges (GRO)

_OUTGOING = 4  # PACKET_OUTGOING of linux/if_packet.h
_PROTOCOL, _KIND, _INTERFACE = (0xFFFFF000 + offset for offset in (0, 4, 8))
_LOAD, _LOAD_HALF, _LOAD_BYTE, _LOAD_HALF_AT_X = 0x20, 0x28, 0x30, 0x48
_LOAD_BYTE_AT_X = 0x50
_X_IS, _X_IS_HEADER, _X_IS_A = 0x01, 0xB1, 0x07
_AND, _SHIFT_LEFT, _ADD, _ADD_X = 0x54, 0x64, 0x04, 0x0C
_JUMP, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x05, 0x15, 0x45, 0x06

_IPV4, _IPV6, _TAG, _SERVICE_TAG = 0x0800, 0x86DD, 0x8100, 0x88A8
_TCP, _ICMP, _ICMP6 = 6, 1, 58
_UNREACHABLE, _UNREACHABLE6, _TOO_BIG6 = 3, 1, 2  # ICMP types that quote a packet; 3 includes "too big" in IPv4
_EXTENSIONS = (0, 43, 44, 51, 60)  # hop by hop, routing, fragment, authentication, destination

# (code, value, label to jump to if it holds, label if not); None: the next instruction
_Step = tuple[int, int, str | None, str | None]


def program(ports: Collection[int], interfaces: Collection[int] = (), loopbacks: Collection[int] = ()) -> list[bytes]:
    """Return instructions of 8 bytes each that accept TCP from or to these ports (none, or more than MAX_PORTS: any).

    ICMP errors about such packets are accepted too.

    interfaces: numbers of the watched interfaces; none, or more than MAX_INTERFACES: all. loopbacks: numbers of
    interfaces whose outgoing packets are dropped.
    """
    steps: list[_Step | str] = []
    if 0 < len(interfaces) <= MAX_INTERFACES:
        steps.append((_LOAD, _INTERFACE, None, None))
        steps += [(_IF_EQUAL, number, "kind", None) for number in sorted(interfaces)]
        steps.append((_RETURN, 0, None, None))
    steps.append("kind")
    if loopbacks:
        steps += [(_LOAD, _KIND, None, None), (_IF_EQUAL, _OUTGOING, None, "protocol"), (_LOAD, _INTERFACE, None, None)]
        steps += [(_IF_EQUAL, number, "drop", None) for number in sorted(loopbacks)[:MAX_INTERFACES]]
    steps += [
        "protocol",
        (_LOAD, _PROTOCOL, None, None),
        (_IF_EQUAL, _IPV4, "ipv4", None),
        (_IF_EQUAL, _IPV6, "ipv6", None),
        (_IF_EQUAL, _TAG, "accept", None),
        (_IF_EQUAL, _SERVICE_TAG, "accept", None),
        "drop",
        (_RETURN, 0, None, None),
        "ipv4",
        (_LOAD_BYTE, 9, None, None),
        (_IF_EQUAL, _ICMP, "icmp", None),
        (_IF_EQUAL, _TCP, None, "drop_here"),
        (_LOAD_HALF, 6, None, None),
        (_IF_ANY_BIT, 0x1FFF, "accept", None),
        (_X_IS_HEADER, 0, None, None),
        (_JUMP, 0, "ports", None),
        "ipv6",
        (_LOAD_BYTE, 6, None, None),
        *((_IF_EQUAL, kind, "accept", None) for kind in _EXTENSIONS),
        (_X_IS, 40, None, None),
        (_IF_EQUAL, _TCP, "ports", None),
        (_IF_EQUAL, _ICMP6, None, "drop_here"),
        (_LOAD_BYTE, 40, None, None),
        (_IF_EQUAL, _UNREACHABLE6, "quoted_ipv6", None),
        (_IF_EQUAL, _TOO_BIG6, None, "drop_here"),
        "quoted_ipv6",
        (_LOAD_BYTE, 40 + 8 + 6, None, None),
        (_X_IS, 40 + 8 + 40, None, None),
        (_IF_EQUAL, _TCP, "ports", "drop_here"),
        "icmp",
        (_X_IS_HEADER, 0, None, None),
        (_LOAD_BYTE_AT_X, 0, None, None),
        (_IF_EQUAL, _UNREACHABLE, None, "drop_here"),
        (_LOAD_BYTE_AT_X, 8 + 9, None, None),
        (_IF_EQUAL, _TCP, None, "drop_here"),
        (_LOAD_BYTE_AT_X, 8, None, None),  # the quoted header's length, in words
        (_AND, 15, None, None),
        (_SHIFT_LEFT, 2, None, None),
        (_ADD_X, 0, None, None),
        (_ADD, 8, None, None),
        (_X_IS_A, 0, None, None),
        (_JUMP, 0, "ports", None),
        "drop_here",
        (_RETURN, 0, None, None),
        "accept",
        (_RETURN, SNAP, None, None),
        "ports",
    ]
    if 0 < len(ports) <= MAX_PORTS:
        for end in (0, 2):
            steps.append((_LOAD_HALF_AT_X, end, None, None))
            steps += [(_IF_EQUAL, port, "found", None) for port in sorted(ports)]
        steps.append((_RETURN, 0, None, None))
    steps += ["found", (_RETURN, SNAP, None, None)]
    return _assembled(steps)


def _assembled(steps: list[_Step | str]) -> list[bytes]:
    """Return the instructions, with labels replaced by distances."""
    places: dict[str, int] = {}
    count = 0
    for step in steps:
        if isinstance(step, str):
            places[step] = count
        else:
            count += 1
    written: list[bytes] = []
    for step in steps:
        if isinstance(step, str):
            continue
        code, value, holds, fails = step
        behind = len(written) + 1
        then, other = (0 if name is None else places[name] - behind for name in (holds, fails))
        if code == _JUMP:
            value, then = then, 0
        written.append(pack("=HBBI", code, then, other, value))
    return written
