"""Corrects the times of a capture whose machine's clock was set during the capture.

Duty: a capture has the times of the wall clock. If the clock was set back or forward, all durations across the step
would be wrong, and after a step back later ones too. `Clock` shifts the times after a step by its size, so that they
continue the clock before the step. A jump of the clock counts as a step only if a connection proves it:

- back: a connection continues in sequence, STEP_NS or more before the time of its previous packet. Concatenated
  captures and reordered packets do not look like this;
- forward: the clock jumps by STEP_NS or more, and the TCP timestamps of a connection advance by less than half of that.
  The packets before the jump show their frequency, one of TICKS_NS of known kernels; if there are too few packets, it
  is assumed to be at least 10 Hz;
- back to the clock before an earlier step.

A jump forward is a step plus a real pause, as during a broker's outage: the TCP timestamps show the length of the
pause. If they do not, the step is assumed to be whole seconds if the packets before and after it are then less than
WHOLE_NS apart; otherwise these packets get the same time.

If no connection in a window proves or refutes its last jump, the next windows may. The packets in between, fewer than
NEIGHBOURS, then keep their times, since they were already passed on.

Memory: the last NEIGHBOURS packets of a window, and the timestamps of their connections. Work: the NEIGHBOURS packets
before and after each jump. Refuses to know payloads and flows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kproxy.capture.columns.mapped import Columns, kept
from kproxy.capture.connections.reassembly import HALF, MASK
from kproxy.capture.dissection.copies import times_of
from kproxy.capture.dissection.packets import SYN, Dissector
from kproxy.capture.formats.records import SECOND, Record, Window
from kproxy.capture.quality import Quality

STEP_NS = 250_000_000
WHOLE_NS = 10_000_000
NEIGHBOURS = 256  # packets before and after a jump that may prove it
NEAR = 64 << 20  # bytes that a connection may have sent in between
SLOWEST_TICK_NS = 100_000_000  # unit of TCP timestamps: usually 1 ms, 10 ms in old kernels
TICKS_NS = (1_000, 1_000_000, 4_000_000, 10_000_000, SLOWEST_TICK_NS)  # 1 us: Linux 6.7's tcp_usec_ts
MIN_TICKS = 10  # fewer do not distinguish the frequencies
DRIFT = 500  # two clocks drift apart by much less than 1/DRIFT of a duration


class _Seen(NamedTuple):
    """The time, sequence number and TCP timestamp of a packet."""

    time_ns: int
    seq: int
    ticks: int  # TCP timestamp; -1: the packet has none


class _Jump(NamedTuple):
    """A jump of the clock that no connection has proved or refuted as a step so far."""

    size: int  # nanoseconds
    before: dict[bytes, tuple[_Seen, _Seen]]  # the first and the last packet of each direction of a connection
    shift_ns: int  # added to the times before the jump
    room: int  # further packets that may still prove it


class Clock:
    """Takes the windows of a capture one after the other; counts the steps of its clock in `quality`."""

    def __init__(self, quality: Quality) -> None:
        self.steps = 0
        self._quality = quality
        self._dissect = Dissector(Quality()).segment
        self._shift_ns = 0  # added to the current times
        self._last: Window | None = None  # the end of the previous window, with shifted times
        self._last_ns = -1
        self._open: _Jump | None = None  # the last jump, if the next window may prove it

    def take(self, window: Window) -> Window:
        """Return a window with the times of a clock that was not set."""
        records = window.records
        if not records:
            return window
        times = times_of(records)
        self._close(window, times)
        jumps = np.diff(times, prepend=times[0] if self._last_ns < 0 else self._last_ns)
        self._last_ns = int(times[-1])
        shifted = times + self._shift_ns
        is_shifted = self._shift_ns != 0
        for index in np.flatnonzero(np.abs(jumps) >= STEP_NS).tolist():
            step = self._step(window, shifted, index, int(jumps[index]))
            if step:
                shifted[index:] -= step
                self._set(step, int(shifted[index]))
                is_shifted = True
        if is_shifted:
            window = window._replace(records=_at(records, shifted))
        last = kept(window, max(0, len(records) - NEIGHBOURS))
        self._last = last._replace(records=last.records[-NEIGHBOURS:])
        return window

    def clear(self) -> None:
        """Another capture begins."""
        self._shift_ns, self._last, self._last_ns, self._open = 0, None, -1, None

    def _set(self, step: int, time_ns: int) -> None:
        """The clock was set by `step` nanoseconds before the packet at `time_ns`."""
        self._shift_ns -= step
        self.steps += 1
        self._quality.note("clock_step", time_ns)

    def _close(self, window: Window, times: np.ndarray) -> None:
        """Decide whether the last jump before this window was a step."""
        jump, self._open = self._open, None
        if jump is None or not (step := self._shown(jump, window, times + jump.shift_ns, 0)):
            return
        self._set(step, int(times[0]) + self._shift_ns - step)
        if self._last is not None:
            since = times_of(self._last.records).copy()
            since[-(NEIGHBOURS - jump.room) :] -= step
            self._last = self._last._replace(records=_at(self._last.records, since))

    def _step(self, window: Window, times: np.ndarray, index: int, jump: int) -> int:
        """Return the step, in nanoseconds, at a record whose time jumps; 0: the clock was not set.

        times: the times of the window's records, corrected for the steps before this one.
        """
        if jump > 0 and self._shift_ns > 0 and abs(jump - self._shift_ns) < STEP_NS:
            return _size(jump)  # back to the clock before an earlier step
        before = self._seen(window, times, max(0, index - NEIGHBOURS), index)
        if index < NEIGHBOURS and self._last is not None and self._last.records:
            earlier = times_of(self._last.records)
            low = max(0, len(earlier) + index - NEIGHBOURS)
            for key, (first, last) in self._seen(self._last, earlier, low, len(earlier)).items():
                before[key] = first, before.get(key, (first, last))[1]
        return self._shown(_Jump(jump, before, self._shift_ns, NEIGHBOURS), window, times, index)

    def _shown(self, jump: _Jump, window: Window, times: np.ndarray, index: int) -> int:
        """Return the step, in nanoseconds, that the packets from `index` on prove; 0: none.

        times: the times of the window's records, corrected for the steps before the jump.
        """
        size, before, _, room = jump
        for number in range(index, min(len(window.records), index + room)):
            found = self._packet(window, number, int(times[number]))
            if found is None or found[0] not in before:
                continue
            seen, (first, last) = found[1], before[found[0]]
            if size < 0:
                went_on = (seen.seq - last.seq) & MASK < NEAR
                if went_on and last.time_ns - seen.time_ns >= STEP_NS:
                    return _size(size)
            elif last.ticks >= 0 and seen.ticks >= 0:
                ticks = (seen.ticks - last.ticks) & MASK
                if not ticks and seen.seq == last.seq:
                    continue  # possibly the same packet, captured at the other end
                tick_ns = _tick_ns(first, last)
                apart_ns = seen.time_ns - last.time_ns
                missing = apart_ns - ticks * (tick_ns or SLOWEST_TICK_NS)
                if ticks >= HALF or 2 * missing <= size + apart_ns // DRIFT:
                    return 0
                return _size(size) if not tick_ns or size - missing < WHOLE_NS else missing
        if (room := room - (len(window.records) - index)) > 0:
            self._open = jump._replace(room=room)
        return 0

    def _seen(self, window: Window, times: np.ndarray, low: int, high: int) -> dict[bytes, tuple[_Seen, _Seen]]:
        """The first and the last packet of each direction of a connection."""
        ends: dict[bytes, tuple[_Seen, _Seen]] = {}
        for number in range(low, high):
            found = self._packet(window, number, int(times[number]))
            if found is not None:
                key, seen = found
                ends[key] = ends[key][0] if key in ends else seen, seen
        return ends

    def _packet(self, window: Window, number: int, time_ns: int) -> tuple[bytes, _Seen] | None:
        _, link, start, end, _ = window.records[number]
        segment = self._dissect(link, window.data, start, end, time_ns)
        if segment is None or segment[4] & SYN:
            return None
        data, key, seq, _, bits, _, payload, _, _ = segment
        return key, _Seen(time_ns, seq, _ticks(data[max(0, payload - (bits >> 12 << 2) + 20) : payload]))


def _size(jump: int) -> int:
    """The step of a jump: whole seconds, if the remaining pause is shorter than WHOLE_NS; otherwise all of it."""
    whole = jump // SECOND * SECOND
    return whole if jump - whole < WHOLE_NS else jump


def _tick_ns(first: _Seen, last: _Seen) -> int | None:
    """The unit of a sender's TCP timestamps, in nanoseconds; None: it sent too few packets."""
    ticks = (last.ticks - first.ticks) & MASK if first.ticks >= 0 else 0
    passed_ns = last.time_ns - first.time_ns
    if not MIN_TICKS <= ticks < HALF or passed_ns <= 0:
        return None
    return next((tick_ns for tick_ns in TICKS_NS if 0.5 < passed_ns / (ticks * tick_ns) < 2), None)


def _ticks(options: bytes) -> int:
    """The sender's timestamp (TSval) in TCP options (RFC 7323); -1: there is none."""
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
