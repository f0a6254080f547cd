"""PROXY protocol, versions 1 and 2: a load balancer reports the address of its client in this header.

Duty: bytes to a `Header` and back. The format is HAProxy's doc/proxy-protocol.txt (2020/03/05). `read` takes the bytes
that have arrived and returns how many further bytes may be read, so that kproxy never reads beyond the header: the
client's first request or its TLS hello follows.

Bounds: a header of version 1 has at most 107 bytes, by the format; one of version 2 at most MAX_BYTES, although the
format allows 64 KiB. Refuses to know sockets, and which peers are trusted to send a header.

This is not a library, since the parser is small and existing ones read from an asyncio stream, while a relay has a
socket.
"""

import ipaddress
import re
import struct
from typing import NamedTuple

from kproxy.addresses import numeric
from kproxy.errors import Malformed
from kproxy.protocol.records import crc32c
from kproxy.proxy.config.addresses import Address

V1 = "v1"
V2 = "v2"
V1_BYTES = 107
MAX_BYTES = 16 * 1024  # the size of HAProxy's own buffer

V1_START = b"PROXY "
V2_START = b"\r\n\r\n\0\r\nQUIT\n"

# Types of the fields that follow the addresses of version 2 (TLVs).
AUTHORITY = 0x02  # the host name in the client's SNI
CRC32C = 0x03
NOOP = 0x04

_FIXED = struct.Struct("!12sBBH")  # signature, version and command, family and transport, length of the rest
_ADDRESSES = {1: struct.Struct("!4s4sHH"), 2: struct.Struct("!16s16sHH"), 3: struct.Struct("!108s108s")}
_TLV = struct.Struct("!BH")
_INET, _INET6, _UNIX = 1, 2, 3
_STREAM = 1
_LOCAL, _PROXY = 0, 1

_V1_SHORTEST = b"PROXY UNKNOWN\r\n"
_DECIMAL = re.compile(rb"0|[1-9][0-9]{0,4}")
_FIELDS_OF_V1 = 6

# The protocol of clients that send no header, by their first bytes.
_INSTEAD = (
    (re.compile(rb"\x16\x03"), "a TLS hello"),
    (re.compile(rb"[A-Z]{3,7} /"), "an HTTP request"),
    (re.compile(rb"\0[\0-\x06]"), "a Kafka request"),
)


class Header(NamedTuple):
    """The content of a header."""

    version: str  # V1 or V2
    client: Address | None  # None: the connecting peer; a health check of the balancer itself, or an unknown family
    server: Address | None  # the address that the client dialled
    tlvs: tuple[tuple[int, bytes], ...] = ()  # (type, value), without NOOP and CRC32C

    @property
    def authority(self) -> str | None:
        """The host name that the client requested; None if the header has none, or one that is not ASCII."""
        for kind, value in self.tlvs:
            if kind == AUTHORITY:
                try:
                    return value.decode("ascii")
                except UnicodeDecodeError:
                    return None
        return None


def read(data: bytes | bytearray) -> Header | int:
    """Return the header, or the number of further bytes that it has at least: at most so many may be read.

    Raises Malformed as soon as the bytes cannot be the beginning of a header.
    """
    if not data:
        return len(_V1_SHORTEST)
    if V2_START.startswith(data[: len(V2_START)]):
        return _read_v2(bytes(data))
    if V1_START.startswith(data[: len(V1_START)]):
        return _read_v1(bytes(data))
    raise Malformed(f"no PROXY protocol header, but {_instead(bytes(data))}")


def _instead(data: bytes) -> str:
    what = next((what for start, what in _INSTEAD if start.match(data)), "other bytes")
    return f"{what} ({data[:8].hex()})"


def _read_v1(data: bytes) -> Header | int:
    end = data.find(b"\r\n")
    if end < 0:
        if b"\n" in data or b"\r" in data[:-1] or len(data) >= V1_BYTES:
            raise Malformed(f"a PROXY protocol v1 header ends with CR LF within {V1_BYTES} bytes; {_shown(data)}")
        # Each missing field has at least a space and a character; then the end of the line.
        is_unknown = _V1_SHORTEST.startswith(data[:13])  # or may become UNKNOWN
        missing = 0 if is_unknown else max(0, _FIELDS_OF_V1 - 1 - data.count(b" "))
        left = 2 * missing + (1 if data.endswith(b"\r") else 2)
        return min(max(left, len(_V1_SHORTEST) - len(data)), V1_BYTES - len(data))
    fields = data[:end].split(b" ")
    if fields[1:2] == [b"UNKNOWN"]:
        return Header(V1, None, None)
    families = {b"TCP4": 4, b"TCP6": 6}
    if len(fields) != _FIELDS_OF_V1 or fields[1] not in families:
        raise Malformed(
            f"a PROXY protocol v1 header is TCP4, TCP6 or UNKNOWN, two addresses, two ports; {_shown(data)}"
        )
    try:
        hosts = [ipaddress.ip_address(field.decode("ascii")) for field in fields[2:4]]
    except ValueError:
        raise Malformed(f"an address of a PROXY protocol v1 header is none; {_shown(data)}") from None
    ports = [int(field) for field in fields[4:] if _DECIMAL.fullmatch(field)]
    if any(host.version != families[fields[1]] for host in hosts) or len(ports) != 2 or max(ports) > 65535:
        raise Malformed(f"addresses and ports of a PROXY protocol v1 header do not fit its family; {_shown(data)}")
    client, server = (_address(str(host), port) for host, port in zip(hosts, ports, strict=True))
    return Header(V1, client, server)


