"""A packet record as a TCP segment: link layer, tags, tunnels, IP and its fragments, the TCP header.

Duty: `Dissector.segment` finds the TCP segment in a record's bytes, or counts why there is none. The common case
(Ethernet, IPv4 without options, not a fragment) is one unpack; everything else takes the general path below it.
A flow's key is the bytes of both addresses and both ports as they lie in the packet: 12 bytes for IPv4, 36 for IPv6.

Lengths come from the IP header, never from the record, since Ethernet pads short frames; `length` is what the segment
had on the wire, `end - start` what was captured of it. Checksums are not checked: captures on the sending host hold
partial ones. Memory: fragments of at most 256 datagrams, 128 KiB of each. Refuses to know streams.
"""

from mmap import mmap
from struct import Struct, error

from kproxy.capture.quality import Quality

FIN, SYN, RST, ACK = 1, 2, 4, 16

# (data, key, seq, ack, bits, window, start, end, length): the payload captured is data[start:end]; bits are the flags,
# and in their upper four the length of the TCP header in words
Segment = tuple[bytes | mmap, bytes, int, int, int, int, int, int, int]

# Link types: https://www.tcpdump.org/linktypes.html
NULL, ETHERNET, RAW_OLD, RAW_BSD, RAW, LOOP, SLL, IPV4, IPV6, SLL2 = 0, 1, 12, 14, 101, 108, 113, 228, 229, 276

_IPV4, _IPV6, _TEB = 0x0800, 0x86DD, 0x6558
_TAGS = frozenset((0x8100, 0x88A8, 0x9100))
_NULL_FAMILIES = {2: _IPV4, 10: _IPV6, 24: _IPV6, 28: _IPV6, 30: _IPV6}

_TCP, _UDP, _GRE, _IPIP, _IP6IP = 6, 17, 47, 4, 41
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTH, _DESTINATION, _MOBILITY = 0, 43, 44, 51, 60, 135
_VXLAN_PORTS = frozenset((4789, 8472))
_GENEVE_PORT = 6081

_DEEPEST = 8  # tunnels, tags and extension headers in one packet: a packet of nothing else must not keep us busy
_DATAGRAMS = 256
_LARGEST = 0xFFFF  # datagram
_PATIENCE_NS = 30_000_000_000  # as Linux waits for the other fragments; the 16-bit identity is used again after it

_COMMON = Struct(">12xHBxHxxHxBxx12sIIHH").unpack_from  # Ethernet, IPv4, TCP up to the window: 50 bytes
_V4 = Struct(">BxHHHxB").unpack_from
_V6 = Struct(">IHB").unpack_from
_HEAD = Struct(">IIHH").unpack_from  # TCP from the sequence number to the window
_SHORT = Struct(">H").unpack_from


