"""A packet record as a TCP segment: link layer, tags, tunnels, IP and its fragments, the TCP header.

Duty: `Dissector.segment` finds the TCP segment in a record's bytes, or counts why there is none. The common case
(Ethernet, IPv4 without options, not a fragment) is one unpack; everything else takes the general path below it.
A flow's key is the bytes of both addresses and both ports as they lie in the packet: 12 bytes for IPv4, 36 for IPv6.
An ICMP message about a packet that could not be delivered contains the beginning of that packet: it counts as an
UNDELIVERED segment of the packet's sender.

Lengths come from the IP header, never from the record, since Ethernet pads short frames; `length` is the segment's
payload on the wire, `end - start` the captured part of it. Checksums are not checked: captures on the sending host have
partial ones. Memory: fragments of at most 256 incomplete and 256 complete datagrams, 128 KiB of each. Refuses to know
streams.
"""

from mmap import mmap
from struct import Struct, error
from typing import Literal

from kproxy.capture.quality import Quality

FIN, SYN, RST, ACK = 1, 2, 4, 16
UNDELIVERED = 1 << 16  # above the bits of the TCP header: ICMP reports that the segment was not delivered

# (data, key, seq, ack, bits, window, start, end, length): the payload captured is data[start:end]; bits are the flags,
# and in their upper four the length of the TCP header in words. UNDELIVERED: the sequence number of the lost segment in
# seq, the MTU of the next hop or 0 in ack, an index of REASONS in window, and no payload.
Segment = tuple[bytes | mmap, bytes, int, int, int, int, int, int, int]

# Link types: https://www.tcpdump.org/linktypes.html
NULL, ETHERNET, RAW_OLD, RAW_BSD, RAW, LOOP, SLL, IPV4, IPV6, SLL2 = 0, 1, 12, 14, 101, 108, 113, 228, 229, 276
PPP, PPP_HDLC, PPPOE, C_HDLC, PKTAP_OLD, PPP_WITH_DIRECTION, NFLOG, PKTAP = 9, 50, 51, 104, 149, 204, 239, 258
IPOIB = 242

# Ethernet types: https://www.iana.org/assignments/ieee-802-numbers
_IPV4, _IPV6, _TEB, _PPP, _PPPOE, _NSH = 0x0800, 0x86DD, 0x6558, 0x880B, 0x8864, 0x894F
_ERSPAN_2, _ERSPAN_3 = 0x88BE, 0x22EB
# Bytes of each tag; its last two bytes are the next Ethernet type: VLAN, Cisco's security group, VN-Tag, E-Tag
# (802.1BR), R-TAG (802.1CB), HSR.
_TAGS = {0x8100: 4, 0x88A8: 4, 0x9100: 4, 0x9200: 4, 0x8909: 8, 0x8926: 6, 0x893F: 8, 0xF1C1: 6, 0x892F: 6}
_PROVIDER_BRIDGE = 0x88E7  # 802.1ah: four bytes, then Ethernet
_FABRIC_PATH, _TRILL, _BATMAN = 0x8903, 0x22F3, 0x4305
_BATMAN_BYTES = {0x40: 10, 0x42: 18}  # header bytes by kind of unicast packet; Ethernet follows
_MPLS = frozenset((0x8847, 0x8848))
_WITHOUT_TCP = frozenset((0x0806, 0x8035, 0x8809, 0x8863, 0x888E, 0x88CC, 0x88F7, 0x8902))  # ARP, LACP, LLDP, PTP ...
_FAMILIES = {2: _IPV4, 10: _IPV6, 24: _IPV6, 28: _IPV6, 30: _IPV6}
_PPP_KINDS = {0x21: _IPV4, 0x57: _IPV6, 0x281: 0x8847, 0x283: 0x8848}
_NSH_KINDS = {1: _IPV4, 2: _IPV6, 3: _TEB, 4: _NSH, 5: 0x8847}  # also the kinds of VXLAN-GPE
_SNAP = b"\xaa\xaa\x03\0\0\0"
_ISL = (b"\x01\0\x0c\0\0", b"\x03\0\x0c\0\0")  # first 5 bytes of the address that Cisco's ISL sends frames to
_ISL_BYTES = 26
_NFLOG_PAYLOAD = 9

