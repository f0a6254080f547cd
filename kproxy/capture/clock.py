"""The capturing machine's clock, if it was set during the capture: times without its steps.

Duty: a capture has the wall clock's times. If that was set back or forth, all durations across the step would be
wrong, and after a step back later ones too. So times after a step are shifted by its size: they continue the clock as
it was before. A step counts only if a connection shows it:

- back: a connection goes on, in sequence, STEP_NS or more before a packet that it had already sent. Concatenated
  captures, and packets that overtook others, do not look like that;
- forth: the clock jumps by STEP_NS or more, and the TCP timestamps of a connection show less than half of that (they
  count 10 times a second at least);
- and a jump back to the clock before a step.

The true time between the packets before and after a step is unknown: a step is assumed to be of whole seconds if they
are then less than WHOLE_NS apart, else they get the same time.

Memory: the last BESIDE packets of a window. Work: for a jump the BESIDE packets before and after it. Refuses to know
payloads and flows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kproxy.capture.columns.mapped import Columns, kept
from kproxy.capture.copies import times_of
from kproxy.capture.packets import SYN, Dissector
from kproxy.capture.quality import Quality
from kproxy.capture.reassembly import HALF, MASK
from kproxy.capture.records import SECOND, Record, Window

STEP_NS = 250_000_000
WHOLE_NS = 10_000_000
BESIDE = 256
NEAR = 64 << 20  # bytes that a connection may have sent in between
SLOWEST_TICK_NS = 100_000_000  # of TCP timestamps: 1 ms is usual, and 10 ms of old kernels


class _Seen(NamedTuple):
    """A packet's data about its connection's direction."""

    time_ns: int
    seq: int
    ticks: int  # of the TCP timestamp; -1: it has none


class Clock:
    """Takes the windows of a capture one after the other; the steps of its clock are noted in `quality`."""

    def __init__(self, quality: Quality) -> None:
        self.steps = 0
        self._quality = quality
        self._dissect = Dissector(Quality()).segment
        self._shift_ns = 0  # added to the times now
        self._last: Window | None = None  # the end of the window before, with the times of the capture
        self._last_ns = -1

    def take(self, window: Window) -> Window:
        """A window with the times as if the clock had not been set."""
        records = window.records
        if not records:
            return window
        times = times_of(records)
        jumps = np.diff(times, prepend=times[0] if self._last_ns < 0 else self._last_ns)
        shifts: list[tuple[int, int]] = [(0, self._shift_ns)]  # from which record on
        for index in np.flatnonzero(np.abs(jumps) >= STEP_NS).tolist():
            jump = int(jumps[index])
            if self._is_step(window, index, jump):
                self._shift_ns -= _size(jump)
                self.steps += 1
                self._quality.note("clock_step", int(times[index]) + self._shift_ns)
                shifts.append((index, self._shift_ns))
        self._last_ns = int(times[-1])
        last = kept(window, max(0, len(records) - BESIDE))
        self._last = last._replace(records=last.records[-BESIDE:])
        if len(shifts) == 1 and not self._shift_ns:
            return window
        shifted = times.copy()
        for number, (index, shift_ns) in enumerate(shifts):
            until = shifts[number + 1][0] if number + 1 < len(shifts) else len(records)
            shifted[index:until] += shift_ns
        return window._replace(records=_at(records, shifted))

    def clear(self) -> None:
        """Another capture begins."""
        self._shift_ns, self._last, self._last_ns = 0, None, -1

    def _is_step(self, window: Window, index: int, jump: int) -> bool:
        if jump > 0 and self._shift_ns > 0 and abs(jump - self._shift_ns) < STEP_NS:
            return True  # back to where it was
        before = self._seen(window, max(0, index - BESIDE), index)
        if index < BESIDE and self._last is not None:
            earlier = self._seen(self._last, max(0, len(self._last.records) + index - BESIDE), len(self._last.records))
            before = {key: each for key, each in earlier.items() if key not in before} | before
        for number in range(index, min(len(window.records), index + BESIDE)):
            found = self._packet(window, number)
            if found is None:
                continue
            key, seen = found
            earlier_one = before.get(key)
            if earlier_one is None:
                continue
            if jump < 0:
                went_on = (seen.seq - earlier_one.seq) & MASK < NEAR
                if went_on and earlier_one.time_ns - seen.time_ns >= STEP_NS:
                    return True
            elif earlier_one.ticks >= 0 and seen.ticks >= 0:
                ticks = (seen.ticks - earlier_one.ticks) & MASK
                if not ticks and seen.seq == earlier_one.seq:
                    continue  # maybe the same packet, captured at the other end too
                return ticks < HALF and ticks * SLOWEST_TICK_NS < (seen.time_ns - earlier_one.time_ns) // 2
        return False

    def _seen(self, window: Window, low: int, high: int) -> dict[bytes, _Seen]:
        """The last packet of each direction of a connection."""
        return dict(found for number in range(low, high) if (found := self._packet(window, number)) is not None)

    def _packet(self, window: Window, number: int) -> tuple[bytes, _Seen] | None:
        time_ns, link, start, end, _ = window.records[number]
        segment = self._dissect(link, window.data, start, end, time_ns)
        if segment is None or segment[4] & SYN:
            return None
        data, key, seq, _, bits, _, payload, _, _ = segment
        return key, _Seen(time_ns, seq, _ticks(data[max(0, payload - (bits >> 12 << 2) + 20) : payload]))


def _size(jump: int) -> int:
    """The step of a jump: of whole seconds if the packets around it can be that far apart."""
    whole = jump // SECOND * SECOND
    return whole if jump - whole < WHOLE_NS else jump


def _ticks(options: bytes) -> int:
    """The sender's timestamp among the options of TCP (RFC 7323); -1: there is none."""
    at = 0
    while at + 1 < len(options):
        kind = options[at]
        if kind == 1:
            at += 1
            continue
        size = options[at + 1]
        if kind == 8 and size == 10 and at + 6 <= len(options):
            return int.from_bytes(options[at + 2 : at + 6])
        if kind == 0 or size < 2:
            break
        at += size
    return -1


def _at(records: Sequence[Record], times: np.ndarray) -> Sequence[Record]:
    """The same records at other times."""
    if isinstance(records, Columns):
        return Columns(times, records.link, records.start, records.end, records.original, records.head)
    return [(time_ns, *record[1:]) for time_ns, record in zip(times.tolist(), records, strict=True)]
