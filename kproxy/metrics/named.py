"""What peers name, topics and clients: counted by name, for so many names.

Duty: cells of topics (what Produce brings and Fetch takes away) and of clients (their software). A peer can invent
names without end, so only some have a cell of their own and the rest share one: which, `top` decides. A name that has
been away for EXPIRY_NS, by the clock of the events, is not exposed any more.

Topics that bodies call by their ids are counted under those; names are looked up at a scrape, since the answer that
contains them may come later, and on any connection.

Bounded by MAX_TOPICS and MAX_CLIENTS cells (see `top`), and MAX_NAMES names of topics, per cluster. Like all cells they
are changed on the thread of the event loop only, and copied in one step by a scrape.
"""

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from uuid import UUID

from kproxy.metrics.top import Top
from kproxy.wire.bodies import Found
from kproxy.wire.events import ClientNamed, Event, Exchange, Unanswered

MAX_TOPICS = 500
MAX_CLIENTS = 500
MAX_NAMES = 64 * 1024
MAX_LABEL = 256  # characters; a topic's name has at most 249, but an invented one may be of 32 KiB
EXPIRY_NS = 3600 * 10**9
_CONNECTED = 1 << 62  # the rank of a client that is connected: it keeps its cell
OTHER = "other"  # the label of all that have no series of their own


def shown(name: str | None) -> str:
    """The label of a name, None: of all the others; what is called as their label is itself gets a `=` before it."""
    if name is None:
        return OTHER
    name = name[:MAX_LABEL]
    return f"={name}" if name.lstrip("=") == OTHER else name


class Carried:
    """Records that one direction carried."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.bytes = 0
        self.records = 0
        self.batches: dict[int, int] = {}  # by codecs, a bit for each: bodies of one codec are the rule


class TopicCells:
    """What is counted of one topic; the rank is in bytes, halved now and then."""

    __slots__ = ("rank", "request", "response", "seen_ns")

    def __init__(self) -> None:
        self.rank = 0
        self.seen_ns = 0
        self.request = Carried()  # produced
        self.response = Carried()  # fetched

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

    def _cell_for(self, topic: str | UUID, size: int, now_ns: int) -> TopicCells:
        """The cell of a topic that has none, or whose invented name is longer than any topic's."""
        if isinstance(topic, str) and len(topic) > MAX_LABEL:
            topic = topic[:MAX_LABEL]
            if (cell := self.top.cells.get(topic)) is not None:
                return cell
        return self.top.cell_for(topic, size, now_ns)

    def _learn(self, learned: Mapping[UUID, str]) -> None:
        """Ids are never used again; who comes last of too many stays."""
        names = self.names
        names.update(learned)
        while len(names) > MAX_NAMES:
            del names[next(iter(names))]

    def label(self, topic: str | UUID | None) -> str:
        """The topic's name, as `shown`; its id, as Kafka writes it, where no answer has named it."""
        if topic is None or isinstance(topic, str):
            return shown(topic)
        return shown(self.names.get(topic, "")) or urlsafe_b64encode(topic.bytes).decode().rstrip("=")


class ClientCells:
    """What is counted of one client's software: its connections."""

    __slots__ = ("left_ns", "open")

    def __init__(self) -> None:
        self.open = 0  # connections now
        self.left_ns = 0  # when the last was closed

    @property
    def rank(self) -> int:
        return _CONNECTED if self.open else 0

    def admitted(self, rank: int) -> None:
        """Its connections are counted as they come."""

    def halve(self) -> None:
        """Connections that are open stay so."""

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
        """A connection of this client; call `left` of the cell when it closes."""
        client = ((named.client_id or "")[:MAX_LABEL], named.name[:MAX_LABEL], named.version[:MAX_LABEL])
        cell = self.top.cells.get(client)
        if cell is None:
            cell = self.top.cell_for(client, 1, named.now_ns)
        cell.open += 1
        cell.left_ns = named.now_ns
        return cell
