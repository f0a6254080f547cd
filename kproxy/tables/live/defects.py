"""Events that a recorder could not pack: a defect of kproxy, which is logged and must not end a connection.

Bounded: _KINDS kinds are counted separately, and each has one log line per _REPORT_S.
"""

import logging
import time
from traceback import extract_tb

_KINDS = 32  # kinds of failure that are counted separately; all others are counted together
_REPORT_S = 60.0  # between two log lines about one kind of failure


class Defects:
    """Counts events that kproxy failed to pack, by exception and line of code, and logs each kind.

    The first event of a kind is logged with its traceback, later ones as a count, one line per _REPORT_S.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, list[float]] = {}  # [events, events at the last line, time of the last line]

    def note(self, fault: Exception) -> None:
        last = extract_tb(fault.__traceback__)[-1]
        kind = f"{type(fault).__name__} in {last.name}, line {last.lineno}"
        if kind not in self._kinds and len(self._kinds) >= _KINDS:
            kind = "other failures"
        now_s = time.monotonic()
        known = self._kinds.setdefault(kind, [0, 0, now_s - _REPORT_S])
        known[0] += 1
        if known[0] == 1:
            message = "a defect of kproxy's recorder, %s: this event is in no table, nor any like it"
            self._log.error(message, kind, exc_info=fault)
        elif now_s - known[2] >= _REPORT_S:
            self._log.error("a defect of kproxy's recorder, %s: %d events so far are in no table", kind, known[0])
        else:
            return
        known[1:] = known[0], now_s

    def report(self) -> None:
        """Log the totals that were not logged yet."""
        for kind, (events, reported, _) in self._kinds.items():
            if events > reported:
                self._log.error("a defect of kproxy's recorder, %s: %d events in all are in no table", kind, events)
