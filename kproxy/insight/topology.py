"""The brokers, controllers and topics of a cluster, with partition counts, as its messages show them.

Duty: a row for each first sight and each change in exchanges of the APIs in `_READERS`, below. `leadership` follows
partitions; `of_partition` turns its rows into rows of this table.

Since a response may be late, a topic's partition count only grows, unless the topic was deleted or has another id, and
messages with a replaced id are ignored.

A broker has an address for each listener, and a response contains the addresses of the listener that it came from. The
address that the connection goes to identifies the listener, else the first address that an earlier response contained;
controllers name listeners. Each address has one row: `listener` for the first address of another listener, `changed`
for a further address of the same listener. A return to an earlier address is no change, since responses may be late.

A topic is gone when a broker or controller reports so, never because a list lacks it: a list has only the topics that
the client may see. A broker is gone when the next list lacks it.

Bounds: MAX_BROKERS, MAX_TOPICS, MAX_REFUSALS, MAX_ADDRESSES of one broker, MAX_LISTENERS; `left_out` counts the rest.
Refuses to know groups.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.insight.decoded import Body, DecodedExchange
from kproxy.insight.rows import Leadership, Topology
from kproxy.insight.topics import Topics
from kproxy.protocol.apis import (
    BROKER_HEARTBEAT,
    BROKER_REGISTRATION,
    CONTROLLED_SHUTDOWN,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CLUSTER,
    DESCRIBE_TOPIC_PARTITIONS,
    LEADER_AND_ISR,
    METADATA,
    STALE_CONTROLLER_EPOCH,
    STOP_REPLICA,
    UNKNOWN_TOPIC_OR_PARTITION,
    UPDATE_METADATA,
)
from kproxy.protocol.schema import api_name
from kproxy.protocol.shown.render import uuid_text

MAX_BROKERS = 4096
MAX_TOPICS = 65536
MAX_ADDRESSES = 16
MAX_LISTENERS = 65536  # addresses and names whose listener is remembered
MAX_FORMER = 4
MAX_REFUSALS = 1024  # pairs of a client and a topic that it was refused
REFUSALS = {UNKNOWN_TOPIC_OR_PARTITION: "unknown", 17: "invalid_name", 29: "unauthorized"}
NO_ID = UUID(int=0)
NO_LISTENER = 0  # listener of an unknown address
CONTROLLERS = 2  # DescribeCluster's endpoint type of a list of controllers

Address = tuple[str | None, int | None]


@dataclass(slots=True)
class _Broker:
    addresses: dict[tuple[str | None, int | None], int] = field(default_factory=dict)  # listener by address
    rack: str | None = None
    live: bool = True
    fenced: bool = False
    leaving: bool = False


class _LiveBroker(NamedTuple):
    """A live broker in a list of brokers."""

    node: int
    host: str | None
    port: int | None
    rack: str | None
    listener: int


class _Topic(NamedTuple):
    partitions: int
    id: UUID
    former: tuple[UUID, ...] = ()  # ids that it had before


class Cluster:
    """The brokers, controllers and topics of one cluster."""

    @property
    def apis(self) -> Collection[int]:
        return APIS

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.left_out: Counter[str] = Counter()
        self._topics: dict[str, _Topic] = {}
        self._brokers: dict[int, _Broker] = {}
        self._listeners: dict[Address | str, int] = {}  # listener by address of a connection or broker, or by its name
        self._listener_count = 0
        self._controllers: dict[int, tuple[str, int]] = {}
        self._active = -1, -1  # controller epoch and id
        self._refusals: dict[str, set[tuple[int, str | None]]] = {}  # by topic: (error code, client id)
        self._refused_count = 0

    def feed(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        """Yield the rows of an exchange; none for an API that is not in `APIS`."""
        read = _READERS.get(exchange.api_key)
        if read is not None:
            yield from read(self, exchange, topics)

    def _row(self, at: int, api: str, kind: str, change: str, **values: Any) -> Topology:
        return Topology(at, self.cluster, kind, change=change, api=api, **values)

    def finish(self) -> Iterator[Topology]:
        """Yield nothing: no state is pending."""
        return iter(())

    # --- brokers and controllers -------------------------------------------------------------------------------------

    def _listener(self, deciding: Sequence[Address | str | None]) -> int:
        """Return the first known listener of these addresses and names, else a new one; assign it to all of them."""
        named = [each for each in deciding if each is not None]
        found = next((self._listeners[each] for each in named if each in self._listeners), None)
        if found is None:
            self._listener_count += 1
            found = self._listener_count
        for each in named:
            if each in self._listeners or len(self._listeners) < MAX_LISTENERS:
                self._listeners.setdefault(each, found)
            else:
                self.left_out["addresses"] += 1
        return found

    def _of_own_listener(self, exchange: DecodedExchange, brokers: Sequence[Body], node: str) -> list[_LiveBroker]:
        """Return the brokers in a response to a client, with the listener that the client used."""
        addresses = [(each["host"], each["port"]) for each in brokers]
        listener = self._listener([exchange.broker, *addresses])
        return [_LiveBroker(each[node], each["host"], each["port"], each.get("rack"), listener) for each in brokers]

    def _broker(self, at: int, api: str, live: _LiveBroker) -> Iterator[Topology]:
        """Learn a live broker and its address; yield a row if they are new."""
        node, host, port, rack, listener = live
        broker = self._brokers.get(node)
        change = ""
        if broker is None:
            if len(self._brokers) >= MAX_BROKERS:
                self.left_out["brokers"] += 1
                return
            broker = self._brokers[node] = _Broker(rack=rack)
            change = "appeared"
        elif not broker.live:
            change = "appeared"
        broker.live = True
        if broker.rack != rack and rack is not None:
            broker.rack = rack
            change = change or "changed"
        if (host, port) not in broker.addresses:
            if len(broker.addresses) < MAX_ADDRESSES:
                change = change or ("changed" if listener in broker.addresses.values() else "listener")
                broker.addresses[host, port] = listener
            else:
                self.left_out["addresses"] += 1
        if change:
            broker.leaving = False
            yield self._row(at, api, "broker", change, broker_id=node, host=host, port=port, rack=broker.rack)

    def _broker_list(self, at: int, api: str, brokers: list[_LiveBroker]) -> Iterator[Topology]:
        """Learn a list of all live brokers; yield the rows of new, changed and missing ones."""
        for each in brokers:
            yield from self._broker(at, api, each)
        live = {each.node for each in brokers}
        for node in [node for node, broker in self._brokers.items() if broker.live and node not in live]:
            if live:  # a starting broker may return an empty list
                yield self._gone(at, api, node)

    def _gone(self, at: int, api: str, node: int) -> Topology:
        broker = self._brokers[node]
        broker.live = False
        host, port = next(iter(broker.addresses), (None, None))
        return self._row(at, api, "broker", "gone", broker_id=node, host=host, port=port, rack=broker.rack)

    def _controller(self, exchange: DecodedExchange) -> Iterator[Topology]:
        """Yield a row if a controller's request to a broker has a newer controller epoch."""
        epoch, node = exchange.request["controllerEpoch"], exchange.request["controllerId"]
        if epoch > self._active[0]:
            self._active = epoch, node
            yield self._row(exchange.request_end, api_name(exchange.api_key), "controller", "active", broker_id=node)

    def _controlled_shutdown(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        yield from self._leaves(exchange, exchange.request["brokerId"])

    def _leaves(self, exchange: DecodedExchange, node: int) -> Iterator[Topology]:
        broker = self._brokers.get(node)
        if broker is not None and not broker.leaving:
            broker.leaving = True
            at = exchange.request_end
            yield self._row(at, api_name(exchange.api_key), "broker", "shutting_down", broker_id=node, rack=broker.rack)

    def _registration(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        request, answer = exchange.request, exchange.response
        if answer is None or answer["errorCode"]:
            return
        node, api = request["brokerId"], api_name(exchange.api_key)
        listeners = request["listeners"][:MAX_ADDRESSES] or [{"host": None, "port": None}]
        rows = [
            row
            for each in listeners
            for row in self._broker(exchange.response_start, api, self._endpoint(each, "name", node, request["rack"]))
        ]
        if node in self._brokers:
            broker = self._brokers[node]
            broker.fenced, broker.leaving = True, False  # a broker is fenced after registration
            first = rows[0] if rows else self._row(exchange.response_start, api, "broker", "", broker_id=node)
            yield first._replace(change="registered", rack=broker.rack)
            yield from rows[1:]

    def _endpoint(self, endpoint: Body, name: str, node: int, rack: str | None) -> _LiveBroker:
        """Return a broker at an endpoint whose listener has a name, as controllers send it."""
        host, port = endpoint["host"], endpoint["port"]
        address = None if host is None else (host, port)
        return _LiveBroker(node, host, port, rack, self._listener([endpoint.get(name), address]))

    def _heartbeat(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        request, answer = exchange.request, exchange.response
        if answer is None or answer["errorCode"]:
            return
        node, api = request["brokerId"], api_name(exchange.api_key)
        if node not in self._brokers:
            yield from self._broker(exchange.response_start, api, _LiveBroker(node, None, None, None, NO_LISTENER))
        broker = self._brokers.get(node)
        if broker is None:
            return
        if request["wantShutDown"]:
            yield from self._leaves(exchange, node)
        if answer["isFenced"] != broker.fenced:
            broker.fenced = answer["isFenced"]
            change = "fenced" if broker.fenced else "unfenced"
            yield self._row(exchange.response_start, api, "broker", change, broker_id=node, rack=broker.rack)

    def _described_cluster(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        answer, at, api = exchange.response, exchange.response_start, api_name(exchange.api_key)
        if answer is None or answer["errorCode"]:
            return
        if answer.get("endpointType") == CONTROLLERS:
            for each in answer["brokers"]:
                node, address = each["brokerId"], (each["host"], each["port"])
                known = self._controllers.get(node)
                if known == address or (known is None and len(self._controllers) >= MAX_BROKERS):
                    continue
                self._controllers[node] = address
                where = dict(zip(("host", "port"), address, strict=True))
                change = "appeared" if known is None else "changed"
                yield self._row(at, api, "controller", change, broker_id=node, **where)
            return
        live = [each for each in answer["brokers"] if not each.get("isFenced")]
        yield from self._broker_list(at, api, self._of_own_listener(exchange, live, "brokerId"))

    # --- topics ------------------------------------------------------------------------------------------------------

    def _topic(self, at: int, api: str, name: str, partitions: int, id_: UUID | None = None) -> Iterator[Topology]:
        """Learn a topic with at least so many partitions; yield a row if it is new or changed."""
        id_ = id_ or NO_ID
        known = self._topics.get(name)
        change, topic = "appeared", _Topic(partitions, id_)
        if known is None:
            if len(self._topics) >= MAX_TOPICS:
                self.left_out["topics"] += 1
                return
        elif id_ != NO_ID != known.id and id_ != known.id:
            if id_ in known.former:
                return  # a late response
            change, topic = "recreated", _Topic(partitions, id_, (*known.former[-MAX_FORMER:], known.id))
        else:
            topic = _Topic(max(partitions, known.partitions), known.id if id_ == NO_ID else id_, known.former)
            change = "grown" if topic.partitions > known.partitions else ""
        self._topics[name] = topic
        if change == "appeared":  # a later refusal is a new one
            self._refused_count -= len(self._refusals.pop(name, ()))
        if change:
            yield self._row(
                at, api, "topic", change, topic=name, topic_id=_written(topic.id), partitions=topic.partitions
            )

    def _topic_gone(self, at: int, api: str, name: str) -> Iterator[Topology]:
        known = self._topics.pop(name, None)
        if known is not None:
            count = known.partitions
            yield self._row(at, api, "topic", "gone", topic=name, topic_id=_written(known.id), partitions=count)

    def _metadata(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        answer, at, api = exchange.response, exchange.response_start, api_name(exchange.api_key)
        if answer is None:
            return
        if "brokers" in answer:
            yield from self._broker_list(at, api, self._of_own_listener(exchange, answer["brokers"], "nodeId"))
        for each in answer["topics"]:
            name = each["name"] or topics.names.get(each.get("topicId"))
            if name is None:
                continue
            if each["errorCode"] == UNKNOWN_TOPIC_OR_PARTITION:
                yield from self._topic_gone(at, api, name)
            if each["errorCode"] in REFUSALS:
                yield from self._refused(at, api, name, each["errorCode"], exchange.client_id)
            elif not each["errorCode"]:
                highest = max((part["partitionIndex"] for part in each["partitions"]), default=-1)
                yield from self._topic(at, api, name, highest + 1, each.get("topicId"))

    def _refused(self, at: int, api: str, name: str, code: int, client: str | None) -> Iterator[Topology]:
        """Yield a row the first time that a client is refused a topic."""
        if (code, client) in self._refusals.get(name, ()):
            return
        if self._refused_count >= MAX_REFUSALS:
            self.left_out["refusals"] += 1
            return
        self._refusals.setdefault(name, set()).add((code, client))
        self._refused_count += 1
        yield self._row(at, api, "topic", REFUSALS[code], topic=name)

    def _controller_request(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        """Yield the rows of a controller's request to a broker: LeaderAndIsr, StopReplica, UpdateMetadata."""
        request, at, api = exchange.request, exchange.request_end, api_name(exchange.api_key)
        refused = (exchange.response or {}).get("errorCode") == STALE_CONTROLLER_EPOCH
        if refused or request["controllerEpoch"] < self._active[0]:
            return
        yield from self._controller(exchange)
        if exchange.api_key != UPDATE_METADATA:
            return  # they list the partitions of one broker only
        live: list[_LiveBroker] = []
        for each in request.get("liveBrokers") or ():
            endpoints = each.get("endpoints") or [{"host": each.get("v0Host"), "port": each.get("v0Port")}]
            for one in endpoints[:MAX_ADDRESSES]:
                live.append(self._endpoint(one, "listener", each["id"], each.get("rack")))
        yield from self._broker_list(at, api, live)
        highest: dict[str, tuple[int, Any]] = {}
        for part in request.get("ungroupedPartitionStates") or ():
            index, _ = highest.get(part["topicName"], (-1, None))
            if part["leader"] != -2:
                highest[part["topicName"]] = max(index, part["partitionIndex"]), None
        for topic in request.get("topicStates") or ():
            kept = [part["partitionIndex"] for part in topic["partitionStates"] if part["leader"] != -2]
            if kept:
                highest[topic["topicName"]] = max(kept), topic.get("topicId")
            elif topic["partitionStates"]:
                yield from self._topic_gone(at, api, topic["topicName"])
        for name, (index, id_) in highest.items():
            yield from self._topic(at, api, name, index + 1, id_)

    def _created(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        answer = exchange.response
        if answer is None or exchange.request.get("validateOnly"):
            return
        asked = {each["name"]: each for each in exchange.request["topics"]}
        for each in answer["topics"]:
            wanted = asked.get(each["name"])
            if each["errorCode"] or wanted is None:
                continue
            count = each.get("numPartitions", -1)
            if count < 0:
                count = len(wanted["assignments"]) or wanted["numPartitions"]
            if count >= 0:  # else the broker's default, which older responses do not contain
                api = api_name(exchange.api_key)
                yield from self._topic(exchange.response_start, api, each["name"], count, each.get("topicId"))

    def _deleted(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        for each in exchange.response["responses"] if exchange.response is not None else ():
            name = each["name"] or topics.names.get(each.get("topicId"))
            if not each["errorCode"] and name is not None:
                yield from self._topic_gone(exchange.response_start, api_name(exchange.api_key), name)

    def _enlarged(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Topology]:
        if exchange.response is None or exchange.request.get("validateOnly"):
            return
        asked = {each["name"]: each["count"] for each in exchange.request["topics"]}
        for each in exchange.response["results"]:
            if not each["errorCode"] and each["name"] in asked:
                at, api = exchange.response_start, api_name(exchange.api_key)
                yield from self._topic(at, api, each["name"], asked[each["name"]])


def of_partition(row: Leadership) -> Topology:
    """Return a row of leadership as a row of this table."""
    return Topology(
        row.time_ns,
        row.cluster,
        "partition",
        topic=row.topic,
        partition=row.partition,
        leader=row.leader,
        isr=row.isr,
        replicas=row.replicas,
        change=row.change,
        api=row.api,
    )


def _written(id_: UUID) -> str | None:
    return None if id_ == NO_ID else uuid_text(id_)


_READERS: dict[int, Callable[[Cluster, DecodedExchange, Topics], Iterator[Topology]]] = {
    METADATA: Cluster._metadata,
    LEADER_AND_ISR: Cluster._controller_request,
    STOP_REPLICA: Cluster._controller_request,
    UPDATE_METADATA: Cluster._controller_request,
    CONTROLLED_SHUTDOWN: Cluster._controlled_shutdown,
    CREATE_TOPICS: Cluster._created,
    DELETE_TOPICS: Cluster._deleted,
    CREATE_PARTITIONS: Cluster._enlarged,
    DESCRIBE_CLUSTER: Cluster._described_cluster,
    BROKER_REGISTRATION: Cluster._registration,
    BROKER_HEARTBEAT: Cluster._heartbeat,
    DESCRIBE_TOPIC_PARTITIONS: Cluster._metadata,
}
APIS = frozenset(_READERS)
