"""What peers name, topics and clients: counted by name, for so many names.

Duty: cells of topics (what Produce brings and Fetch takes away) and of clients (their software). A peer can invent
names without end, so the largest keep a cell of their own and the rest share one, by Space-Saving (Metwally, Agrawal,
El Abbadi: "Efficient computation of frequent and top-k elements in data streams", 2005): whoever is new when there is
no room takes the place, and the rank, of the smallest, whose counts go to the rest. A name that has been away for
EXPIRY_NS is no longer shown, and is the first to go when room is wanted.

Topics that bodies call by their ids are counted under those; names are looked up at a scrape, since the answer that
tells them may come later, and on any connection.

Bounded by MAX_TOPICS and MAX_CLIENTS cells, and MAX_NAMES names of topics, per cluster. Like all cells they are
changed on the thread of the event loop only, and copied in one step by a scrape.
"""

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, Self, TypeVar
from uuid import UUID

from kproxy.wire.bodies import Found
from kproxy.wire.events import ClientNamed, Event, Exchange, Unanswered

MAX_TOPICS = 500
MAX_CLIENTS = 500
MAX_NAMES = 64 * 1024
MAX_LABEL = 256  # characters; a topic's name has at most 249, but an invented one may be of 32 KiB
EXPIRY_NS = 3600 * 10**9
_SWEEP_NS = 60 * 10**9
OTHER = "other"


class Cell(Protocol):
    rank: int  # how large: what decides who stays

    def is_gone(self, now_ns: int) -> bool: ...
    def merge(self, cell: Self) -> None: ...


AnyCell = TypeVar("AnyCell", bound=Cell)
Key = TypeVar("Key")


class Top(Generic[Key, AnyCell]):
    """Cells of the largest keys; `other` has the counts of those that had to go."""

    def __init__(self, limit: int, make: Callable[[], AnyCell]) -> None:
        self.cells: dict[Key, AnyCell] = {}
        self.other = make()
        self._limit = limit
        self._make = make
        self._serial = 0
        self._swept_ns = 0
        self._heap: list[tuple[int, int, Key, AnyCell]] = []  # ranks as they once were; they only grow

    def admit(self, key: Key, now_ns: int) -> AnyCell:
        """A cell for a key that has none."""
        rank = 0
        if len(self.cells) >= self._limit and not self._forget(now_ns):
            rank = self._evict()
        cell = self.cells[key] = self._make()
        cell.rank = rank
        self._serial += 1
        heappush(self._heap, (rank, self._serial, key, cell))
        return cell

    def shown(self, now_ns: int) -> Iterator[tuple[Key | None, AnyCell]]:
        """Everybody who is not gone; None stands for all others."""
        for key, cell in list(self.cells.items()):
            if not cell.is_gone(now_ns):
                yield key, cell
        if self.other.rank:
            yield None, self.other

    def _forget(self, now_ns: int) -> bool:
        """Drop whoever is gone: a scrape has long had their counts."""
        if now_ns - self._swept_ns < _SWEEP_NS:
            return False
        self._swept_ns = now_ns
        gone = [key for key, cell in self.cells.items() if cell.is_gone(now_ns)]
        for key in gone:
            del self.cells[key]
        if gone:
            self._heap = [entry for entry in self._heap if self.cells.get(entry[2]) is entry[3]]
            heapify(self._heap)
        return bool(gone)

    def _evict(self) -> int:
        """The smallest goes; returns its rank."""
        heap = self._heap
        while True:
            rank, serial, key, cell = heap[0]
            if cell.rank == rank:
                break
            heapreplace(heap, (cell.rank, serial, key, cell))
        heappop(heap)
        del self.cells[key]
        self.other.merge(cell)
        self.other.rank += 1
        return rank


