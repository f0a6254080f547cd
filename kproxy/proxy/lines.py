"""Log lines of which a peer can cause any number.

Bounded by the kinds that its owners have. Refuses to know what the lines say.
"""

import logging
from time import monotonic
from typing import Any

_EVERY_S = 1.0


class Lines:
    """One a second of each kind, and how many were left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[Any, tuple[float, int]] = {}  # kind -> (when, left out since)

    def say(self, level: int, kind: Any, text: str, *values: Any) -> None:
        now = monotonic()
        when, left_out = self._said.get(kind, (now - _EVERY_S, 0))
        if now - when < _EVERY_S:
            self._said[kind] = (when, left_out + 1)
            return
        self._said[kind] = (now, 0)
        if left_out:
            text += " (and %d more like it)"
            values += (left_out,)
        self._log.log(level, text, *values)
