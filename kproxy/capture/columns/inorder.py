"""The segments of a window that are in order and complete, found all at once.

Duty: most packets need no decision: plain headers, the next sequence number of an established connection, no
acknowledgement of undelivered bytes. That is the fast path of `Conversation.segment`, checked here for all packets of a
window at once, by column. A connection's packets before the first unusual one in a window are its first stretch. That
packet and the next ones are processed one by one, until the connection is calm again: then `Order.stretch` finds the
next stretch. A packet captured twice, as on a bridge and its member, does not end a stretch: `copies` finds the second
one.

Memory: some columns of the window's packets. Refuses to know sessions, and the processing of other packets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct

import numpy as np

from kproxy.capture.columns.segments import Segments
from kproxy.capture.connections.reassembly import HALF, MASK
from kproxy.capture.dissection.packets import ETHERNET, FIN, RAW, RST, SAME_PACKET_NS, SLL, SLL2, SYN

FEWEST = 64  # packets worth columns
HEAD = 96  # bytes read of each packet: the maximum, with SLL2, IPv6 and TCP's timestamp
AT_ONCE_NS = 1_000_000  # the same, where nothing identifies a packet: a retransmission takes at least a round trip

# An IP header without options or extensions, and TCP's up to the window, as packets.Dissector reads them.
_IPV4 = np.dtype(
    {
        "names": ["first", "total", "identity", "fragment", "protocol", "key", "seq", "ack", "bits", "window"],
        "formats": ["u1", ">u2", ">u2", ">u2", "u1", "V12", ">u4", ">u4", ">u2", ">u2"],
        "offsets": [0, 2, 4, 6, 9, 12, 24, 28, 32, 34],
        "itemsize": 40,
    }
)
_IPV6 = np.dtype(
    {
        "names": ["first", "total", "protocol", "key", "seq", "ack", "bits", "window"],
        "formats": ["u1", ">u2", "u1", "V36", ">u4", ">u4", ">u2", ">u2"],
        "offsets": [0, 4, 6, 8, 44, 48, 52, 54],
        "itemsize": 60,
    }
)
# What stands before it: link type -> (ethertypes by their offset, where IP begins)
_V4, _V6, _VLAN = 0x0800, 0x86DD, 0x8100
_LINKS: dict[int, list[tuple[dict[int, int], int, np.dtype]]] = {
    ETHERNET: [
        ({12: _V4}, 14, _IPV4),
        ({12: _V6}, 14, _IPV6),
        ({12: _VLAN, 16: _V4}, 18, _IPV4),
        ({12: _VLAN, 16: _V6}, 18, _IPV6),
    ],
    SLL: [({14: _V4}, 16, _IPV4), ({14: _V6}, 16, _IPV6)],
    SLL2: [({0: _V4}, 20, _IPV4), ({0: _V6}, 20, _IPV6)],
    RAW: [({}, 0, _IPV4), ({}, 0, _IPV6)],
}
_BUCKET_BITS = 18
OPTION_BYTES = 12  # of the timestamp option, as all stacks write it: two NOPs before it
# A packet's identity: TCP's header up to the window, options, payload's length, header's length, IPv4's identity.
ROW = Struct("<16s12s4xIHH")
OPTIONS = slice(16, 16 + OPTION_BYTES)  # of a row
_TAIL = np.dtype([("length", "<u4"), ("size", "<u2"), ("identity", "<u2")])
_WITHOUT_FLAGS = np.frombuffer(bytes((255, 255, 255, 255, 0, 0, 255, 255)), np.uint64)[0]  # of a row's second word
_MIXED = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, 10)], np.uint64)  # odd numbers


@dataclass(slots=True)
class Heads:
    """The packets with plain headers, by column: `index` is their number in the window."""

    index: np.ndarray
    lane: np.ndarray  # an index into `keys`
    keys: list[bytes]
    seq: np.ndarray
    ack: np.ndarray
    start: np.ndarray  # of the payload
    length: np.ndarray
    calm: np.ndarray  # wholly captured, the window open, nothing begins or ends
    tcp: np.ndarray  # where its header begins, from the packet's first byte
    size: np.ndarray  # of that header
    identity: np.ndarray  # of IPv4, else 0
    whole: np.ndarray  # TCP's header was captured wholly


@dataclass(slots=True)
class Stretch:
    """A connection's packets in a window between two unusual ones."""

    pair: int
    places: slice  # of its packets in the order
    positions: tuple[int, int]  # where both sides stand after it
    last_ns: int  # of its last packet
    segments: Segments  # among these
    carrying: slice  # are those with payload
    copies: tuple[int, int]  # packets with payload that are there twice, of each side
    acks: tuple[int, int]  # last acknowledgement of each side; -1: it sent nothing


