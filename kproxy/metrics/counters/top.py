"""The largest of many keys: the choice of keys with a cell of their own; all others share one.

Duty: up to the limit, every key gets a cell. After that, newcomers count in `other`, and as candidates of Space-Saving
(Metwally, Agrawal, El Abbadi: "Efficient computation of frequent and top-k elements in data streams", 2005): a newcomer
replaces the smallest candidate and takes over its count as its possible error, so that count less error is the
newcomer's certain count. A candidate replaces the smallest key with a cell once its certain count is more than twice as
large. All counts are halved every HALVE_NS, so that recent ones weigh more.

Every series that was ever exposed stays in Prometheus for hours, so replacement is limited, independently of the peers:
a tenth of the limit at once, and one more every REPLACE_NS. Keys of equal size never replace each other. A key that is
gone (see its cell) frees its cell without that limit.

The counters of `other` never take over those of a cell, which Prometheus would read as a burst. A replaced cell is
exposed unchanged for LEAVE_NS, so that a scrape has its last counts; its key counts in `other` meanwhile.

Bounds: `limit` cells, as many candidates, and the few replaced cells. Changed on the event loop's thread only; a scrape
copies first. Refuses to know the meaning of counts.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

SWEEP_NS = 60 * 10**9
HALVE_NS = 600 * 10**9
REPLACE_NS = 60 * 10**9
LEAVE_NS = 300 * 10**9


class Cell(Protocol):
    """The counters of one key, and its size."""

    @property
    def rank(self) -> int:
        """Return the key's recent size: the smallest one loses its cell first. 0 for `other`: no other keys."""

    def admitted(self, rank: int) -> None:
        """Begin the cell for a key with this recent size."""

    def halve(self) -> None:
        """Halve the recent size."""

    def is_gone(self, now_ns: int) -> bool:
        """Return whether the key has been idle for so long that it is no longer exposed."""


AnyCell = TypeVar("AnyCell", bound=Cell)
Key = TypeVar("Key")


class _Candidate:
    """A key without a cell: its size is at most `count`, and at least `count - error`."""

    __slots__ = ("count", "error")

    def __init__(self, count: int, error: int) -> None:
        self.count = count
        self.error = error


class Top(Generic[Key, AnyCell]):
    """Cells of the largest keys; `other` has the counts of all others."""

    def __init__(self, limit: int, make: Callable[[], AnyCell]) -> None:
        self.cells: dict[Key, AnyCell] = {}
        self.other = make()
        self._limit = limit
        self._make = make
        self._leaving: dict[Key, tuple[AnyCell, int]] = {}  # (cell, when it was replaced)
        self._candidates: dict[Key, _Candidate] = {}
        self._heap: list[tuple[int, int, Key]] = []  # earlier counts of candidates: true ones are not lower
        self._serial = 0
        self._floor = 0  # smallest rank in `cells` at the last search for it
        self._swept_ns = self._halved_ns = 0
        self._credit = max(1, limit // 10)  # cells that may be replaced now
        self._credited_ns = 0

    def cell_for(self, key: Key, size: int, now_ns: int) -> AnyCell:
        """Return the cell that counts `size` of a key without a cell: a new one, or `other`."""
        if now_ns - self._swept_ns >= SWEEP_NS:
            self._sweep(now_ns)
        if len(self.cells) >= self._limit:
            candidate = self._seen(key, size)
            certain = candidate.count - candidate.error
            if certain <= 2 * self._floor or not self._has_credit(now_ns) or not self._evict(certain, now_ns):
                return self.other
            rank = certain - size  # the caller adds the size, as it does for every cell
        else:
            rank = 0
        self._candidates.pop(key, None)
        before = self._leaving.pop(key, None)
        is_shown = before is not None and now_ns - before[1] < LEAVE_NS  # a series that has ended begins at 0
        cell = self.cells[key] = before[0] if before is not None and is_shown else self._make()
        cell.admitted(rank)
        self._floor = min(self._floor, rank)
        return cell

    def shown(self, now_ns: int) -> Iterator[tuple[Key | None, AnyCell]]:
        """Yield every key that is not gone, with its cell; None stands for all others."""
        leaving = self._leaving.copy()
        cells = list(self.cells.items())
        leaving |= self._leaving.copy()  # cells replaced meanwhile: the event loop has another thread
        for key, cell in cells:
            if not cell.is_gone(now_ns):
                yield key, cell
            leaving.pop(key, None)
        for key, (cell, since_ns) in leaving.items():
            if now_ns - since_ns < LEAVE_NS:
                yield key, cell
        if self.other.rank:
            yield None, self.other

    def _seen(self, key: Key, size: int) -> _Candidate:
        """Count a key as a candidate, in place of the smallest one beyond the limit."""
        candidates = self._candidates
        candidate = candidates.get(key)
        if candidate is not None:
            candidate.count += size
            return candidate
        error = 0
        if len(candidates) >= self._limit:
            error = self._drop_smallest()
        candidate = candidates[key] = _Candidate(error + size, error)
        self._serial += 1
        heappush(self._heap, (candidate.count, self._serial, key))
        if len(self._heap) > 2 * self._limit:
            self._order()
        return candidate

    def _drop_smallest(self) -> int:
        """Remove the smallest candidate; return its count."""
        heap = self._heap
        while True:
            count, serial, key = heap[0]
            candidate = self._candidates.get(key)
            if candidate is None:  # it has a cell now
                heappop(heap)
            elif candidate.count != count:
                heapreplace(heap, (candidate.count, serial, key))
            else:
                heappop(heap)
                del self._candidates[key]
                return count

    def _has_credit(self, now_ns: int) -> bool:
        """Return whether a cell may be replaced now."""
        earned, rest_ns = divmod(now_ns - self._credited_ns, REPLACE_NS)
        if earned > 0:
            self._credit = min(self._credit + earned, max(1, self._limit // 10))
            self._credited_ns = now_ns - rest_ns
        return self._credit > 0

    def _evict(self, certain: int, now_ns: int) -> bool:
        """Replace the cell of the smallest key, if its rank is less than half of a newcomer's certain count."""
        key, cell = min(self.cells.items(), key=lambda item: item[1].rank)
        self._floor = cell.rank
        if certain <= 2 * cell.rank:
            return False
        self._credit -= 1
        del self.cells[key]
        self._leaving[key] = cell, now_ns
        return True

    def _sweep(self, now_ns: int) -> None:
        """Drop cells of keys that are gone, and cells replaced for LEAVE_NS; halve all counts every HALVE_NS."""
        self._swept_ns = now_ns
        self._floor = 0
        for key in [key for key, cell in self.cells.items() if cell.is_gone(now_ns)]:
            del self.cells[key]
        for key in [key for key, (_, since_ns) in self._leaving.items() if now_ns - since_ns >= LEAVE_NS]:
            del self._leaving[key]
        if now_ns - self._halved_ns >= HALVE_NS:
            self._halved_ns = now_ns
            for cell in self.cells.values():
                cell.halve()
            for candidate in self._candidates.values():
                candidate.count //= 2
                candidate.error = -(-candidate.error // 2)  # rounded up, so that count - error stays a lower bound
            self._order()

    def _order(self) -> None:
        """Rebuild the heap without the keys that are no longer candidates."""
        self._heap = [(candidate.count, index, key) for index, (key, candidate) in enumerate(self._candidates.items())]
        self._serial = len(self._heap)
        heapify(self._heap)