def _shown(data: bytes) -> str:
    return f"this one is {data[:V1_BYTES]!r}"


def _read_v2(data: bytes) -> Header | int:
    if len(data) < _FIXED.size:
        # The first byte excludes version 1, so the rest of the fixed part may be read.
        return _FIXED.size - len(data)
    _, version_command, family_transport, length = _FIXED.unpack_from(data)
    length = int(length)
    version, command = version_command >> 4, version_command & 15
    family, transport = family_transport >> 4, family_transport & 15
    if version != 2:
        raise Malformed(f"a PROXY protocol header of version {version}; kproxy reads 1 and 2")
    if command not in (_LOCAL, _PROXY):
        raise Malformed(f"command {command} of a PROXY protocol v2 header is neither LOCAL nor PROXY")
    if _FIXED.size + length > MAX_BYTES:
        raise Malformed(f"a PROXY protocol v2 header of {_FIXED.size + length} bytes; kproxy reads {MAX_BYTES} at most")
    if len(data) < _FIXED.size + length:
        return _FIXED.size + length - len(data)
    data = data[: _FIXED.size + length]
    if command == _LOCAL:  # the format requires to ignore the rest
        return Header(V2, None, None)
    if family > _UNIX or transport > 2:
        raise Malformed(f"family {family} and transport {transport} of a PROXY protocol v2 header are not assigned")
    if family == 0 or transport == 0:  # unspecified: skip the rest of the header
        return Header(V2, None, None)
    if transport != _STREAM:
        raise Malformed("a PROXY protocol v2 header says that the client came by datagrams, which Kafka has not")
    layout = _ADDRESSES[family]
    if length < layout.size:
        raise Malformed(f"a PROXY protocol v2 header of {length} bytes has no room for its addresses: {layout.size}")
    tlvs = _read_tlvs(data, _FIXED.size + layout.size)
    if family == _UNIX:
        return Header(V2, None, None, tlvs)
    source, target, source_port, target_port = layout.unpack_from(data, _FIXED.size)
    client, server = (
        _address(str(ipaddress.ip_address(host)), port) for host, port in ((source, source_port), (target, target_port))
    )
    return Header(V2, client, server, tlvs)


def _read_tlvs(data: bytes, pos: int) -> tuple[tuple[int, bytes], ...]:
    found = []
    while pos < len(data):
        if pos + _TLV.size > len(data):
            raise Malformed("a field of a PROXY protocol v2 header is cut short")
        kind, length = _TLV.unpack_from(data, pos)
        start = pos + _TLV.size
        pos = start + length
        if pos > len(data):
            raise Malformed(f"field {kind:#04x} of a PROXY protocol v2 header is longer than the header")
        if kind == CRC32C:
            _check(data, start, length)
        elif kind != NOOP:
            found.append((kind, data[start:pos]))
    return tuple(found)


def _check(data: bytes, start: int, length: int) -> None:
    """Check the checksum, which covers the whole header with zeros in place of the checksum."""
    zeroed = data[:start] + bytes(length) + data[start + length :]
    if length != 4 or crc32c(zeroed) != int.from_bytes(data[start : start + 4], "big"):
        raise Malformed("the checksum of a PROXY protocol v2 header is wrong: it was changed on its way")


def _address(host: str, port: int) -> Address:
    return Address(str(numeric(host) or host), port)


# --- writing ---------------------------------------------------------------------------------------------------------


def write(version: str, client: Address | None = None, server: Address | None = None) -> bytes:
    """Return a header of V1 or V2; UNKNOWN (V1) or LOCAL (V2) unless both ends have numeric addresses."""
    ends = [numeric(end.host) if end is not None else None for end in (client, server)]
    if client is None or server is None or ends[0] is None or ends[1] is None:
        return b"PROXY UNKNOWN\r\n" if version == V1 else _FIXED.pack(V2_START, 0x20 | _LOCAL, 0, 0)
    hosts = [end for end in ends if end is not None]
    if hosts[0].version != hosts[1].version:
        hosts = [ipaddress.ip_address(f"::ffff:{host}") if host.version == 4 else host for host in hosts]
    is_ipv4 = hosts[0].version == 4
    if version == V1:
        family = "TCP4" if is_ipv4 else "TCP6"
        return f"PROXY {family} {hosts[0]} {hosts[1]} {client.port} {server.port}\r\n".encode()
    family_number = _INET if is_ipv4 else _INET6
    body = _ADDRESSES[family_number].pack(hosts[0].packed, hosts[1].packed, client.port, server.port)
    return _FIXED.pack(V2_START, 0x20 | _PROXY, family_number << 4 | _STREAM, len(body)) + body