_TCP, _UDP, _GRE, _IPIP, _IP6IP, _ETHERIP, _MPLS_IN_IP = 6, 17, 47, 4, 41, 97, 137
_ICMP, _ICMP6 = 1, 58
_PROTOCOLS_WITHOUT_TCP = frozenset((1, 2, 17, 58, 59, 88, 89, 103, 112, 132))  # ICMP, IGMP, UDP, OSPF, VRRP, SCTP ...
# Why a packet was not delivered: RFC 792, 1191, 1812 and 4443; the numbers are (type, code) -> index of REASONS.
REASONS = TOO_BIG, PORT_UNREACHABLE, HOST_UNREACHABLE, NET_UNREACHABLE, PROHIBITED = (
    "too_big",
    "port_unreachable",
    "host_unreachable",
    "net_unreachable",
    "prohibited",
)
_BY_ICMP = {
    (3, code): REASONS.index(reason)
    for reason, codes in (
        (TOO_BIG, (4,)),
        (PORT_UNREACHABLE, (3,)),
        (HOST_UNREACHABLE, (1, 7, 12)),
        (NET_UNREACHABLE, (0, 6, 11)),
        (PROHIBITED, (9, 10, 13)),
    )
    for code in codes
}
_BY_ICMP6 = {(2, 0): REASONS.index(TOO_BIG)} | {
    (1, code): REASONS.index(reason)
    for reason, codes in (
        (PORT_UNREACHABLE, (4,)),
        (HOST_UNREACHABLE, (3,)),
        (NET_UNREACHABLE, (0,)),
        (PROHIBITED, (1, 5, 6)),
    )
    for code in codes
}
LEAST_MTU, LEAST_MTU6 = 68, 1280  # smallest MTU of a link (RFC 791, RFC 8200); a smaller one is ignored
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTH, _DESTINATION, _MOBILITY = 0, 43, 44, 51, 60, 135
_VXLAN_PORTS = frozenset((4789, 8472))
_VXLAN_GPE_PORT = 4790
_GENEVE_PORT = 6081
_GTP_PORT = 2152  # GTP-U: 3GPP TS 29.281
_G_PDU = 0xFF
_MPLS_PORT = 6635
_LISP_PORT, _GUE_PORT, _TZSP_PORT, _HP_MIRROR_PORT = 4341, 6080, 37008, 7932
_TZSP_PADDING, _TZSP_END = 0, 1  # tags without a length
_GRE_PORT = 4754  # RFC 8086
# L2TP, IPsec, WireGuard, the WireGuard of Tailscale, OpenVPN, ZeroTier, CAPWAP, LWAPP
_UNREAD_PORTS = frozenset((1701, 4500, 51820, 41641, 1194, 9993, 5247, 12222))
_VXLAN_FLAG = b"\x08\0\0\0"

SAME_PACKET_NS = 999_999_999  # longest time between two captures of one packet; a SYN is retransmitted later than that

_DEEPEST = 8  # most tunnels, tags and extension headers in one packet: bounds the work for a hostile packet
_DATAGRAMS = 256
_LARGEST = 0xFFFF  # bytes of a datagram
_PATIENCE_NS = 30_000_000_000  # Linux's timeout for further fragments; later the 16-bit identification may be reused

_COMMON = Struct(">12xHBxHxxHxBxx12sIIHH").unpack_from  # Ethernet, IPv4, TCP up to the window: 50 bytes
_V4 = Struct(">BxHHHxB").unpack_from
_V6 = Struct(">IHB").unpack_from
_HEAD = Struct(">IIHH").unpack_from  # TCP from the sequence number to the window
_SHORT = Struct(">H").unpack_from


