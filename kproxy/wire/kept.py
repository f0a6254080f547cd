"""Which whole frames are kept for who decodes them later, and how many bytes of them.

Duty: the choice of APIs and the two bounds, shared by all sessions of a process. What is not kept is counted in
`left_out` and passes as it came: nothing depends on it, so no fault follows.

Memory: `limit_bytes` for the frames of requests that are pending and of frames in transit, all sessions together; those
of `small` APIs, MAX_SMALL each, are not counted. An emitted exchange is no longer counted here: its frames belong to
whoever keeps the event.

Refuses to know exchanges (keeping.py), what is in a frame and who decodes it.
"""

from collections.abc import Collection
from typing import Any

MAX_FRAME = 8 * 1024 * 1024  # a LeaderAndIsr or UpdateMetadata of 50,000 partitions has 5 MB
MAX_TOGETHER = 32 * 1024 * 1024
MAX_SMALL = 1024  # of a request that is as good as always answered without an error

TOO_LARGE = "too_large"  # a frame beyond max_frame_bytes
TOO_MANY = "too_many"  # limit_bytes are kept already
GAP = "gap"  # a capture lost a part of the frame
WHY = (TOO_LARGE, TOO_MANY, GAP)


class Kept:
    """Which frames are kept.

    apis: the API keys of exchanges whose frames are kept; Produce is not among them.
    only_failed: those of them that are kept only if the answer has an error, such as Heartbeat.
    small: those of `only_failed` that are so many that an answer without an error must cost nothing: of such an
        exchange the request stays, and there is no answer.
    left_out: exchanges that are not kept are counted there, by why; there need be no entry for GAP.
    """

    __slots__ = ("apis", "held_bytes", "left_out", "limit_bytes", "max_frame_bytes", "only_failed", "small")

    def __init__(
        self,
        apis: Collection[int],
        *,
        only_failed: Collection[int] = (),
        small: Collection[int] = (),
        max_frame_bytes: int = MAX_FRAME,
        limit_bytes: int = MAX_TOGETHER,
        left_out: dict[str, int] | None = None,
    ) -> None:
        if 0 in apis:
            raise ValueError("frames of Produce carry records, which are not kept")
        self.apis = frozenset(apis)
        self.only_failed = frozenset(only_failed)
        self.small = frozenset(small)
        self.max_frame_bytes = max_frame_bytes
        self.limit_bytes = limit_bytes
        self.left_out = dict.fromkeys(WHY, 0) if left_out is None else left_out
        self.held_bytes = 0  # of pending requests and of frames in transit

    def is_small(self, size_bytes: int) -> bool:
        """Whether the request of a `small` API is; one that is not is counted."""
        if size_bytes > MAX_SMALL:
            self.left_out[TOO_LARGE] += 1
            return False
        return True

    def fits(self, size_bytes: int) -> bool:
        """Whether a frame is small enough; one that is not is counted."""
        if size_bytes > self.max_frame_bytes:
            self.left_out[TOO_LARGE] += 1
            return False
        return True

    def take(self, count: int) -> bool:
        """Reserve bytes until `release`; False, which is counted, if too many are kept already."""
        if self.held_bytes + count > self.limit_bytes:
            self.left_out[TOO_MANY] += 1
            return False
        self.held_bytes += count
        return True

    def release(self, count: int) -> None:
        self.held_bytes -= count


class FrameInParts:
    """A frame in transit, as far as it is here, or nothing of it any more."""

    __slots__ = ("_frame", "_kept")

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._frame: bytearray | None = bytearray()

    def add(self, part: Any) -> None:
        """Its next bytes. If too many are kept already, those before are released."""
        if self._frame is None:
            return
        if self._kept.take(len(part)):
            self._frame += part
        else:
            self.drop()

    def take(self) -> bytes | None:
        """The frame, which is not counted any more; None: it was not kept."""
        frame = self._frame
        self.drop()
        return None if frame is None else bytes(frame)

    def drop(self, why: str | None = None) -> None:
        """Release it. why: count it as not kept."""
        if self._frame is None:
            return
        self._kept.release(len(self._frame))
        self._frame = None
        if why is not None:
            self._kept.left_out[why] += 1
