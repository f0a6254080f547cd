"""The choice of frames that are kept for a later decoder, and the limits of their bytes.

Duty: the choice of APIs and the two bounds, shared by all sessions of a process. A frame that is not kept is counted in
`left_out` and forwarded as usual: nothing depends on it, so it is no fault.

Memory: `limit_bytes` for frames of pending requests and frames in transit, over all sessions; frames of `small` APIs,
MAX_SMALL each, are not counted. Frames of an emitted exchange are not counted: they belong to the owner of the event.

Refuses to know exchanges (keeping.py), the contents of a frame, and its decoder.
"""

from collections.abc import Collection
from typing import Any

MAX_FRAME = 8 * 1024 * 1024  # a LeaderAndIsr or UpdateMetadata of 50,000 partitions has 5 MB
MAX_TOGETHER = 32 * 1024 * 1024
MAX_SMALL = 1024  # largest frame of a `small` API, whose responses almost never have an error

TOO_LARGE = "too_large"  # a frame beyond max_frame_bytes
TOO_MANY = "too_many"  # kept frames have reached limit_bytes
GAP = "gap"  # a capture lost a part of the frame
WHY = (TOO_LARGE, TOO_MANY, GAP)


class Kept:
    """The choice of frames that are kept, and their count.

    apis: API keys of exchanges whose frames are kept; Produce is not allowed.
    only_failed: APIs whose frames are kept only if the response has an error, such as Heartbeat.
    small: APIs of `only_failed` so frequent that a response without an error must cost nothing: the exchange then
        keeps its request_frame, and its response_frame is None.
    left_out: counts of exchanges that are not kept, by reason; an entry for GAP is optional.
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
        self.held_bytes = 0  # bytes of pending requests and of frames in transit

    def is_small(self, size_bytes: int) -> bool:
        """Return whether a request of a `small` API is small enough; count it if not."""
        if size_bytes > MAX_SMALL:
            self.left_out[TOO_LARGE] += 1
            return False
        return True

    def fits(self, size_bytes: int) -> bool:
        """Return whether a frame is small enough; count it if not."""
        if size_bytes > self.max_frame_bytes:
            self.left_out[TOO_LARGE] += 1
            return False
        return True

    def take(self, count: int) -> bool:
        """Reserve bytes until `release`; return False, and count it, if that exceeds the limit."""
        if self.held_bytes + count > self.limit_bytes:
            self.left_out[TOO_MANY] += 1
            return False
        self.held_bytes += count
        return True

    def release(self, count: int) -> None:
        self.held_bytes -= count


class FrameInParts:
    """The bytes of a frame in transit that have arrived; no bytes after a drop."""

    __slots__ = ("_frame", "_kept")

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._frame: bytearray | None = bytearray()

    def add(self, part: Any) -> None:
        """Add the next bytes; drop the frame if that exceeds the limit."""
        if self._frame is None:
            return
        if self._kept.take(len(part)):
            self._frame += part
        else:
            self.drop()

    def take(self) -> bytes | None:
        """Return the frame and stop counting it; None: it was dropped."""
        frame = self._frame
        self.drop()
        return None if frame is None else bytes(frame)

    def drop(self, why: str | None = None) -> None:
        """Drop the frame and release its bytes. why: count it as left out for this reason."""
        if self._frame is None:
            return
        self._kept.release(len(self._frame))
        self._frame = None
        if why is not None:
            self._kept.left_out[why] += 1