class Dissector:
    """Finds TCP segments; keeps the fragments of datagrams that are not whole yet."""

    def __init__(self, quality: Quality) -> None:
        self._quality = quality
        self._fragments: dict[bytes, _Datagram] = {}

    def segment(self, link: int, data: bytes | mmap, start: int, end: int, time_ns: int) -> Segment | None:
        if link == ETHERNET and end - start >= 54:
            kind, first, total, fragment, protocol, key, seq, ack, bits, window = _COMMON(data, start)
            if kind == 0x0800 and first == 0x45 and protocol == 6 and not fragment & 0x3FFF and total:
                payload = start + 34 + (bits >> 12 << 2)
                stop = start + 14 + total
                length = stop - payload
                if length >= 0 and bits >= 0x5000:
                    if stop > end:
                        stop = end
                        if payload > end:
                            payload = end
                    return data, key, seq, ack, bits, window, payload, stop, length
        try:
            data = data[start:end]  # what is cut short ends in an IndexError, not in the next record
            start, end = 0, end - start
            kind, position = _link_layer(link, data)
            if kind < 0:
                self._quality.note("unknown_link", time_ns, size=end - start)
                return None
            found = self._network(kind, data, position, end, time_ns, 0)
        except (IndexError, error):
            found = "malformed"
        if isinstance(found, str):
            if found:
                self._quality.note(found, time_ns, size=end - start)
            return None
        return found

    def finish(self) -> None:
        """The capture is over: what is left of incomplete datagrams is counted."""
        for datagram in self._fragments.values():
            self._incomplete(datagram)
        self._fragments.clear()

    def _network(self, kind: int, data: bytes, position: int, end: int, time_ns: int, depth: int) -> Segment | str:
        """What an ethertype's payload holds: a segment, or the kind of flaw; "" for a fragment kept for later."""
        while depth < _DEEPEST:
            depth += 1
            if kind in _TAGS:
                kind = _SHORT(data, position + 2)[0]
                position += 4
            elif kind == _IPV4:
                first, total, identity, fragment, protocol = _V4(data, position)
                header = (first & 15) * 4
                if first >> 4 != 4 or header < 20 or 0 < total < header:
                    return "malformed"
                stop = position + total if total else end  # 0: segmentation offload, larger than 64 KiB
                at = position + header
                if fragment & 0x3FFF:
                    name = data[position + 12 : position + 20] + bytes((protocol,)) + identity.to_bytes(2, "big")
                    return self._fragment(
                        name, protocol, data, at, stop, end, (fragment & 0x1FFF) * 8, fragment & 0x2000, time_ns, depth
                    )
                addresses = data[position + 12 : position + 20]
                return self._transport(protocol, addresses, data, at, stop, end, time_ns, depth)
            elif kind == _IPV6:
                return self._ipv6(data, position, end, time_ns, depth)
            elif kind == _TEB:
                kind = _SHORT(data, position + 12)[0]
                position += 14
            else:
                return "not_tcp"
        return "malformed"

    def _ipv6(self, data: bytes, position: int, end: int, time_ns: int, depth: int) -> Segment | str:
        first, payload, protocol = _V6(data, position)
        if first >> 28 != 6:
            return "malformed"
        addresses = data[position + 8 : position + 40]
        at = position + 40
        stop = at + payload if payload else end  # 0: a jumbogram, or segmentation offload
        for _ in range(_DEEPEST):
            if protocol in (_HOP_BY_HOP, _ROUTING, _DESTINATION, _MOBILITY):
                protocol, at = data[at], at + 8 + data[at + 1] * 8
            elif protocol == _AUTH:
                protocol, at = data[at], at + 8 + data[at + 1] * 4
            elif protocol == _FRAGMENT:
                inner = data[at]
                bits = _SHORT(data, at + 2)[0]
                name = addresses + data[at + 4 : at + 8]
                at += 8
                if bits & 0xFFF9:  # not an atomic fragment (RFC 6946)
                    return self._fragment(name, inner, data, at, stop, end, bits & 0xFFF8, bits & 1, time_ns, depth)
                protocol = inner
            else:
                return self._transport(protocol, addresses, data, at, stop, end, time_ns, depth)
        return "malformed"

    def _transport(
        self, protocol: int, addresses: bytes, data: bytes, at: int, stop: int, end: int, time_ns: int, depth: int
    ) -> Segment | str:
        """What an IP protocol's payload from `at` to `stop` holds, of which `end` is captured."""
        if protocol == _TCP:
            if at + 16 > end:
                return "truncated" if stop > end else "malformed"
            seq, ack, bits, window = _HEAD(data, at + 4)
            payload = at + (bits >> 12 << 2)
            length = stop - payload
            if bits < 0x5000 or length < 0:
                return "malformed"
            payload = min(payload, end)
            captured = max(min(stop, end), payload)
            return data, addresses + data[at : at + 4], seq, ack, bits, window, payload, captured, length
        if protocol == _UDP:
            port = _SHORT(data, at + 2)[0]
            if port in _VXLAN_PORTS and data[at + 8] & 0x08:
                return self._network(_TEB, data, at + 16, end, time_ns, depth)
            if port == _GENEVE_PORT and not data[at + 8] >> 6:
                inner = at + 16 + (data[at + 8] & 0x3F) * 4
                return self._network(_SHORT(data, at + 10)[0], data, inner, end, time_ns, depth)
        elif protocol == _GRE:
            bits, kind = _SHORT(data, at)[0], _SHORT(data, at + 2)[0]
            if not bits & 0x4007:  # version 0, without source routing
                inner = at + 4 + 4 * ((bits >> 15 & 1) + (bits >> 13 & 1) + (bits >> 12 & 1))
                return self._network(kind, data, inner, end, time_ns, depth)
        elif protocol == _IPIP:
            return self._network(_IPV4, data, at, end, time_ns, depth)
        elif protocol == _IP6IP:
            return self._network(_IPV6, data, at, end, time_ns, depth)
        return "not_tcp"

    def _fragment(
        self,
        name: bytes,
        protocol: int,
        data: bytes,
        at: int,
        stop: int,
        end: int,
        offset: int,
        more: int,
        time_ns: int,
        depth: int,
    ) -> Segment | str:
        if stop > end:
            return "truncated"  # where the parts of a datagram with a hole lie is not known
        if offset + stop - at > _LARGEST:
            return "malformed"
        datagram = self._fragments.get(name)
        if datagram is not None and (datagram.full or abs(time_ns - datagram.time_ns) > _PATIENCE_NS):
            self._incomplete(self._fragments.pop(name))
            datagram = None
        if datagram is None:
            if len(self._fragments) >= _DATAGRAMS:
                self._incomplete(self._fragments.pop(next(iter(self._fragments))))
            datagram = self._fragments[name] = _Datagram(time_ns)
        if not datagram.put(offset, data[at:stop], not more):
            return ""
        del self._fragments[name]
        whole = datagram.whole()
        # An IPv4 name is addresses, protocol, identity; an IPv6 one addresses, identity.
        addresses = name[:8] if len(name) == 11 else name[:32]
        return self._transport(protocol, addresses, whole, 0, len(whole), len(whole), time_ns, depth)

    def _incomplete(self, datagram: "_Datagram") -> None:
        self._quality.note(
            "fragments", datagram.time_ns, count=len(datagram.parts), size=sum(map(len, datagram.parts.values()))
        )