class Carried:
    """Records that one direction carried."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.bytes = 0
        self.records = 0
        self.batches: dict[int, int] = {}  # by codecs, a bit for each: bodies of one codec are the rule

    def merge(self, other: "Carried") -> None:
        self.bytes += other.bytes
        self.records += other.records
        for codecs, count in other.batches.items():
            self.batches[codecs] = self.batches.get(codecs, 0) + count


class TopicCells:
    """What is counted of one topic; the rank is in bytes."""

    __slots__ = ("rank", "request", "response", "seen_ns")

    def __init__(self) -> None:
        self.rank = 0
        self.seen_ns = 0
        self.request = Carried()  # produced
        self.response = Carried()  # fetched

    def is_gone(self, now_ns: int) -> bool:
        return self.seen_ns + EXPIRY_NS < now_ns

    def merge(self, cell: "TopicCells") -> None:
        self.request.merge(cell.request)
        self.response.merge(cell.response)


class Topics:
    """The topics of one cluster."""

    def __init__(self) -> None:
        self.top: Top[str | UUID, TopicCells] = Top(MAX_TOPICS, TopicCells)
        self.names: dict[UUID, str] = {}

    def events(self, events: list[Event]) -> None:
        """Count what the bodies of these events carry; nothing of them is kept."""
        for event in events:
            if event.__class__ is Exchange:
                exchange = event
            elif event.__class__ is Unanswered:
                exchange = event.exchange
            else:
                continue
            body = exchange.request_body
            if body is not None:
                self._count(body, exchange, False)
            body = exchange.response_body
            if body is not None:
                self._count(body, exchange, True)
                if body.names:
                    self._learn(body.names)

    def _count(self, body: Found, exchange: Exchange, is_response: bool) -> None:
        cells = self.top.cells
        for partition in body.sums or body.partitions:
            size = partition.bytes
            if not size:
                continue
            topic = partition.topic or partition.topic_id
            if topic is None:
                continue
            now_ns = exchange.response_start if is_response else exchange.request_start
            cell = cells.get(topic)
            if cell is None:
                cell = self.top.admit(topic, now_ns)
            cell.rank += size
            cell.seen_ns = now_ns
            carried = cell.response if is_response else cell.request
            carried.bytes += size
            if partition.batches:
                codecs = partition.codecs
                carried.batches[codecs] = carried.batches.get(codecs, 0) + partition.batches
                if partition.records > 0:  # a compressed message set hides its count
                    carried.records += partition.records

    def _learn(self, told: Mapping[UUID, str]) -> None:
        """Ids are never used again; who comes last of too many stays."""
        names = self.names
        names.update(told)
        while len(names) > MAX_NAMES:
            del names[next(iter(names))]

    def label(self, topic: str | UUID | None) -> str:
        """The topic's name; its id, as Kafka writes it, where no answer has told the name."""
        if topic is None:
            return OTHER
        if isinstance(topic, str):
            return topic[:MAX_LABEL]
        return self.names.get(topic, "")[:MAX_LABEL] or urlsafe_b64encode(topic.bytes).decode().rstrip("=")


class ClientCells:
    """What is counted of one client's software; the rank is in connections."""

    __slots__ = ("left_ns", "open", "rank")

    def __init__(self) -> None:
        self.rank = 0
        self.open = 0  # connections now
        self.left_ns = 0  # when the last was closed

    def is_gone(self, now_ns: int) -> bool:
        return not self.open and self.left_ns + EXPIRY_NS < now_ns

    def left(self, now_ns: int) -> None:
        self.open -= 1
        self.left_ns = now_ns

    def merge(self, cell: "ClientCells") -> None:
        """That there are others is all that is told of them."""


Client = tuple[str, str, str]  # client id, name and version of its software


class Clients:
    """The clients of one process."""

    def __init__(self) -> None:
        self.top: Top[Client, ClientCells] = Top(MAX_CLIENTS, ClientCells)

    def joined(self, named: ClientNamed) -> ClientCells:
        """A connection of this client; tell the cell when it has `left`."""
        client = ((named.client_id or "")[:MAX_LABEL], named.name[:MAX_LABEL], named.version[:MAX_LABEL])
        cell = self.top.cells.get(client)
        if cell is None:
            cell = self.top.admit(client, named.now_ns)
        cell.rank += 1
        cell.open += 1
        cell.left_ns = named.now_ns
        return cell
