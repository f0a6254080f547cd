"""Memory that the policy keeps for unanswered requests of one connection, counted in the budget of all sessions.

An edit of a Metadata answer has the denied names, a line of the audit the names of resources. A client decides their
length, and can send further requests before an answer arrives. Bounds: MAX_KEPT_BYTES and the names of one request per
connection; the HeldBudget's limit of pending requests for all connections. Items below MIN_NOTED_BYTES do not count.
"""

from collections.abc import Iterable
from sys import getsizeof
from typing import Any

from kproxy.wire.interest import HeldBudget
from kproxy.wire.state import MIN_NOTED_BYTES

MAX_KEPT_BYTES = 1024 * 1024
_NAME_BYTES = 100  # memory of an entry of a dict and a set without the name


class PendingBytes:
    """Kept bytes of one connection, by the numbers of its exchanges."""

    __slots__ = ("_held", "_noted", "_total")

    def __init__(self, held: HeldBudget) -> None:
        self._held = held
        self._noted: dict[int, int] = {}
        self._total = 0

    def keep(self, number: int, size_bytes: int) -> bool:
        """Count so many bytes until `forget`. Returns False, and counts nothing, if a limit is reached."""
        if size_bytes < MIN_NOTED_BYTES:
            return True
        if self._total > MAX_KEPT_BYTES or not self._held.note(size_bytes):
            return False
        self._noted[number] = self._noted.get(number, 0) + size_bytes
        self._total += size_bytes
        return True

    def forget(self, number: int) -> None:
        """Stop counting the bytes of that request."""
        if self._noted:
            size_bytes = self._noted.pop(number, 0)
            self._total -= size_bytes
            self._held.forget(size_bytes)

    def forget_all(self) -> None:
        self._held.forget(self._total)
        self._noted.clear()
        self._total = 0


def bytes_of_names(names: Iterable[Any]) -> int:
    """Return the memory of names in bytes, with their entries in containers."""
    return sum(getsizeof(name) + _NAME_BYTES for name in names)


def bytes_of_line(line: dict[str, Any]) -> int:
    """Return the memory of a line of the audit in bytes."""
    return getsizeof(line) + sum(
        bytes_of_names(value) if isinstance(value, list) else getsizeof(value) for value in line.values()
    )
