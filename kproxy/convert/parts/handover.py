"""What one reader of a capture hands over of a connection to the next one.

Duty: `Handover` is where that happened and what was counted before; `Offsets` is what the next one knows of a
consumer's places. Memory: MAX_POSITIONS partitions of a connection. Refuses to know who the readers are.
"""

from dataclasses import dataclass
from typing import Any

from kproxy.convert.rows import Counted
from kproxy.tables.partitions import LATER, MAX_POSITIONS, Positions


@dataclass
class Handover:
    """A connection where it is handed over."""

    id: int
    number: int  # of its next request
    counted: Counted
    positions: Positions
    has_seen_gap: bool

    def follow(self, before: "Handover") -> bool:
        """`before` is where the same connection was handed over earlier; False: what is in between depends on that."""
        if before.has_seen_gap and self.counted.is_surprised:
            return False
        self.counted.join(before.counted)
        self.positions = {**before.positions, **self.positions}
        if len(self.positions) * 2 >= MAX_POSITIONS:
            return False
        self.has_seen_gap |= before.has_seen_gap
        return True


class Offsets(Positions):
    """Where a consumer is: what is not known from a claim on is LATER, and less."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: dict[Any, int] = {}
        self.is_full = False

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            return self[key]
        if len(self.missed) >= MAX_POSITIONS and key not in self.missed:
            self.is_full = True
            return default
        return self.missed.setdefault(key, LATER - len(self.missed))
