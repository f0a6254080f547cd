"""Counters by names that peers send: topics and clients, for a bounded number of names.

Duty: cells of topics (records produced and fetched) and of clients (their software). A peer can invent any number of
names, so only some have a cell of their own and the others share one; `top` chooses. A name that has been idle for
EXPIRY_NS, by the clock of the events, is no longer exposed.

Topics that bodies identify by id are counted under the id; a scrape looks up their names, since the response that
contains a name may come later, and on any connection.

Bounds, per cluster: MAX_TOPICS and MAX_CLIENTS cells (see `top`), and MAX_NAMES names of topics. Like all cells they
change on the event loop's thread only, and a scrape copies them in one step.
"""

from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from uuid import UUID

from kproxy.metrics.counters.top import Top
from kproxy.wire.bodies import Found
from kproxy.wire.events import ClientNamed, Event, Exchange, Unanswered

MAX_TOPICS = 500
MAX_CLIENTS = 500
MAX_NAMES = 64 * 1024
MAX_LABEL = 256  # characters; a topic's name has at most 249, but an invented one may be of 32 KiB
EXPIRY_NS = 3600 * 10**9
_CONNECTED = 1 << 62  # the rank of a client that is connected: it keeps its cell
OTHER = "other"  # the label of all names without a series of their own


def shown(name: str | None) -> str:
    """Return the label of a name; None: the label of all others. A name equal to that label gets the prefix `=`."""
    if name is None:
        return OTHER
    name = name[:MAX_LABEL]
    return f"={name}" if name.lstrip("=") == OTHER else name


class Amounts:
    """Records produced to a topic, or fetched from it."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.bytes = 0
        self.records = 0
        self.batches: dict[int, int] = {}  # set of codecs, one bit for each -> batches; usually one codec


class TopicCells:
    """The counters of one topic; the rank is in bytes, halved regularly."""

    __slots__ = ("rank", "request", "response", "seen_ns")

    def __init__(self) -> None:
        self.rank = 0
        self.seen_ns = 0
        self.request = Amounts()  # produced
        self.response = Amounts()  # fetched

    def is_gone(self, now_ns: int) -> bool:
        return self.seen_ns + EXPIRY_NS < now_ns

    def admitted(self, rank: int) -> None:
        self.rank = rank

    def halve(self) -> None:
        self.rank //= 2


class Topics:
    """The topics of one cluster."""

    def __init__(self) -> None:
        self.top: Top[str | UUID, TopicCells] = Top(MAX_TOPICS, TopicCells)
        self.names: dict[UUID, str] = {}

    def events(self, events: list[Event]) -> None:
        """Count the records in the bodies of these events, without keeping any of them."""
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
                cell = self._cell_for(topic, size, now_ns)
            cell.rank += size
            cell.seen_ns = now_ns
            carried = cell.response if is_response else cell.request
            carried.bytes += size
            if partition.batches:
                codecs = partition.codecs
                carried.batches[codecs] = carried.batches.get(codecs, 0) + partition.batches
                if partition.records > 0:  # a compressed message set hides its count
                    carried.records += partition.records

    def produced(
        self, topic: str | UUID, size: int, records: int, batches: Iterable[tuple[int, int]], now_ns: int
    ) -> None:
        """Count the records of Produce requests that were added up. size: in bytes. batches: (set of codecs, count)."""
        cell = self.top.cells.get(topic) or self._cell_for(topic, size, now_ns)
        cell.rank += size
        cell.seen_ns = now_ns
        carried = cell.request
        carried.bytes += size
        carried.records += records
        for codecs, count in batches:
            carried.batches[codecs] = carried.batches.get(codecs, 0) + count

    def _cell_for(self, topic: str | UUID, size: int, now_ns: int) -> TopicCells:
        """Return the cell of a topic that has none yet, or whose name is longer than Kafka allows."""
        if isinstance(topic, str) and len(topic) > MAX_LABEL:
            topic = topic[:MAX_LABEL]
            if (cell := self.top.cells.get(topic)) is not None:
                return cell
        return self.top.cell_for(topic, size, now_ns)

    def _learn(self, learned: Mapping[UUID, str]) -> None:
        """Learn names of topic ids, which are never reused; beyond MAX_NAMES the oldest are dropped."""
        names = self.names
        names.update(learned)
        while len(names) > MAX_NAMES:
            del names[next(iter(names))]

    def label(self, topic: str | UUID | None) -> str:
        """Return the topic's name as `shown`, or its id in Kafka's notation if no response has contained the name."""
        if topic is None or isinstance(topic, str):
            return shown(topic)
        return shown(self.names.get(topic, "")) or urlsafe_b64encode(topic.bytes).decode().rstrip("=")


class ClientCells:
    """The counters of one client's software: its connections."""

    __slots__ = ("left_ns", "open")

    def __init__(self) -> None:
        self.open = 0  # connections now
        self.left_ns = 0  # when the last was closed

    @property
    def rank(self) -> int:
        return _CONNECTED if self.open else 0

    def admitted(self, rank: int) -> None:
        """Do nothing: connections are counted individually."""

    def halve(self) -> None:
        """Do nothing: open connections do not age."""

    def is_gone(self, now_ns: int) -> bool:
        return not self.open and self.left_ns + EXPIRY_NS < now_ns

    def left(self, now_ns: int) -> None:
        self.open -= 1
        self.left_ns = now_ns


Client = tuple[str, str, str]  # client id, name and version of its software


class Clients:
    """The clients of one cluster."""

    def __init__(self) -> None:
        self.top: Top[Client, ClientCells] = Top(MAX_CLIENTS, ClientCells)

    def joined(self, named: ClientNamed) -> ClientCells:
        """Count a connection of this client; call `left` of the returned cell when it closes."""
        client = ((named.client_id or "")[:MAX_LABEL], named.name[:MAX_LABEL], named.version[:MAX_LABEL])
        cell = self.top.cells.get(client)
        if cell is None:
            cell = self.top.cell_for(client, 1, named.now_ns)
        cell.open += 1
        cell.left_ns = named.now_ns
        return cell
