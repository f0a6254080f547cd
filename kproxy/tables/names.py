"""Names of topics by their ids, and ids of brokers by their addresses.

Duty: collects names from responses on any connection of a capture or of the proxy, and fills them in when a file is
written, since a response may come after the rows that need it. The result does not depend on the order of responses: if
a topic has two names, the first in alphabetical order is used, and an address that two brokers advertise has no id.

Only a broker that advertises an IP address can be found by the address of a connection; behind NAT, or with a host
name, its id stays unknown. Bounded by MAX_NAMES topics and as many brokers.
"""

from collections.abc import Mapping
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kproxy.tables.arrays import listed
from kproxy.tables.partitions import MAX_NAME, topic_id
from kproxy.tables.schema import I32, TEXT
from kproxy.wire.bodies import Found
from kproxy.wire.events import NONE

MAX_NAMES = 256 * 1024

FILLED = ("topic", "broker_id")  # the columns

_SPACE = listed(TEXT, [" "])[0]


class Names:
    """The names of one capture, or of all traffic that a proxy records."""

    def __init__(self) -> None:
        self.topics: dict[str, str] = {}  # by id, as Kafka writes it
        self.brokers: dict[str, int] = {}  # node id by "address port"; NONE: two brokers advertise it

    def __len__(self) -> int:
        return len(self.topics) + len(self.brokers)

    def forget(self) -> None:
        self.topics.clear()
        self.brokers.clear()

    def learn(self, found: Found | None) -> None:
        if found is None:
            return
        for identity, name in found.names.items():
            self._add_topic(topic_id(identity), name[:MAX_NAME])
        for (host, port), node in found.brokers.items():
            self.learn_broker(host, port, node)

    def learn_broker(self, host: str, port: int, node: int) -> None:
        """Record a broker's address; a host name is ignored."""
        address = address_of(host)
        if address is not None:
            self._add_broker(f"{address} {port}", node)

    def broker_at(self, address: str, port: int) -> int | None:
        """Return the node id of the broker that advertises an address; None if none or two do."""
        node = self.brokers.get(f"{address} {port}", NONE)
        return None if node == NONE else node

    def as_json(self) -> dict[str, Any]:
        """Return all names as JSON values, as `add` takes them."""
        return {"topics": self.topics, "brokers": self.brokers}

    def add(self, names: Mapping[str, Any]) -> None:
        for identity, name in names["topics"].items():
            self._add_topic(identity, name)
        for address, node in names["brokers"].items():
            self._add_broker(address, node)

    def fill(self, rows: pa.Table) -> pa.Table:
        """Return rows with missing topic names filled in by topic id, and missing broker ids by address."""
        names = rows.schema.names
        if self.topics and "topic_id" in names:
            rows = _filled(rows, "topic", rows["topic_id"], self.topics, TEXT)
        if self.brokers and {"broker_id", "broker_address"} <= set(names):
            addresses = pc.binary_join_element_wise(rows["broker_address"], rows["broker_port"].cast(TEXT), _SPACE)
            brokers = {address: node for address, node in self.brokers.items() if node != NONE}
            rows = _filled(rows, "broker_id", addresses, brokers, I32)
        return rows

    def _add_topic(self, identity: str, name: str) -> None:
        known = self.topics.get(identity)
        if name < known if known is not None else len(self.topics) < MAX_NAMES:
            self.topics[identity] = name

    def _add_broker(self, address: str, node: int) -> None:
        known = self.brokers.get(address)
        if known is not None:
            self.brokers[address] = node if node == known else NONE
        elif len(self.brokers) < MAX_NAMES:
            self.brokers[address] = node


def _filled(rows: pa.Table, column: str, keys: pa.ChunkedArray, known: dict[str, Any], kind: pa.DataType) -> pa.Table:
    values = listed(kind, [known[key] for key in sorted(known)])
    found = values.take(pc.index_in(keys, value_set=listed(TEXT, sorted(known))))
    return rows.set_column(rows.schema.get_field_index(column), column, pc.coalesce(rows[column], found))


@lru_cache(maxsize=1024)
def address_of(host: str) -> str | None:
    """Return an IP address in the notation of the tables; None for a host name."""
    family = AF_INET6 if ":" in host else AF_INET
    try:
        return inet_ntop(family, inet_pton(family, host))
    except (OSError, ValueError):
        return None
