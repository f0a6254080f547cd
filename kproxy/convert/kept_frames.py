"""Exchanges with kept frames -> rows on the disk, until the exchanges of a cluster can be read in one order of time.

Duty: an internal table, never part of a dataset. It has the frames about groups, leaders and administration, and the
fetched batches of coordinators' logs, each with its connection. They are decoded after the merge, in one place; only
addresses of brokers in requests of a controller are read at once, since they name brokers of other rows. Memory: the
owner calls `batch()` before `size` is too large.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import UPDATE_METADATA
from kproxy.tables.arrays import batch
from kproxy.tables.names import Names
from kproxy.tables.partitions import topic_id
from kproxy.tables.schema import BYTES, I16, I32, I64, TEXT, Table
from kproxy.wire.bodies import Batch
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE, Exchange

KEPT_FRAMES = Table(
    "kept_frames",
    pa.schema(
        [
            ("at_ns", I64),  # first byte of the response; without response, last byte of the request
            ("source", TEXT),
            ("connection", I64),
            ("number", I64),
            ("api_key", I16),
            ("api_version", I16),
            ("request_end", I64),
            ("response_start", I64),
            ("client_id", TEXT),
            ("client_address", TEXT),
            ("broker_address", TEXT),
            ("broker_port", I32),
            ("broker_id", I32),
            ("request", BYTES),
            ("response", BYTES),  # for a log: one batch, and no request
            ("topic", TEXT),  # this column and the next two are set for logs only
            ("topic_id", TEXT),
            ("partition", I32),
        ]
    ),
    ("at_ns", "source", "connection", "number"),
)
BATCH_BYTES = 4 << 20
_ROW_BYTES = 600  # approximate memory of a row without its frames


class KeptFrameColumns:
    """Rows, until `batch` returns them."""

    def __init__(self, names: Names) -> None:
        """names: learns the addresses of brokers from requests of controllers."""
        self._names = names
        self._rows: list[dict[str, Any]] = []
        self.size = 0  # approximate bytes

    @property
    def rows(self) -> int:
        return len(self._rows)

    def append(self, info: ConnectionInfo, exchange: Exchange) -> None:
        """Add an exchange of a plan that keeps frames; ignored if its frames were not kept."""
        request, response = exchange.request_frame, exchange.response_frame
        if request is None:
            return
        plan = exchange.plan
        if plan.api_key == UPDATE_METADATA:
            self._learn(request)
        self._rows.append(_whose(info, exchange, response is not None) | {"request": request, "response": response})
        self.size += _ROW_BYTES + len(request) + (0 if response is None else len(response))

    def append_logged(self, info: ConnectionInfo, exchange: Exchange, logged: Sequence[Batch]) -> None:
        """Add batches of coordinators' logs in a response, each with its copy."""
        whose = _whose(info, exchange, True)
        for each in logged:
            if each.copy is not None:
                batch = bytes(each.copy.data)
                identity = None if each.topic_id is None else topic_id(each.topic_id)
                of = {"topic": each.topic, "topic_id": identity, "partition": each.partition}
                self._rows.append(whose | of | {"response": batch})
                self.size += _ROW_BYTES + len(batch)

    def batch(self) -> pa.RecordBatch:
        """Return and remove the rows."""
        rows, self._rows, self.size = self._rows, [], 0
        return batch(KEPT_FRAMES.schema, rows)

    def _learn(self, request: bytes) -> None:
        try:
            _, body = codec.decode_request(memoryview(request)[4:])
        except ProtocolError:
            return
        for broker in body["liveBrokers"]:
            for end in broker.get("endpoints") or [{"host": broker.get("v0Host"), "port": broker.get("v0Port")}]:
                if end["host"]:
                    self._names.learn_broker(end["host"], end["port"], broker["id"])


def _whose(info: ConnectionInfo, exchange: Exchange, is_answered: bool) -> dict[str, Any]:
    plan = exchange.plan
    return {
        "at_ns": exchange.response_start if is_answered else exchange.request_end,
        "source": info.source,
        "connection": info.id,
        "number": exchange.number,
        "api_key": plan.api_key,
        "api_version": plan.api_version,
        "request_end": exchange.request_end,
        "response_start": 0 if exchange.response_start == NONE else exchange.response_start,
        "client_id": exchange.client_id,
        "client_address": info.client_address,
        "broker_address": info.broker_address,
        "broker_port": info.broker_port,
        "broker_id": info.broker_id,
    }