def heads(link: int, start: np.ndarray, end: np.ndarray, head: np.ndarray) -> Heads | None:
    """The plain headers among packets; None if there are none, or the hashes of two keys are the same.

    head: the first HEAD bytes of each; after a shorter packet any bytes.
    """
    found: list[Heads] = []
    left = len(head)
    for kinds, offset, layout in _LINKS.get(link, ()):
        among = end - start >= offset + layout.itemsize
        for place, kind in kinds.items():
            among &= (head[:, place] == kind >> 8) & (head[:, place + 1] == kind & 0xFF)
        index = np.flatnonzero(among)
        if len(index):
            ip = np.ascontiguousarray(head[index, offset : offset + layout.itemsize]).view(layout)[:, 0]
            plain = _plain(index, start[index] + offset, end[index], ip, offset)
            if plain is None:
                return None
            found.append(plain)
            left -= len(plain.index)
            if not left:
                break
    if len(found) < 2:
        return found[0] if found else None
    keys = list(chain.from_iterable(each.keys for each in found))
    shifts = np.cumsum([0, *(len(each.keys) for each in found)])
    lane = np.concatenate([each.lane + shift for each, shift in zip(found, shifts[:-1], strict=True)])
    order = np.argsort(index := np.concatenate([each.index for each in found]))
    columns = (
        np.concatenate([getattr(each, name) for each in found])[order]
        for name in ("seq", "ack", "start", "length", "calm", "tcp", "size", "identity", "whole")
    )
    return Heads(index[order], lane[order], keys, *columns)


