"""Duplicates in captured traffic: a packet at several interfaces, a connection under two addresses.

Duty: if several interfaces are watched, `OneInterface` takes each direction of a connection from the interface that
showed it first, as long as that one continues to show it: a bridge, its member and a tunnel's end show one packet each.
`Twins` recognises a connection before and after address translation, which keeps sequence numbers.

Bounded by MAX_DIRECTIONS and MAX_TWINS. Refuses to know sockets and sessions.
"""

from collections import OrderedDict

import numpy as np

from kproxy.capture.columns.mapped import Columns
from kproxy.capture.connections.flow import Flow
from kproxy.capture.connections.reassembly import MASK
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import SAME_STREAM_NS

MAX_DIRECTIONS = 1 << 16
MAX_TWINS = 1 << 16
SILENT_NS = 1_000_000_000  # after so long an interface no longer shows a direction: routes change

_MIXED = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, 10)], np.uint64)  # odd multipliers
_TCP = 6


class OneInterface:
    """The interface from which each direction of a connection is taken."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, tuple[int, int]] = OrderedDict()  # hash of a key -> (interface, time last seen)

    def __call__(self, window: Window, interface: np.ndarray) -> tuple[Window, int]:
        """Return the window without duplicates from other interfaces, and the number of those."""
        records = window.records
        assert isinstance(records, Columns)
        mixed = _keys(records.head)
        known, first, place = np.unique(mixed, return_index=True, return_inverse=True)
        pairs = np.unique(place * (1 << 32) + interface)
        last_ns = int(records.time_ns[-1])
        shown = {(int(pair) >> 32, int(pair) & 0xFFFFFFFF) for pair in pairs.tolist()}
        chosen = np.empty(len(known), np.int64)
        for index, key in enumerate(known.tolist()):
            if key == 0:  # not a plain TCP packet: reassembly finds duplicates by content
                chosen[index] = -1
                continue
            before = self._chosen.get(key)
            if before is not None and (index, before[0]) not in shown and last_ns - before[1] > SILENT_NS:
                before = None
            number = int(interface[first[index]]) if before is None else before[0]
            if before is None or (index, number) in shown:
                self._chosen[key] = (number, last_ns)
                self._chosen.move_to_end(key)
            chosen[index] = number
        while len(self._chosen) > MAX_DIRECTIONS:
            self._chosen.popitem(last=False)
        of_packet = chosen[place]
        kept = (of_packet == interface) | (of_packet < 0)
        left_out = len(kept) - int(kept.sum())
        if not left_out:
            return window, 0
        columns = Columns(
            records.time_ns[kept],
            records.link,
            records.start[kept],
            records.end[kept],
            records.original[kept],
            records.head[kept],
        )
        return Window(window.data, window.offset, columns, window.is_lasting), left_out


def _keys(head: np.ndarray) -> np.ndarray:
    """Return a hash of each packet's addresses and ports; 0 if these are not at their usual offsets."""
    mixed = np.zeros(len(head), np.uint64)
    first = head[:, 0]
    for is_kind, start, width in (
        ((first == 0x45) & (head[:, 9] == _TCP) & ((head[:, 6] & 0x3F) == 0) & (head[:, 7] == 0), 12, 12),
        ((first >> 4 == 6) & (head[:, 6] == _TCP), 8, 36),
    ):
        index = np.flatnonzero(is_kind)
        if len(index):
            words = np.ascontiguousarray(head[index, start : start + width]).view("<u4") * _MIXED[: width // 4]
            shifted = words >> np.arange(words.shape[1], dtype=np.uint64)
            mixed[index] = np.bitwise_xor.reduce(shifted, axis=1) >> np.uint64(1) | np.uint64(1)
    return mixed


class Twins:
    """Detects connections that begin with the same sequence numbers at the same time: one stream, seen twice."""

    def __init__(self) -> None:
        self._met: OrderedDict[tuple[int, int], tuple[tuple[bytes, bytes], int]] = OrderedDict()

    def is_copy(self, flow: Flow) -> bool:
        """Whether a connection was already seen under other addresses."""
        halves = flow.talk.halves
        numbers = halves[flow.client].first & MASK, halves[1 - flow.client].first & MASK
        known = self._met.get(numbers)
        if known is not None and known[0] != flow.keys and flow.first_ns - known[1] <= SAME_STREAM_NS:
            return True
        self._met[numbers] = (flow.keys, flow.first_ns)
        self._met.move_to_end(numbers)
        if len(self._met) > MAX_TWINS:
            self._met.popitem(last=False)
        return False
