"""Places of a file without records: blocks of zeros, and damaged bytes.

Duty: counts such a place in the quality. Preallocated files have zeros behind their records; a crash or a full disk
leaves zeros in blocks that were never written. Refuses to know formats.
"""

from kproxy.capture.quality import Quality

ZEROS = 16  # a damaged header has fewer zeros in a row
CUT_HEADER_BYTES = 12  # most header bytes before the zeros; with more, a packet full of zeros would look like a hole
BLOCK_BYTES = 512  # the smallest block of a disk; fewer zeros between records may belong to a packet


class Hole:
    """One such place; last_ns: the time of the record before it."""

    def __init__(self, last_ns: int) -> None:
        self._last_ns = last_ns
        self._before = b""  # its first bytes, until ZEROS zeros follow
        self._zeros = 0
        self._behind = 0  # bytes after the zeros

    def add(self, piece: bytes) -> None:
        """Take its next bytes."""
        if self._behind:
            self._behind += len(piece)
            return
        if not self._zeros:
            piece = self._before + piece
            start = piece.find(bytes(ZEROS), 0, CUT_HEADER_BYTES + ZEROS)
            if start < 0:
                if len(piece) < CUT_HEADER_BYTES + ZEROS:
                    self._before = piece
                else:
                    self._before, self._behind = b"", len(piece)
                return
            self._before, piece = piece[:start], piece[start:]
        self._behind = len(piece.lstrip(b"\0"))
        self._zeros += len(piece) - self._behind

    def end(self, quality: Quality, *, final: bool = False) -> None:
        """Count it; final: it is at the end of the file, where zeros are no damage but preallocated space."""
        others = len(self._before) + self._behind
        if self._zeros >= BLOCK_BYTES or (final and not others):
            quality.note("zeros", self._last_ns, size=self._zeros)
        if others or not final:
            quality.note("damaged", self._last_ns, size=others + self._zeros)
