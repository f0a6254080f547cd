"""Synthetic packets and captures, for cases that no capture of tests/data has."""

from struct import pack, unpack_from

from kproxy.capture.dissection.packets import ACK

CLIENT = (b"\x0a\0\0\1", 40000)
BROKER = (b"\x0a\0\0\2", 9092)
CLIENT6 = (b"\xfd" + bytes(14) + b"\1", 40000)
BROKER6 = (b"\xfd" + bytes(14) + b"\2", 9092)


def tcp(payload=b"", *, source=CLIENT, target=BROKER, seq=1, ack=1, flags=ACK, window=500, options=b""):
    size = 20 + len(options)
    return pack(">HHIIHHHH", source[1], target[1], seq, ack, size // 4 << 12 | flags, window, 0, 0) + options + payload


def udp(port, payload):
    return pack(">HHHH", 50000, port, 8 + len(payload), 0) + payload


def ipv4(payload, *, protocol=6, source=CLIENT, target=BROKER, options=b"", fragment=0, identity=7, total=None):
    size = 20 + len(options)
    identity &= 0xFFFF
    total = size + len(payload) if total is None else total
    head = pack(">BBHHHBBH", 0x40 | size // 4, 0, total, identity, fragment, 64, protocol, 0)
    return head + source[0] + target[0] + options + payload


def ipv6(payload, *, protocol=6, source=CLIENT6, target=BROKER6, length=None):
    return (
        pack(">IHBB", 6 << 28, len(payload) if length is None else length, protocol, 64)
        + source[0]
        + target[0]
        + payload
    )


def icmp(kind, code, number, quoted):
    """An ICMP or ICMPv6 message about the packet whose beginning it quotes; number: the four bytes before the
    quotation."""
    return pack(">BBHI", kind, code, 0, number) + quoted


def ethernet(payload, kind=0x0800):
    return bytes(12) + pack(">H", kind) + payload


def pcap(packets, *, order="<", nano=False, link=1, snap=262144):
    """A classic capture of (time_ns, bytes), or of (time_ns, bytes, length on the wire)."""
    unit = 1 if nano else 1000
    parts = [pack(order + "IHHiIII", 0xA1B23C4D if nano else 0xA1B2C3D4, 2, 4, 0, 0, snap, link)]
    for time_ns, data, *length in packets:
        seconds, fraction = divmod(time_ns, 1_000_000_000)
        parts.append(pack(order + "IIII", seconds, fraction // unit, len(data), *(length or [len(data)])) + data)
    return b"".join(parts)


def block(kind, body, order="<"):
    body += bytes(-len(body) % 4)
    size = 12 + len(body)
    return pack(order + "II", kind, size) + body + pack(order + "I", size)


def option(code, value, order="<"):
    return pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def section(order="<"):
    return block(0x0A0D0D0A, pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def interface(link=1, snap=0, options=b"", order="<"):
    return block(1, pack(order + "HHI", link, 0, snap) + options, order)


def enhanced(data, ticks, *, name=0, original=None, order="<"):
    head = pack(order + "IIIII", name, ticks >> 32, ticks & 0xFFFFFFFF, len(data), original or len(data))
    return block(6, head + data, order)


def records(whole):
    """(time_ns, bytes, length on the wire) of each record of a little-endian microsecond capture."""
    position = 24
    while position < len(whole):
        seconds, micros, size, length = unpack_from("<IIII", whole, position)
        position += 16
        yield seconds * 1_000_000_000 + micros * 1000, whole[position : position + size], length
        position += size