class _Datagram:
    """The fragments of one datagram by offset."""

    __slots__ = ("_held", "parts", "time_ns", "total")

    def __init__(self, time_ns: int) -> None:
        self.parts: dict[int, bytes] = {}
        self._held = 0
        self.total = -1
        self.time_ns = time_ns

    @property
    def full(self) -> bool:
        """Whether its fragments overlap so much that it can only be meant to hurt."""
        return self._held > _LARGEST

    def put(self, offset: int, part: bytes, last: bool) -> bool:
        """Keep a fragment, the first of an offset; whether the datagram is whole now."""
        if offset not in self.parts:
            self.parts[offset] = part
            self._held += len(part)
        if last and self.total < 0:
            self.total = offset + len(part)
        if not 0 <= self.total <= self._held:
            return False
        reached = 0
        for start in sorted(self.parts):
            if start > reached:
                return False
            reached = max(reached, start + len(self.parts[start]))
        return reached >= self.total

    def whole(self) -> bytes:
        data = bytearray(self.total)
        for offset in sorted(self.parts, reverse=True):  # where fragments overlap, the earlier offset wins
            part = self.parts[offset]
            data[offset : offset + len(part)] = part
        return bytes(data[: self.total])


def _link_layer(link: int, data: bytes) -> tuple[int, int]:
    """(ethertype, where its payload begins); (-1, 0) for a link type that is not read."""
    if link == ETHERNET:
        return _SHORT(data, 12)[0], 14
    if link == SLL:
        return _SHORT(data, 14)[0], 16
    if link == SLL2:
        return _SHORT(data, 0)[0], 20
    if link in (RAW, RAW_OLD, RAW_BSD, IPV4, IPV6):
        return (_IPV4 if data[0] >> 4 == 4 else _IPV6), 0
    if link in (NULL, LOOP):  # the family is in the byte order of the capturing host
        family = int.from_bytes(data[:4], "big")
        if family > 0xFFFF:
            family = int.from_bytes(data[:4], "little")
        return _NULL_FAMILIES.get(family, 0), 4
    return -1, 0