class Dissector:
    """Finds TCP segments; keeps the fragments of incomplete datagrams."""

    def __init__(self, quality: Quality, *, reads_icmp: bool = False) -> None:
        """reads_icmp: return UNDELIVERED segments too."""
        self._quality = quality
        self._reads_icmp = reads_icmp
        self._fragments: dict[bytes, _Datagram] = {}
        self._whole: dict[bytes, _Datagram] = {}  # the last complete datagrams, whose fragments may be captured twice
        self._cut = 0  # bytes of the packet that the snap length cut

    def segment(
        self, link: int, data: bytes | mmap, start: int, end: int, time_ns: int, wire_bytes: int = 0
    ) -> Segment | None:
        """The TCP segment in the packet data[start:end]; None if there is none, which is counted.

        wire_bytes: the packet's length on the wire, for IP headers without a length (segmentation offload).
        """
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
            data = data[start:end]  # reading beyond a cut packet raises IndexError instead of reading the next record
            start, end = 0, end - start
            self._cut = max(0, wire_bytes - end)
            kind, position = _link_layer(link, data)
            if kind < 0:
                self._quality.note_named("unknown_link", f"link type {-kind}", time_ns, size=end)
                return None
            found = self._network(kind, data, position, end, time_ns, 0)
        except (IndexError, error):
            found = "truncated" if self._cut else "malformed"
        if isinstance(found, str):
            flaw, _, name = found.partition(" ")
            if name:
                self._quality.note_named(flaw, name, time_ns, size=end - start)
            elif flaw:
                self._quality.note(flaw, time_ns, size=end - start)
            return None
        return found

    def finish(self) -> None:
        """Count the datagrams that are still incomplete: the capture is over."""
        for datagram in self._fragments.values():
            self._incomplete(datagram)
        self._fragments.clear()
        self._whole.clear()

    def _network(self, kind: int, data: bytes, position: int, end: int, time_ns: int, depth: int) -> Segment | str:
        """The segment in an Ethernet type's payload, or the kind of flaw; "" for a fragment that is kept.

        The name of an unsupported header follows the kind, after a space.
        """
        while depth < _DEEPEST:
            depth += 1
            if kind in _TAGS:
                position += _TAGS[kind]
                kind = _SHORT(data, position - 2)[0]
            elif kind == _IPV4:
                first, total, identity, fragment, protocol = _V4(data, position)
                header = (first & 15) * 4
                if first >> 4 != 4 or header < 20 or 0 < total < header:
                    return "malformed"
                stop = position + total if total else end + self._cut  # 0: segmentation offload, larger than 64 KiB
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
            elif kind == _PROVIDER_BRIDGE:
                kind, position = _TEB, position + 4
            elif kind == _FABRIC_PATH:
                kind, position = _TEB, position + 2
            elif kind == _TRILL:  # RFC 6325, 3.1: six bytes, and options of so many words
                kind, position = _TEB, position + 6 + 4 * (_SHORT(data, position)[0] >> 6 & 0x1F)
            elif kind == _BATMAN:
                size = _BATMAN_BYTES.get(data[position])
                if size is None:
                    return "not_tcp"
                kind, position = _TEB, position + size
            elif kind in _MPLS:
                is_last = data[position + 2] & 1
                position += 4
                if is_last:
                    kind, position = _below_mpls(data, position)
                    if not kind:
                        return "unread MPLS without IP or Ethernet inside"
            elif kind == _PPPOE:
                kind, position = _ppp(data, position + 6)
            elif kind == _PPP:
                kind, position = _ppp(data, position)
            elif kind == _NSH:
                kind = _NSH_KINDS.get(data[position + 3], 0)
                position += (data[position + 1] & 0x3F) * 4
            elif kind < 0x600 and data[position : position + 6] == _SNAP:
                kind = _SHORT(data, position + 6)[0]
                position += 8
            elif kind < 0x600 or kind in _WITHOUT_TCP:  # below 0x600: a length (spanning tree), or PPP control packets
                return "not_tcp"
            else:
                return f"unread Ethernet type 0x{kind:04x}"
        return "malformed"

    def _ipv6(self, data: bytes, position: int, end: int, time_ns: int, depth: int) -> Segment | str:
        first, payload, protocol = _V6(data, position)
        if first >> 28 != 6:
            return "malformed"
        addresses = data[position + 8 : position + 40]
        at = position + 40
        stop = at + payload if payload else end + self._cut  # 0: a jumbogram, or segmentation offload
        return self._extensions(protocol, addresses, data, at, stop, end, time_ns, depth)

    def _extensions(
        self, protocol: int, addresses: bytes, data: bytes, at: int, stop: int, end: int, time_ns: int, depth: int
    ) -> Segment | str:
        """The segment in IPv6's payload from `at` to `stop`, which may begin with extension headers."""
        for _ in range(_DEEPEST + 1 - depth):
            if protocol in (_HOP_BY_HOP, _ROUTING, _DESTINATION, _MOBILITY):
                protocol, at = data[at], at + 8 + data[at + 1] * 8
            elif protocol == _AUTH:
                protocol, at = data[at], at + 8 + data[at + 1] * 4
            elif protocol == _FRAGMENT:
                inner = data[at]
                bits = _SHORT(data, at + 2)[0]
                name = addresses + data[at + 4 : at + 8]
                at += 8
                if bits & 0xFFF9:  # else an atomic fragment (RFC 6946)
                    return self._fragment(name, inner, data, at, stop, end, bits & 0xFFF8, bits & 1, time_ns, depth + 1)
                protocol = inner
            else:
                return self._transport(protocol, addresses, data, at, stop, end, time_ns, depth)
        return "malformed"

    def _transport(
        self, protocol: int, addresses: bytes, data: bytes, at: int, stop: int, end: int, time_ns: int, depth: int
    ) -> Segment | str:
        """The segment in an IP protocol's payload from `at` to `stop`, captured up to `end`."""
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
            return self._udp(data, at, end, time_ns, depth)
        if protocol == _GRE:
            return self._gre(data, at, end, time_ns, depth)
        if protocol == _IPIP:
            return self._network(_IPV4, data, at, end, time_ns, depth)
        if protocol == _IP6IP:
            return self._network(_IPV6, data, at, end, time_ns, depth)
        if protocol == _MPLS_IN_IP:
            return self._network(0x8847, data, at, end, time_ns, depth)
        if protocol == _ETHERIP:  # RFC 3378
            return self._network(_TEB, data, at + 2, end, time_ns, depth)
        if protocol == _AUTH and depth < _DEEPEST:
            at, protocol = at + 8 + data[at + 1] * 4, data[at]
            return self._transport(protocol, addresses, data, at, stop, end, time_ns, depth + 1)
        if self._reads_icmp and protocol in (_ICMP, _ICMP6):
            return self._undelivered(protocol, data, at, end, time_ns)
        return "not_tcp" if protocol in _PROTOCOLS_WITHOUT_TCP else f"unread IP protocol {protocol}"

    def _undelivered(self, protocol: int, data: bytes, at: int, end: int, time_ns: int) -> Segment | str:
        """The segment that an ICMP message reports as not delivered; the message may end after its sequence number."""
        inner = at + 8
        if inner + 20 > end:
            return "not_tcp"
        kinds = _BY_ICMP if protocol == _ICMP else _BY_ICMP6
        reason = kinds.get((data[at], data[at + 1]))
        if reason is None:
            return "not_tcp"
        if protocol == _ICMP:
            first, _, _, fragment, carried = _V4(data, inner)
            addresses = data[inner + 12 : inner + 20]
            ports = inner + (first & 15) * 4
            is_tcp = first >> 4 == 4 and first & 15 >= 5 and not fragment & 0x1FFF and carried == _TCP
            mtu = _SHORT(data, at + 6)[0]
        else:
            addresses = data[inner + 8 : inner + 40]
            ports = inner + 40
            is_tcp = data[inner] >> 4 == 6 and data[inner + 6] == _TCP
            mtu = int.from_bytes(data[at + 4 : at + 8])
        if not is_tcp or ports + 8 > end:
            return "not_tcp"
        self._quality.note("undelivered", time_ns, size=end - at)
        seq = int.from_bytes(data[ports + 4 : ports + 8])
        if REASONS[reason] != TOO_BIG or mtu < (LEAST_MTU if protocol == _ICMP else LEAST_MTU6):
            mtu = 0
        return data, addresses + data[ports : ports + 4], seq, mtu, UNDELIVERED, reason, end, end, 0

    def _udp(self, data: bytes, at: int, end: int, time_ns: int, depth: int) -> Segment | str:
        """The segment in a tunnel over UDP, which is recognised by its port.

        For other ports it is recognised by an IP header with TCP directly after the UDP header (Teredo, FOU of Linux),
        or after a header of VXLAN or GENEVE.
        """
        port = _SHORT(data, at + 2)[0]
        if port in _VXLAN_PORTS:
            return self._network(_TEB, data, at + 16, end, time_ns, depth) if data[at + 8] & 0x08 else "not_tcp"
        if port == _VXLAN_GPE_PORT:
            kind = _NSH_KINDS.get(data[at + 11], 0) if data[at + 8] & 0x04 else _TEB
            return self._network(kind, data, at + 16, end, time_ns, depth)
        if port == _MPLS_PORT:
            return self._network(0x8847, data, at + 8, end, time_ns, depth)
        if port == _GRE_PORT:
            return self._gre(data, at + 8, end, time_ns, depth)
        if port == _GTP_PORT:
            return self._gtp(data, at + 8, end, time_ns, depth)
        if port in (_LISP_PORT, _GUE_PORT, _TZSP_PORT, _HP_MIRROR_PORT):
            kind, inner = _of_tunnel(port, data, at + 8, end)
            return self._network(kind, data, inner, end, time_ns, depth) if kind else "not_tcp"
        for either in (port, _SHORT(data, at)[0]):
            if either in _UNREAD_PORTS:
                return f"unread UDP port {either}"
        if end < at + 50:  # no room for a tunnel's header, IP and TCP
            return "not_tcp"
        kind = _bare_ip(data, at)
        if kind:
            return self._network(kind, data, at + 8, end, time_ns, depth)
        is_vxlan = data[at + 8 : at + 12] == _VXLAN_FLAG and not data[at + 15]
        kind, inner = _TEB, at + 16
        if not is_vxlan:
            if data[at + 8] >> 6 or (port != _GENEVE_PORT and (data[at + 9] & 0x3F or data[at + 15])):
                return "not_tcp"
            kind = _SHORT(data, at + 10)[0]
            inner += (data[at + 8] & 0x3F) * 4
            if port == _GENEVE_PORT:
                return self._network(kind, data, inner, end, time_ns, depth)
        if kind == _TEB:
            kind = _SHORT(data, inner + 12)[0]
            inner += 14
        if kind not in (_IPV4, _IPV6) and kind not in _TAGS:
            return "not_tcp"
        found = self._network(kind, data, inner, end, time_ns, depth)
        return "not_tcp" if isinstance(found, str) and found else found

    def _gtp(self, data: bytes, at: int, end: int, time_ns: int, depth: int) -> Segment | str:
        """The segment in a user packet of a mobile network (GTP-U version 1)."""
        if data[at] >> 4 != 3 or data[at + 1] != _G_PDU:
            return "not_tcp"
        inner = at + 8
        if data[at] & 7:  # sequence number, N-PDU number or extension header: any of them adds space for all three
            following = data[inner + 3] if data[at] & 4 else 0
            inner += 4
            while following and inner < end and data[inner]:
                inner += 4 * data[inner]
                following = data[inner - 1] if inner <= end else 0
        if inner >= end:
            return "truncated"
        kind = {4: _IPV4, 6: _IPV6}.get(data[inner] >> 4)
        return "not_tcp" if kind is None else self._network(kind, data, inner, end, time_ns, depth)

    def _gre(self, data: bytes, at: int, end: int, time_ns: int, depth: int) -> Segment | str:
        bits, kind = _SHORT(data, at)[0], _SHORT(data, at + 2)[0]
        has_number = bits >> 12 & 1
        inner = at + 4 + 4 * ((bits >> 15 & 1) + (bits >> 13 & 1) + has_number)
        version = bits & 7
        if version == 1 and kind == _PPP:  # PPTP (RFC 2637), with an acknowledgement perhaps
            inner += bits >> 5 & 4
            return self._network(kind, data, inner, end, time_ns, depth) if inner < end else "not_tcp"
        if version or bits & 0x4000:
            return f"unread GRE version {version}" if version else "unread GRE with source routing"
        if kind == _ERSPAN_2:  # I, without sequence numbers, has no header of its own
            kind, inner = _TEB, inner + 8 * has_number
        elif kind == _ERSPAN_3:
            is_ip = data[inner + 10] >> 2 & 0x1F == 2
            inner += 20 if data[inner + 11] & 1 else 12
            kind = (_IPV4 if data[inner] >> 4 == 4 else _IPV6) if is_ip else _TEB
        return self._network(kind, data, inner, end, time_ns, depth)

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
            return "truncated"  # an incomplete datagram cannot be read
        if offset + stop - at > _LARGEST:
            return "malformed"
        datagram = self._fragments.get(name)
        if datagram is not None and (datagram.full or abs(time_ns - datagram.time_ns) > _PATIENCE_NS):
            self._incomplete(self._fragments.pop(name))
            datagram = None
        known = datagram or self._whole.get(name)
        if known is not None and known.has(offset, data[at:stop], time_ns):
            self._quality.note("duplicate_packets", time_ns)
            return ""
        if datagram is None:
            if len(self._fragments) >= _DATAGRAMS:
                self._incomplete(self._fragments.pop(next(iter(self._fragments))))
            datagram = self._fragments[name] = _Datagram(time_ns)
        if not datagram.put(offset, data[at:stop], not more):
            return ""
        del self._fragments[name]
        self._whole.pop(name, None)
        if len(self._whole) >= _DATAGRAMS:
            del self._whole[next(iter(self._whole))]
        self._whole[name] = datagram
        whole = datagram.whole()
        # An IPv4 name is addresses, protocol, identity; an IPv6 one addresses, identity.
        if len(name) == 11:  # add an IPv4 header, so that copies of the datagram are found by its identification
            addresses = name[:8]
            whole = _BEFORE_IDENTITY + name[9:] + bytes(6) + addresses + whole
            read = self._transport
        else:
            addresses = name[:32]
            read = self._extensions
        size = len(whole)
        return read(protocol, addresses, whole, size - datagram.total, size, size, time_ns, depth)

    def _incomplete(self, datagram: "_Datagram") -> None:
        self._quality.note(
            "fragments", datagram.time_ns, count=len(datagram.parts), size=sum(map(len, datagram.parts.values()))
        )


