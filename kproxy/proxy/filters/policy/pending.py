"""What the policy keeps of one connection's requests until they are answered, counted in the budget of all sessions.

An edit of a Metadata answer has the names that were denied, a line of the audit those of resources. A client decides
how long these are, and can send further requests before an answer is there. Bounds: of one connection MAX_KEPT_BYTES
and what one request names; of all of them the HeldBudget's limit of what pending requests say. What takes less than
NOTED_LEAST is not counted. Refuses to know what is kept.
"""

from collections.abc import Iterable
from sys import getsizeof
from typing import Any

from kproxy.wire.interest import HeldBudget
from kproxy.wire.state import NOTED_LEAST

MAX_KEPT_BYTES = 1024 * 1024
_NAME_BYTES = 100  # of an entry of a dict and a set, beside the name


class PendingBytes:
    """Of one connection, by the numbers of its exchanges."""

    __slots__ = ("_held", "_noted", "_total")

    def __init__(self, held: HeldBudget) -> None:
        self._held = held
        self._noted: dict[int, int] = {}
        self._total = 0

    def keep(self, number: int, size_bytes: int) -> bool:
        """Count so many bytes until `forget`; False, counting nothing, if there is no room for them."""
        if size_bytes < NOTED_LEAST:
            return True
        if self._total > MAX_KEPT_BYTES or not self._held.note(size_bytes):
            return False
        self._noted[number] = self._noted.get(number, 0) + size_bytes
        self._total += size_bytes
        return True

    def forget(self, number: int) -> None:
        """Nothing is kept of that request any more."""
        if self._noted:
            size_bytes = self._noted.pop(number, 0)
            self._total -= size_bytes
            self._held.forget(size_bytes)

    def forget_all(self) -> None:
        self._held.forget(self._total)
        self._noted.clear()
        self._total = 0


def bytes_of_names(names: Iterable[Any]) -> int:
    """What names take in memory, with their places in containers."""
    return sum(getsizeof(name) + _NAME_BYTES for name in names)


def bytes_of_line(line: dict[str, Any]) -> int:
    """What a line of the audit takes in memory."""
    return getsizeof(line) + sum(
        bytes_of_names(value) if isinstance(value, list) else getsizeof(value) for value in line.values()
    )
