"""The state of a connection that one reader of a capture hands over to the next one.

Duty: `Handover` is the point of the handover, with the counts up to it; `Offsets` has the consumer's positions as the
next reader knows them. Memory: MAX_POSITIONS partitions per connection.
"""

from dataclasses import dataclass
from typing import Any

from kproxy.convert.rows import Counted
from kproxy.tables.partitions import LATER, MAX_POSITIONS, Positions


@dataclass
class Handover:
    """A connection at the point of its handover."""

    id: int
    number: int  # of its next request
    counted: Counted
    positions: Positions
    has_seen_gap: bool

    def follow(self, before: "Handover") -> bool:
        """Add the counts of an earlier handover of the same connection; False if the part in between depends on it."""
        if before.has_seen_gap and self.counted.is_surprised:
            return False
        self.counted.join(before.counted)
        self.positions = {**before.positions, **self.positions}
        if len(self.positions) * 2 >= MAX_POSITIONS:
            return False
        self.has_seen_gap |= before.has_seen_gap
        return True


class Offsets(Positions):
    """The positions of a consumer; positions from before a claim are unknown, and become LATER or less."""

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