_BEFORE_IDENTITY = b"\x45\0\0\0"  # first bytes of an IPv4 header without options, up to the identification


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
        """Whether its fragments overlap so much that it must be an attack."""
        return self._held > _LARGEST

    def has(self, offset: int, part: bytes, time_ns: int) -> bool:
        """Whether the same fragment was captured shortly before: a retransmission has another identification."""
        return self.parts.get(offset) == part and abs(time_ns - self.time_ns) <= SAME_PACKET_NS

    def put(self, offset: int, part: bytes, last: bool) -> bool:
        """Keep the first fragment of an offset; return whether the datagram is complete now."""
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
    """(ethertype, where its payload begins); minus the link type where that is not read."""
    if link == ETHERNET:
        if data[:5] in _ISL and data[5] < 0x10:  # the upper bits of this byte are the kind of frame: Ethernet
            return _TEB, _ISL_BYTES
        return _SHORT(data, 12)[0], 14
    if link == SLL:
        return _SHORT(data, 14)[0], 16
    if link == IPOIB:  # behind a pseudo header of 40 bytes: RFC 4391, 6
        return _SHORT(data, 40)[0], 44
    if link == SLL2:
        return _SHORT(data, 0)[0], 20
    if link in (RAW, RAW_OLD, RAW_BSD, IPV4, IPV6):
        return (_IPV4 if data[0] >> 4 == 4 else _IPV6), 0
    if link in (NULL, LOOP):  # the family is in the byte order of the capturing host
        family = int.from_bytes(data[:4], "big")
        if family > 0xFFFF:
            family = int.from_bytes(data[:4], "little")
        return _FAMILIES.get(family, 0), 4
    if link in (PPP, PPP_HDLC):
        return (_SHORT(data, 2)[0], 4) if data[0] in (0x0F, 0x8F) else _ppp(data, 0)  # Cisco's HDLC, or PPP
    if link == C_HDLC:
        return _SHORT(data, 2)[0], 4
    if link == PPP_WITH_DIRECTION:
        return _ppp(data, 1)
    if link == PPPOE:
        return _PPPOE, 0
    if link == NFLOG:
        return _nflog(data)
    if link == PKTAP or (link == PKTAP_OLD and data[4:8] == b"\1\0\0\0"):
        size, inner = int.from_bytes(data[:4], "little"), int.from_bytes(data[8:12], "little")
        if inner in (PKTAP, PKTAP_OLD) or size < 12:
            return -link, 0
        kind, position = _link_layer(inner, data[size:])
        return kind, position + size
    return -link, 0