def _plain(index: np.ndarray, start: np.ndarray, end: np.ndarray, ip: np.ndarray, offset: int) -> Heads | None:
    """The packets that are unfragmented TCP without IP options; `start`: offsets of IP headers of one version."""
    bits, total = ip["bits"].astype(np.int64), ip["total"].astype(np.int64)
    if ip.dtype == _IPV4:
        plain = (ip["first"] == 0x45) & ((ip["fragment"] & 0x3FFF) == 0)
        payload, stop = start + 20 + (bits >> 12 << 2), start + total
    else:
        plain = ip["first"] >> 4 == 6
        payload, stop = start + 40 + (bits >> 12 << 2), start + 40 + total
    plain &= (ip["protocol"] == 6) & (total > 0) & (stop >= payload) & (bits >= 0x5000)
    if not plain.all():
        index, ip, bits, payload, stop, end = (column[plain] for column in (index, ip, bits, payload, stop, end))
    calm = (stop <= end) & (ip["window"] != 0) & ((bits & (SYN | RST | FIN)) == 0)
    keys = np.ascontiguousarray(ip["key"])
    words = keys.view("<u4").reshape(len(keys), keys.itemsize // 4) * _MIXED[: keys.itemsize // 4]
    where, lane = _numbered(_folded(words))
    if (words[where][lane] != words).any():
        return None
    seq, ack = ip["seq"].astype(np.int64), ip["ack"].astype(np.int64)
    identity = ip["identity"] if ip.dtype == _IPV4 else np.zeros(len(ip), np.uint16)
    tcp = np.full(len(ip), offset + (20 if ip.dtype == _IPV4 else 40))
    return Heads(
        index,
        lane,
        keys[where].tolist(),
        seq,
        ack,
        payload,
        stop - payload,
        calm,
        tcp,
        bits >> 12 << 2,
        identity,
        payload <= end,
    )


def _folded(words: np.ndarray) -> np.ndarray:
    """Hashes of rows of words that were multiplied by odd numbers."""
    mixed: np.ndarray = words[:, 0].copy()
    for place in range(1, words.shape[1]):
        mixed ^= words[:, place] >> np.uint64(place)
    return mixed


def _numbered(mixed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where there is one of each number, which of these each number is); few differ, so that no sort is needed."""
    bucket = mixed >> np.uint64(64 - _BUCKET_BITS)
    last = np.full(1 << _BUCKET_BITS, -1)
    last[bucket] = np.arange(len(mixed))
    if (mixed[last[bucket]] != mixed).any():  # two in one bucket
        _, where, lane = np.unique(mixed, return_index=True, return_inverse=True)
        return where, lane
    used = np.flatnonzero(last >= 0)
    where = last[used]
    last[used] = np.arange(len(used))
    return where, last[bucket]


def key_numbers(heads: Heads) -> tuple[dict[bytes, int], np.ndarray]:
    """Keys by number, and the number of each packet's. One key has two lanes where link headers differ."""
    numbers: dict[bytes, int] = {}
    of_lanes = np.array([numbers.setdefault(key, len(numbers)) for key in heads.keys], np.int64)
    return numbers, of_lanes[heads.lane]


def rows_of(heads: Heads, head: np.ndarray, some: np.ndarray) -> np.ndarray:
    """The identities of some plain packets without their keys: a ROW each, in words. head: of all packets."""
    tcp, size = heads.tcp[some], heads.size[some]
    place = np.concatenate((np.arange(16), np.arange(20, 20 + OPTION_BYTES)))  # without checksum and urgent pointer
    columns = tcp[:, None] + place
    rows = np.zeros((len(tcp), ROW.size), np.uint8)
    rows[:, : len(place)] = np.where(place < size[:, None], head[heads.index[some][:, None], columns], 0)
    tail = np.empty(len(tcp), _TAIL)
    tail["length"], tail["size"], tail["identity"] = heads.length[some], size, heads.identity[some]
    words = rows.view(np.uint64)
    words[:, -1] = tail.view(np.uint64)
    return words


def run_of(rows: np.ndarray) -> np.ndarray:
    """The common words of segments of one run and direction: the acknowledgement, the window and the options. Flags
    are not among them: the last segment alone has a push."""
    run = rows[:, 1:4]
    return np.concatenate((run[:, :1] & _WITHOUT_FLAGS, run[:, 1:]), axis=1)


def seq_and_length(row: bytes) -> tuple[int, int]:
    """The sequence number and the payload's length in a row of bytes."""
    return int.from_bytes(row[4:8]), int.from_bytes(row[ROW.size - 8 : ROW.size - 4], "little")


def ack_of(row: bytes) -> int:
    """The acknowledgement in a row of bytes."""
    return int.from_bytes(row[8:12])


def identity_of(row: bytes) -> int:
    """The identity in a row of bytes."""
    return int.from_bytes(row[ROW.size - 2 : ROW.size], "little")


def has_timestamp(row: bytes) -> bool:
    """Whether there is a timestamp of TCP among the first options, as they are in segments and in SYNs."""
    options = row[OPTIONS]
    return options[:4] == b"\1\1\x08\x0a" or options[:2] == b"\x08\x0a" or options[4:8] == b"\4\2\x08\x0a"


def copies(heads: Heads, head: np.ndarray, time_ns: np.ndarray) -> np.ndarray | None:
    """Plain packets which are the same as one before them in the window, if that is clear from the two alone.

    A retransmission differs in IPv4's identity or in its timestamp; an acknowledgement and the first data after it may
    differ only in length. Packets without a timestamp are found within AT_ONCE_NS only; `copies.Recent` finds the
    others. head, time_ns: of all packets. None: there are none, or the clock goes back, so that columns cannot decide.
    """
    times = time_ns[heads.index]
    if not len(times) or (np.diff(times) < 0).any():
        return None
    some = _alike(heads)
    some = some[heads.whole[some]]
    if not len(some):
        return None
    rows = np.column_stack((rows_of(heads, head, some), key_numbers(heads)[1][some].astype(np.uint64)))
    times = times[some]
    order = np.argsort(_folded(rows * _MIXED[: rows.shape[1]]), kind="stable")
    ours, before = order[1:], order[:-1]
    apart = times[ours] - times[before]
    same = (apart >= 0) & (apart <= SAME_PACKET_NS)
    close = np.flatnonzero(same)
    same[close] = (rows[ours[close]] == rows[before[close]]).all(axis=1)
    close = np.flatnonzero(same & (apart > AT_ONCE_NS))
    same[close] = [has_timestamp(row.tobytes()) for row in rows[ours[close]]]
    if not same.any():
        return None
    found = np.zeros(len(heads.index), bool)
    found[some[ours[same]]] = True
    return found


def _alike(heads: Heads) -> np.ndarray:
    """The plain packets that may have a duplicate with the same numbers: usually few of a window."""
    numbers = heads.seq.astype(np.uint64) << np.uint64(32) | heads.ack.astype(np.uint64)
    others = heads.identity.astype(np.uint64) << np.uint64(32) | heads.lane.astype(np.uint64)
    mixed = numbers * _MIXED[0] ^ others * _MIXED[1] ^ heads.length.astype(np.uint64) * _MIXED[2]
    order = np.argsort(mixed)
    twice = mixed[order[1:]] == mixed[order[:-1]]
    again = np.zeros(len(order), bool)
    again[order[1:][twice]] = again[order[:-1][twice]] = True
    return np.flatnonzero(again)


class Order:
    """The packets of a window by connection: those of each together, in the order of the capture.

    A connection is a pair of keys, one for each direction; side 0 is that of the key which came first. Its packets are
    one behind the other from `first[pair]` to `first[pair + 1]`.
    """

    def __init__(self, heads: Heads, lanes: Sequence[tuple[int, int]], odd: Mapping[int, int], time_ns: np.ndarray):
        """lanes: (pair, side) of each key of `heads`; -1: of no wanted pair. odd: the pair of each packet whose
        headers are not plain, by its index. time_ns: of all packets of the window."""
        pairs, sides = np.array(lanes, np.int64).reshape(-1, 2).T
        pair = pairs[heads.lane]
        member = np.flatnonzero(pair >= 0)
        columns = [
            heads.index[member],
            pair[member],
            sides[heads.lane[member]],
            *(column[member] for column in (heads.length, heads.seq, heads.ack, heads.start)),
        ]
        calm = heads.calm[member]
        if odd:
            more = (np.fromiter(odd.keys(), np.int64), np.fromiter(odd.values(), np.int64))
            nothing = np.zeros(len(odd), np.int64)
            columns = [
                np.concatenate((column, more[number] if number < len(more) else nothing))
                for number, column in enumerate(columns)
            ]
            calm = np.concatenate((calm, np.zeros(len(odd), bool)))
            order = np.lexsort((columns[0], columns[1]))
        else:
            order = np.argsort(columns[1].astype(np.uint16) if len(lanes) < 1 << 16 else columns[1], kind="stable")
        self._member, self._order = member, order
        self.index, self.pair, self._side, self._carried, self._seq, self._ack, self._start = (
            column[order] for column in columns
        )
        self._calm = calm[order]
        self._time_ns = time_ns[self.index]
        self.first = np.searchsorted(self.pair, np.arange(int(pairs.max(initial=-1)) + 2))
        self.rank = np.full(len(time_ns), -1)  # the place here of each packet of the window
        self.rank[self.index] = np.arange(len(self.index))
        self._again = np.zeros(len(order), bool)
        places = np.arange(len(order))  # and the last packet of each side up to each place
        self._last_of = tuple(np.maximum.accumulate(np.where(self._side == side, places, -1)) for side in (0, 1))
        self._count()

    def drop(self, copies: np.ndarray) -> None:
        """Some plain packets are there twice: they bring nothing."""
        again = np.zeros(len(self._order), bool)
        again[: len(self._member)] = copies[self._member]
        self._again = again[self._order]
        self._count()

    def _count(self) -> None:
        """Both sides' positions by each packet, if all before it were in order."""
        side = self._side
        self._length = np.where(self._again, 0, self._carried)
        from_first = np.where(side == 0, self._length, 0)
        sent = (np.cumsum(from_first), np.cumsum(self._length - from_first))
        self._sent = (np.concatenate(([0], sent[0])), np.concatenate(([0], sent[1])))  # before each packet
        first, second = self._sent[0][:-1], self._sent[1][:-1]
        self._own = self._seq - np.where(side == 0, first, second)
        self._peer = self._ack - np.where(side == 0, second, first)

    def _fits(self, low: int, high: int, first: np.ndarray | int, second: np.ndarray | int) -> np.ndarray:
        """Whether packets are the common case, if it began where both sides had sent so much less than they stand."""
        of_first = self._side[low:high] == 0
        own, peer = np.where(of_first, first, second), np.where(of_first, second, first)
        ahead = (self._peer[low:high] - peer) & MASK
        again = self._again[low:high]
        next_one = (self._own[low:high] - own) & MASK == 0
        fits: np.ndarray = self._calm[low:high] & next_one & ((ahead == 0) | (ahead >= HALF)) | again
        return fits

    def stretches(self, positions: Mapping[int, tuple[int, int]]) -> list[Stretch]:
        """The first of each connection that is established; positions: where both sides of those stand."""
        pairs = np.array(sorted(positions), np.int64)
        starts, stops = self.first[pairs], self.first[pairs + 1]
        bases = [
            np.array([positions[pair][side] for pair in pairs.tolist()], np.int64) - self._sent[side][starts]
            for side in (0, 1)
        ]
        whole = np.zeros((2, len(self.pair)), np.int64)
        unknown = np.ones(len(self.pair), bool)
        counts = stops - starts
        places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        for side in (0, 1):
            whole[side][places] = np.repeat(bases[side], counts)
        unknown[places] = False
        odd = np.flatnonzero(~self._fits(0, len(self.pair), whole[0], whole[1]) | unknown)
        ends = np.minimum(np.append(odd, len(self.pair))[np.searchsorted(odd, starts)], stops)
        inside = np.zeros(len(self.pair) + 1, np.int64)
        np.add.at(inside, starts, 1)
        np.subtract.at(inside, ends, 1)
        carrying = np.flatnonzero((np.cumsum(inside[:-1]) > 0) & (self._length > 0))
        segments = self._segments(carrying)
        has_copies = bool(self._again.any())
        rows = zip(
            pairs.tolist(),
            starts.tolist(),
            ends.tolist(),
            *(
                (base + self._sent[side][ends]).tolist()  # where each side stands behind it
                for side, base in enumerate(bases)
            ),
            np.searchsorted(carrying, starts).tolist(),
            np.searchsorted(carrying, ends).tolist(),
            self._time_ns[ends - 1].tolist(),
            strict=True,
        )
        return [
            Stretch(
                pair,
                slice(low, high),
                (first, second),
                last_ns,
                segments,
                slice(begin, end),
                self._dropped(low, high, positions[pair]) if has_copies else (0, 0),
                self._acks(low, high),
            )
            for pair, low, high, first, second, begin, end, last_ns in rows
            if high > low
        ]

    def stretch(self, pair: int, low: int, positions: tuple[int, int]) -> Stretch | None:
        """That of a connection which begins at a place, where its sides stand at `positions`."""
        high = int(self.first[pair + 1])
        first, second = (positions[side] - int(self._sent[side][low]) for side in (0, 1))
        fits = self._fits(low, high, first, second)
        stop = high if fits.all() else low + int(fits.argmin())
        if stop == low:
            return None
        carrying = low + np.flatnonzero(self._length[low:stop])
        return Stretch(
            pair,
            slice(low, stop),
            (first + int(self._sent[0][stop]), second + int(self._sent[1][stop])),
            int(self._time_ns[stop - 1]),
            self._segments(carrying),
            slice(0, len(carrying)),
            self._dropped(low, stop, positions),
            self._acks(low, stop),
        )

    def _acks(self, low: int, high: int) -> tuple[int, int]:
        """The last acknowledgement of each side among some packets of one connection; -1: it sent none of them."""
        first, second = (int(last[high - 1]) for last in self._last_of)
        return int(self._ack[first]) if first >= low else -1, int(self._ack[second]) if second >= low else -1

    def _segments(self, places: np.ndarray) -> Segments:
        begin = self._start[places]
        return Segments(self._side[places], begin, begin + self._length[places], self._time_ns[places])

    def _dropped(self, low: int, high: int, positions: tuple[int, int]) -> tuple[int, int]:
        """Copies with payload, by side: as of segments that were sent again, one byte before the next is a probe."""
        again = self._again[low:high]
        if not again.any():
            return 0, 0
        carried, side = self._carried[low:high], self._side[low:high]
        bases = [positions[number] - int(self._sent[number][low]) for number in (0, 1)]
        behind = (np.where(side == 0, *bases) - self._own[low:high]) & MASK
        dropped = again & (carried > 0) & ((carried > 1) | (behind != carried))
        return int((dropped & (side == 0)).sum()), int((dropped & (side == 1)).sum())
