"""Frames -> a pcapng file of synthetic TCP packets, for Wireshark and `kproxy convert`.

Duty: a section with nanoseconds and one interface of raw IP; for each connection a stream with true addresses, times
and sizes, a handshake if its start was recorded, and an end if its end was; a comment on the first packet of each
frame. Bytes left out of a frame look like a packet cut by the snap length. TCP checksums are zero, as network cards
often leave them.
Reference: draft-ietf-opsawg-pcapng. Memory: all packets. Refuses to know Kafka.
"""

import ipaddress
from struct import Struct
from typing import BinaryIO

from kproxy import __version__
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT

_SECTION, _INTERFACE, _PACKET = 0x0A0D0D0A, 1, 6
_COMMENT, _USER_APPLICATION, _IF_TSRESOL, _IF_NAME = 1, 4, 9, 2
_RAW_IP = 101
_NANOSECONDS = 9
_PAYLOAD = 65_000  # bytes per packet
_FIRST_BYTES = 12  # bytes sent at a frame's start time
_SYN, _ACK, _PUSH, _FIN = 2, 16, 8, 1
_TCP = Struct(">HHIIBBHHH")
_IPV4 = Struct(">BBHHHBBH4s4s")
_IPV6 = Struct(">IHBB16s16s")
_OPTION = Struct("<HH")
_BLOCK = Struct("<II")
_MAX_COMMENT = 60_000


class PacketFile:
    """Collects packets; `close` writes them to an open file in the order of time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packets: list[tuple[int, bytes, int, str]] = []
        section = b"\x4d\x3c\x2b\x1a" + Struct("<HHq").pack(1, 0, -1)
        self._block(_SECTION, section + _options((_USER_APPLICATION, f"kproxy {__version__}".encode())))
        interface = Struct("<HHI").pack(_RAW_IP, 0, 0)
        self._block(_INTERFACE, interface + _options((_IF_NAME, b"kproxy"), (_IF_TSRESOL, bytes([_NANOSECONDS]))))

    def stream(self, info: ConnectionInfo) -> "Stream":
        return Stream(self, info)

    def packet(self, now_ns: int, data: bytes, size: int, comment: str) -> None:
        """Add a packet of `size` bytes; `data` has those that are present."""
        self._packets.append((now_ns, data, size, comment))

    def close(self) -> int:
        """Write the packets; returns their number."""
        for packet in sorted(self._packets, key=lambda packet: packet[0]):  # stable, within a stream
            self._write(*packet)
        return len(self._packets)

    def _write(self, now_ns: int, data: bytes, size: int, comment: str) -> None:
        high, low = now_ns >> 32, now_ns & 0xFFFFFFFF
        body = Struct("<IIIII").pack(0, high, low, len(data), size) + data + bytes(-len(data) % 4)
        if comment:
            body += _options((_COMMENT, comment.encode(errors="replace")[:_MAX_COMMENT]))
        self._block(_PACKET, body)

    def _block(self, kind: int, body: bytes) -> None:
        length = len(body) + 12
        self._file.write(_BLOCK.pack(kind, length) + body + length.to_bytes(4, "little"))


class Stream:
    """One connection."""

    def __init__(self, file: PacketFile, info: ConnectionInfo) -> None:
        self._file = file
        self._ports = info.client_port & 0xFFFF, info.broker_port & 0xFFFF
        addresses = [_address(info.client_address), _address(info.broker_address)]
        if len({len(address) for address in addresses}) > 1:
            addresses = [b"\0" * 10 + b"\xff\xff" + each if len(each) == 4 else each for each in addresses]
        self._addresses = addresses
        # First sequence numbers, per side. Streams with equal ones and equal first bytes would count as one connection,
        # captured before and after address translation.
        self._next = [info.id & 0xFFFFFFFF, info.id >> 31]

    def begin(self, now_ns: int) -> None:
        """Add the handshake."""
        for side, flags in ((CLIENT, _SYN), (BROKER, _SYN | _ACK)):
            self._send(side, now_ns, flags, b"", 0, "")
            self._next[side] += 1
        self._send(CLIENT, now_ns, _ACK, b"", 0, "")

    def frame(self, side: int, start_ns: int, end_ns: int, data: bytes, size: int, comment: str) -> None:
        """Add `size` bytes of a side; `data` has those that are present, the first ones came at `start_ns`."""
        pos = 0
        while pos < size:
            payload = min(_PAYLOAD, size - pos)
            now_ns = end_ns
            if not pos and start_ns != end_ns:
                payload, now_ns = min(_FIRST_BYTES, size - 1), start_ns
            self._send(side, now_ns, _ACK | _PUSH, data[pos : pos + payload], payload, comment if not pos else "")
            self._next[side] += payload
            pos += payload

    def end(self, now_ns: int) -> None:
        for side in (CLIENT, BROKER):
            self._send(side, now_ns, _FIN | _ACK, b"", 0, "")
            self._next[side] += 1
        self._send(CLIENT, now_ns, _ACK, b"", 0, "")

    def _send(self, side: int, now_ns: int, flags: int, data: bytes, payload: int, comment: str) -> None:
        peer = 1 - side
        acknowledged = self._next[peer] & 0xFFFFFFFF if flags & _ACK else 0
        sequence = self._next[side] & 0xFFFFFFFF
        tcp = _TCP.pack(self._ports[side], self._ports[peer], sequence, acknowledged, 0x50, flags, 0xFFFF, 0, 0)
        length = len(tcp) + payload
        source, destination = self._addresses[side], self._addresses[peer]
        if len(source) == 4:
            ip = _IPV4.pack(0x45, 0, 20 + length, 0, 0x4000, 64, 6, 0, source, destination)
            ip = ip[:10] + _checksum(ip).to_bytes(2, "big") + ip[12:]
        else:
            ip = _IPV6.pack(6 << 28, length, 6, 64, source, destination)
        head = ip + tcp
        self._file.packet(now_ns, head + data, len(head) + payload, comment)


def _address(text: str) -> bytes:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).packed
    except ValueError:  # a name, or a Unix socket
        return b"\x7f\0\0\1"


def _checksum(header: bytes) -> int:
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, len(header), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _options(*options: tuple[int, bytes]) -> bytes:
    packed = b"".join(_OPTION.pack(kind, len(data)) + data + bytes(-len(data) % 4) for kind, data in options)
    return packed + _OPTION.pack(0, 0)
