"""Log lines that a peer can trigger any number of times: one a second of each kind.

Bounded: MAX_KINDS kinds are remembered; further ones share one place until older ones have expired. Refuses to know
the content of lines.
"""

import logging
from time import monotonic
from typing import Any

MAX_KINDS = 1024
_INTERVAL_S = 1.0
_OVERFLOW = object()


class LogLimiter:
    """Logs at most one line a second of each kind, with the number of lines that it left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: dict[Any, tuple[float, int]] = {}  # kind -> (when it was logged, left out since)

    def log(self, level: int, kind: Any, text: str, *values: Any, exc_info: BaseException | None = None) -> None:
        """Log `text % values`, unless a line of that kind was logged within the last second."""
        now = monotonic()
        if kind not in self._last and len(self._last) >= MAX_KINDS:
            kind = self._kind_beyond_limit(kind, now)
        logged_at, left_out = self._last.get(kind, (now - _INTERVAL_S, 0))
        if now - logged_at < _INTERVAL_S:
            self._last[kind] = (logged_at, left_out + 1)
            return
        self._last[kind] = (now, 0)
        if left_out:
            text += " (and %d more like it)"
            values += (left_out,)
        more = {"left_out": left_out} if left_out else None
        self._log.log(level, text, *values, exc_info=exc_info, extra=more)

    def _kind_beyond_limit(self, kind: Any, now: float) -> Any:
        """Forget kinds that are a second old; the new kind itself if that made room, else the shared one."""
        shared = self._last.get(_OVERFLOW, (now - _INTERVAL_S, 0))
        if _OVERFLOW in self._last and now - shared[0] < _INTERVAL_S:
            return _OVERFLOW
        self._last = {known: at for known, at in self._last.items() if now - at[0] < _INTERVAL_S}
        return kind if len(self._last) < MAX_KINDS else _OVERFLOW