def _below_mpls(data: bytes, position: int) -> tuple[int, int]:
    """As `_link_layer`, below the last label, which does not name it: Ethernet, with a control word or not, or IP.

    0 where it is neither. https://www.rfc-editor.org/rfc/rfc4928, section 3, and RFC 4448
    """
    version = data[position] >> 4
    if version in (4, 6):
        return _IPV4 if version == 4 else _IPV6, position
    for start in (position, position + 4):
        kind = _SHORT(data, start + 12)[0]
        if kind in (_IPV4, _IPV6) or kind in _TAGS:
            return _TEB, start
    return 0, position


def _bare_ip(data: bytes, at: int) -> int:
    """The version, as an Ethernet type, of the IP packet with TCP that fills a UDP datagram; 0: there is none."""
    inner = at + 8
    size = _SHORT(data, at + 4)[0] - 8
    if data[inner] >> 4 == 4 and data[inner + 9] == _TCP and _SHORT(data, inner + 2)[0] == size:
        return _IPV4
    return _IPV6 if data[inner] >> 4 == 6 and data[inner + 6] == _TCP and _SHORT(data, inner + 4)[0] + 40 == size else 0


def _of_tunnel(port: int, data: bytes, position: int, end: int) -> tuple[int, int]:
    """(Ethernet type, its place) inside LISP, GUE, or copies of packets from switches of HP or MikroTik (TZSP).

    (0, ...): none.
    """
    if port == _HP_MIRROR_PORT:
        return _TEB, position + 12
    if port == _TZSP_PORT:
        if data[position + 2 : position + 4] != b"\0\1":  # Ethernet
            return 0, position
        position += 4
        while position < end and data[position] != _TZSP_END:
            position += 1 if data[position] == _TZSP_PADDING else 2 + data[position + 1]
        return _TEB, position + 1
    if port == _LISP_PORT:
        position += 8
    elif data[position] >> 6 == 0:  # GUE with a header; its variant 1 has none
        if data[position] & 0x20:  # a control message
            return 0, position
        position += 4 + 4 * (data[position] & 0x1F)
    return {4: _IPV4, 6: _IPV6}.get(data[position] >> 4, 0), position


def _ppp(data: bytes, position: int) -> tuple[int, int]:
    """As `_link_layer`, of a PPP header, whose address, control and first protocol byte may lack (RFC 1662)."""
    if data[position : position + 2] == b"\xff\x03":
        position += 2
    if data[position] & 1:
        return _PPP_KINDS.get(data[position], 0), position + 1
    return _PPP_KINDS.get(_SHORT(data, position)[0], 0), position + 2


def _nflog(data: bytes) -> tuple[int, int]:
    """As `_link_layer`, of Linux' netfilter log: fields with lengths in the byte order of the capturing host."""
    position = 4
    order: Literal["little", "big"] = "little" if 4 <= int.from_bytes(data[4:6], "little") <= len(data) - 4 else "big"
    while position + 4 <= len(data):
        size = int.from_bytes(data[position : position + 2], order)
        if int.from_bytes(data[position + 2 : position + 4], order) & 0x7FFF == _NFLOG_PAYLOAD:
            return _FAMILIES.get(data[0], 0), position + 4
        if size < 4:
            break
        position += size + 3 & ~3
    return 0, len(data)
