"""The segments of a window that are in order and whole, found all at once.

Duty: of most packets there is nothing to decide: plain headers, the next sequence number of an established
connection, nothing acknowledged that was not delivered. That is `Conversation.segment`'s common case, and here it is
asked of all packets of a window in one go, by column. What a connection has in a window before the first packet that is
anything else is its stretch; that packet and all behind it are left to be taken one by one. A packet that is there
twice, as on a bridge and its member, is no reason to end a stretch: `copies` finds the second ones.

Memory: some columns of the window's packets. Refuses to know sessions, and what becomes of what is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kproxy.capture.columns.lanes import Segments
from kproxy.capture.packets import ETHERNET, FIN, RAW, RST, SLL, SLL2, SYN
from kproxy.capture.reassembly import HALF, MASK

FEWEST = 64  # packets worth columns
HEAD = 80  # bytes of a packet that are looked at: of SLL2 and IPv6 the most

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
_COPIED = 40  # bytes of a TCP header that copies are known by: of the fixed part 16, and of options 24
_MIXED = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, 10)], np.uint64)  # odd numbers


@dataclass(slots=True)
class Heads:
    """The packets whose headers are plain, by column: `index` says which of the window they are."""

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


@dataclass(slots=True)
class Stretch:
    """What a connection has in a window before anything but the common case."""

    flow: int
    positions: tuple[int, int]  # where both sides stand after it
    first_ns: int  # nothing in it is earlier
    last_ns: int  # of its last packet
    low: int  # its segments with payload: from this one
    high: int  # to this one
    copies: tuple[int, int] = (0, 0)  # with payload, of each side


def heads(link: int, start: np.ndarray, end: np.ndarray, head: np.ndarray) -> Heads | None:
    """The plain headers among packets; None if there are none, or the hashes of two keys are the same.

    head: the first HEAD bytes of each, and whatever is behind those that are shorter.
    """
    found: list[Heads] = []
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
    if len(found) < 2:
        return found[0] if found else None
    keys = list(chain.from_iterable(each.keys for each in found))
    shifts = np.cumsum([0, *(len(each.keys) for each in found)])
    lane = np.concatenate([each.lane + shift for each, shift in zip(found, shifts[:-1], strict=True)])
    order = np.argsort(index := np.concatenate([each.index for each in found]))
    columns = (
        np.concatenate([getattr(each, name) for each in found])[order]
        for name in ("seq", "ack", "start", "length", "calm", "tcp", "size", "identity")
    )
    return Heads(index[order], lane[order], keys, *columns)


def _plain(index: np.ndarray, start: np.ndarray, end: np.ndarray, ip: np.ndarray, offset: int) -> Heads | None:
    """Those that are TCP, in one piece and without options, of IP headers of one version at `start`."""
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
    mixed = np.bitwise_xor.reduce(words >> np.arange(words.shape[1], dtype=np.uint64), axis=1)
    _, where, lane = np.unique(mixed, return_index=True, return_inverse=True)
    if (words[where][lane] != words).any():
        return None
    seq, ack = ip["seq"].astype(np.int64), ip["ack"].astype(np.int64)
    identity = ip["identity"] if ip.dtype == _IPV4 else np.zeros(len(ip), np.uint16)
    tcp = np.full(len(ip), offset + (20 if ip.dtype == _IPV4 else 40))
    return Heads(
        index, lane, keys[where].tolist(), seq, ack, payload, stop - payload, calm, tcp, bits >> 12 << 2, identity
    )


def copies(heads: Heads, head: np.ndarray, time_ns: np.ndarray, within_ns: int) -> np.ndarray | None:
    """Which plain packets are the same as one before them in the window: by TCP's header, IPv4's identity, and time.

    A segment that was sent again differs in its identity or in its timestamp. head, time_ns: of all packets. None:
    there are none, or the clock goes back, so that nothing can be said by column.
    """
    times = time_ns[heads.index]
    if not len(times) or (np.diff(times) < 0).any():
        return None
    place = np.arange(_COPIED)
    columns = heads.tcp[:, None] + np.where(place < 16, place, place + 4)  # without checksum and urgent pointer
    known = columns < (heads.tcp + heads.size)[:, None]
    whole = (heads.tcp + heads.size <= head.shape[1]) & (heads.size <= _COPIED + 4)
    data = np.where(known, head[heads.index[:, None], np.minimum(columns, head.shape[1] - 1)], 0).astype(np.uint8)
    rows = np.concatenate(
        (data.view("<u8"), (heads.identity.astype(np.uint64) << np.uint64(32) | heads.lane.astype(np.uint64))[:, None]),
        axis=1,
    )
    mixed = np.bitwise_xor.reduce(rows * _MIXED[: rows.shape[1]] >> np.arange(rows.shape[1], dtype=np.uint64), axis=1)
    order = np.argsort(mixed, kind="stable")
    ours, before = order[1:], order[:-1]
    same = (mixed[ours] == mixed[before]) & (times[ours] - times[before] <= within_ns) & whole[ours] & whole[before]
    some = np.flatnonzero(same)
    same[some] = (rows[ours[some]] == rows[before[some]]).all(axis=1)
    if not same.any():
        return None
    found = np.zeros(len(times), bool)
    found[ours[same]] = True
    return found


def stretches(
    heads: Heads,
    lanes: Sequence[tuple[int, int]],
    positions: Sequence[tuple[int, int]],
    odd: Mapping[int, int],
    time_ns: np.ndarray,
    copies: np.ndarray | None = None,
) -> tuple[list[Stretch], Segments, np.ndarray]:
    """What the connections have before anything but the common case, its segments, and whether a packet is in that.

    lanes: (connection, side) of each key; -1: none that is established. positions: where both sides of each
    connection stand. odd: the connection of packets whose headers are not plain, by their index. copies: which packets
    are to be dropped, since they are there twice.
    """
    taken = np.zeros(len(time_ns), bool)
    flows, sides = np.array(lanes, np.int64).reshape(-1, 2).T
    flow = flows[heads.lane]
    member = np.flatnonzero(flow >= 0)
    if not len(member):
        return [], Segments(*np.zeros((4, 0), np.int64)), taken
    index, flow, side = heads.index[member], flow[member], sides[heads.lane[member]]
    length, seq, ack = heads.length[member], heads.seq[member], heads.ack[member]
    start, calm = heads.start[member], heads.calm[member]
    again = np.zeros(len(member), bool) if copies is None else copies[member]
    carried = length
    length = np.where(again, 0, length)
    if odd:
        index = np.concatenate((index, np.fromiter(odd.keys(), np.int64)))
        flow = np.concatenate((flow, np.fromiter(odd.values(), np.int64)))
        side, length, carried, seq, ack, start = (
            np.concatenate((column, np.zeros(len(odd), np.int64)))
            for column in (side, length, carried, seq, ack, start)
        )
        calm, again = (np.concatenate((column, np.zeros(len(odd), bool))) for column in (calm, again))
        order = np.lexsort((index, flow))
    else:
        order = np.argsort(flow.astype(np.uint16), kind="stable")
    index, flow, side, length = index[order], flow[order], side[order], length[order]

    # where both sides stand when a packet comes, if all before it were in order
    group = np.flatnonzero(np.diff(flow, prepend=-1))  # where each connection's packets begin
    counts = np.diff(group, append=len(flow))
    from_client = np.where(side == 0, length, 0)
    stands = []
    for number, sent in enumerate((from_client, length - from_client)):
        summed = np.cumsum(sent) - sent
        base = np.array([positions[each][number] for each in flow[group].tolist()], np.int64) - summed[group]
        stands.append(summed + np.repeat(base, counts))
    first, second = stands
    own, peer = np.where(side == 0, first, second), np.where(side == 0, second, first)
    ahead = (ack[order] - peer) & MASK
    again, carried = again[order], carried[order]
    calm = calm[order] & (((seq[order] - own) & MASK) == 0) & ((ahead == 0) | (ahead >= HALF)) | again

    # as of segments that were sent again, one byte before the next is a keep-alive probe
    dropped = again & (carried > 0) & ((carried > 1) | (((own - seq[order]) & MASK) != carried))
    places = np.arange(len(flow))
    stop = np.minimum(np.minimum.reduceat(np.where(calm, len(flow), places), group), group + counts)
    inside = places < np.repeat(stop, counts)
    taken[index[inside]] = True
    carrying = np.flatnonzero(inside & (length > 0))
    times, begins = time_ns[index], start[order][carrying]
    segments = Segments(side[carrying], begins, begins + length[carrying], times[carrying])
    some = stop > group
    last = stop[some] - 1
    rows = zip(
        flow[group[some]].tolist(),
        (first + from_client)[last].tolist(),
        (second + length - from_client)[last].tolist(),
        np.minimum.reduceat(times, group)[some].tolist(),
        times[last].tolist(),
        np.searchsorted(carrying, group[some]).tolist(),
        np.searchsorted(carrying, stop[some]).tolist(),
        zip(
            *(_sums(dropped & (side == number), group[some], stop[some]) for number in (0, 1)),
            strict=True,
        ),
        strict=True,
    )
    return (
        [
            Stretch(flow_, (client, broker), first_ns, last_ns, low, high, dropped)
            for flow_, client, broker, first_ns, last_ns, low, high, dropped in rows
        ],
        segments,
        taken,
    )


def _sums(flags: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[int]:
    """How many flags are set between places."""
    summed = np.concatenate(([0], np.cumsum(flags)))
    found: list[int] = (summed[stops] - summed[starts]).tolist()
    return found
