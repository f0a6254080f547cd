"""The bytes of one call: the position up to which they are read, and the pieces to send for them.

Refuses to know frames.
"""

from typing import Any

Piece = tuple[int, Any]  # (the side to send to, a buffer that is valid until the next receive)


class Reading:
    """A view of the bytes of a side, while a handler reads it.

    Bytes before `pos` are read. Bytes before `sent` are in `pieces`, left out, or replaced by other pieces.
    """

    __slots__ = ("now", "pieces", "pos", "sent", "side", "size", "start", "view", "work")

    def __init__(self, side: int, view: Any, now: int, pieces: list[Piece] | None = None) -> None:
        self.side = side
        self.view = view
        self.size = len(view)
        self.pos = 0
        self.sent = 0
        self.pieces: list[Piece] = [] if pieces is None else pieces
        self.now = now
        self.start = now  # arrival of the first byte of the next frame
        self.work = 0  # number of frames that this call may still read

    def begin_with(self, view: Any, start: int) -> None:
        """Replace the view by one that begins with bytes of an earlier call; its first byte arrived at `start`."""
        self.view = view
        self.size = len(view)
        self.start = start

    def send(self, end: int) -> None:
        """Add the unsent bytes before `end` to `pieces`."""
        if self.sent < end:
            is_all = not self.sent and end == self.size
            self.pieces.append((1 - self.side, self.view if is_all else self.view[self.sent : end]))
            self.sent = end

    def replace(self, end: int, replacement: Any) -> None:
        """Add the bytes before `pos` to `pieces`, and `replacement` in place of the bytes from `pos` to `end`."""
        self.send(self.pos)
        if replacement:
            self.pieces.append((1 - self.side, replacement))
        self.sent = end
