"""Packets captured twice, as on a bridge and its member, apart from segments that were sent again.

Duty: keeps the windows of the last SAME_PACKET_NS and finds a packet in them. A segment that was sent again is another
packet: its IP identity or its TCP timestamp differs.

Time counts from packet to packet. Where a capture goes back in time, as several that were concatenated do, what comes
after that is far from what came before it, and the search ends there.

Memory: RECENT windows at most, and of those that do not last a copy of their end. Work: KEPT_BYTES are searched for a
packet at most. Refuses to know connections.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from kproxy.capture.columns.mapped import KEPT_BYTES, Columns, kept
from kproxy.capture.packets import Segment
from kproxy.capture.records import Record, Window

SAME_PACKET_NS = 1_000_000  # between two captures of one packet; what is sent again takes a round trip at least
RECENT = 16


def times_of(records: Sequence[Record]) -> np.ndarray:
    """The times of some records."""
    return records.time_ns if isinstance(records, Columns) else np.array([record[0] for record in records], np.int64)


class Recent:
    """The windows of the last moments, of which the last is in hand."""

    def __init__(self) -> None:
        self._stamp_ns = -1  # of the last packet
        self._passed_ns = 0  # up to it
        self._windows: deque[tuple[Window, np.ndarray]] = deque(maxlen=RECENT)  # with what had passed at each packet

    def add(self, window: Window) -> None:
        """The next window is in hand."""
        passed = np.zeros(0, np.int64)
        if window.records:
            times = times_of(window.records)
            steps = np.diff(times, prepend=times[0] if self._stamp_ns < 0 else self._stamp_ns)
            steps[steps < -SAME_PACKET_NS] = 2 * SAME_PACKET_NS
            steps[0] += self._passed_ns
            passed = np.maximum.accumulate(np.cumsum(steps))
            self._stamp_ns, self._passed_ns = int(times[-1]), int(passed[-1])
        self._windows.append((window, passed))

    def let_go(self) -> None:
        """The window in hand is done with: what is too old goes, and of it what is needed is kept."""
        since_ns = self._passed_ns - SAME_PACKET_NS
        while self._windows and (not len(passed := self._windows[0][1]) or passed[-1] < since_ns):
            self._windows.popleft()
        if self._windows:
            window, passed = self._windows.pop()
            window = kept(window, int(np.searchsorted(passed, since_ns)))
            self._windows.append((window, passed[len(passed) - len(window.records) :]))

    def clear(self) -> None:
        """Another capture begins."""
        self._windows.clear()
        self._stamp_ns = -1

    def has(self, index: int, segment: Segment) -> bool:
        """Whether a packet shortly before the `index`th in hand is the same."""
        held, key, _, _, bits, _, start, _, _ = segment
        header = start - (bits >> 12 << 2)
        fixed, options = held[header : header + 16], held[header + 20 : start]
        width = len(key) - 4
        if width == 8 and header >= 20 and held[header - 20] == 0x45:
            before, behind = 18, 14  # IPv4's length and identity
        elif width == 32 and header >= 40 and held[header - 40] >> 4 == 6:
            before, behind = 36, 34  # IPv6's length
        else:
            before = behind = 0  # something stands between that header and TCP's
        sized = held[header - before : header - behind]
        addresses = held[max(0, header - width) : header]
        since_ns = self._windows[-1][1][index] - SAME_PACKET_NS
        left = KEPT_BYTES
        for age, ((data, _, records, _), passed) in enumerate(reversed(self._windows)):
            stop = len(records) if age else index
            first = int(np.searchsorted(passed[:stop], since_ns))
            if first < stop:
                place = records[stop - 1][3]
                oldest = max(records[first][2], place - left)
                left -= place - oldest
                while (place := data.rfind(fixed, oldest, place)) >= 0:
                    if (
                        data[place + 20 : place + 20 + len(options)] == options
                        and data[max(0, place - width) : place] == addresses
                        and data[place - before : place - behind] == sized
                    ):
                        return True
            if first or not left:
                return False
        return False
