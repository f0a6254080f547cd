"""The cases and their frames: complete, valid, and encoded once before anything is timed.

A frame starts with its 4-byte size and has correlation id 0; the sender writes the real id at REQUEST_CORRELATION_ID or
ANSWER_CORRELATION_ID.
"""

import uuid
from dataclasses import dataclass, replace
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

from kproxy.protocol import codec, records
from kproxy.protocol.apis import API_VERSIONS, FETCH, HEARTBEAT, METADATA, PRODUCE
from kproxy.protocol.schema import schema

INT32 = Struct(">i")
REQUEST_CORRELATION_ID = 8  # after size, API key and version
ANSWER_CORRELATION_ID = 4  # after the size

PACED, SATURATING = LOADS = ("paced", "saturating")
NODE_ID = 0
TOPIC = "bench"
TOPIC_ID = uuid.UUID("6b70726f-7879-4000-8000-62656e636800")
FETCHED_BYTES = 1_000_000
FETCHED_BATCH_BYTES = 16_384  # a producer's default batch.size
_ONE_RECORD_BYTES = records.HEADER_BYTES + 12  # a batch of one record, without its value
_TIMESTAMP = 1_700_000_000_000


class Limits(NamedTuple):
    """The limits of kproxy's CPU time over HAProxy's, by load and detail."""

    paced: float
    paced_topics: float  # with --detail topics
    saturating: float
    saturating_topics: float


@dataclass(frozen=True)
class Case:
    """One kind of traffic, and the limit of kproxy's CPU time for it."""

    name: str
    title: str
    api_key: int
    versions: tuple[int, ...]
    request_bytes: int  # approximate size of a produce request with its headers
    connections: int
    depth: int  # requests in flight per connection
    requests: int  # per round
    python: Limits
    native: Limits  # with the compiled core
    limit: float = 0.0  # the limit in this run

    @property
    def is_bulk(self) -> bool:
        """Return whether its CPU time is reported per GB, not per request."""
        return self.request_bytes >= 1_000_000 or self.api_key == FETCH


# Besides Produce v9 and Fetch v12, versions whose responses can name brokers (Produce v10 and Fetch v16 and later,
# KIP-951): a proxy that rewrites addresses must check every such response.
CASES = (
    Case(
        "small",
        "100 B produce, depth 1",
        PRODUCE,
        (9, 13),
        100,
        16,
        1,
        16_000,
        Limits(1.6, 2.2, 1.9, 2.4),
        Limits(1.2, 1.2, 1.15, 1.2),
    ),
    Case(
        "pipelined",
        "1 kB produce, depth 8",
        PRODUCE,
        (9, 13),
        1_000,
        16,
        8,
        64_000,
        Limits(2.7, 4.0, 4.0, 6.5),
        Limits(1.1, 1.4, 1.15, 1.75),
    ),
    Case(
        "heartbeat",
        "heartbeat, depth 1",
        HEARTBEAT,
        (4,),
        0,
        16,
        1,
        16_000,
        Limits(1.7, 1.8, 2.0, 2.1),
        Limits(1.2, 1.6, 1.2, 1.9),
    ),
    Case(
        "produce",
        "1 MB produce",
        PRODUCE,
        (9, 13),
        1_000_000,
        4,
        1,
        500,
        Limits(0.85, 0.9, 0.85, 0.9),
        Limits(0.6, 0.75, 0.65, 0.9),
    ),
    Case("fetch", "1 MB fetch", FETCH, (12, 18), 0, 4, 1, 500, Limits(0.9, 1.0, 0.9, 0.8), Limits(0.65, 0.8, 0.7, 0.8)),
)


def limited(case: Case, detail: str, load: str, *, native: bool) -> Case:
    """Return the case with its limit for this detail, load, and implementation."""
    limits = case.native if native else case.python
    by_load = {
        (PACED, "headers"): limits.paced,
        (PACED, "topics"): limits.paced_topics,
        (SATURATING, "headers"): limits.saturating,
        (SATURATING, "topics"): limits.saturating_topics,
    }
    return replace(case, limit=by_load[load, detail])


def request(case: Case, version: int) -> bytes:
    if case.api_key == FETCH:
        return request_frame(FETCH, version, _fetch())
    if case.api_key == HEARTBEAT:
        return request_frame(HEARTBEAT, version, _HEARTBEAT)
    least = len(request_frame(PRODUCE, version, _produce(0)))
    return request_frame(PRODUCE, version, _produce(max(0, case.request_bytes - least)))


@cache
def answer(api_key: int, version: int, port: int) -> bytes:
    """The response of the bench's single broker, at `port` of 127.0.0.1, to a request of this API and version."""
    frame = codec.encode_response(api_key, version, {"correlationId": 0}, _ANSWERS[api_key](version, port))
    return INT32.pack(len(frame)) + frame


def answers(port: int) -> dict[tuple[int, int], bytes]:
    """Every response that a run can need, by (API key, version)."""
    wanted = [(case.api_key, version) for case in CASES for version in case.versions]
    wanted += [(api_key, v) for api_key in (METADATA, API_VERSIONS) for v in schema().apis[api_key].request.versions]
    return {(api_key, version): answer(api_key, version, port) for api_key, version in wanted}


def request_frame(api_key: int, version: int, body: dict[str, Any]) -> bytes:
    header = {"requestApiKey": api_key, "requestApiVersion": version, "correlationId": 0, "clientId": "load"}
    frame = codec.encode_request(header, body)
    return INT32.pack(len(frame)) + frame


def _batch(value_bytes: int, base_offset: int = 0) -> bytes:
    """A batch of one record; its value looks random, like compressed or encrypted values."""
    value = bytes(i * i * 31 >> 3 & 0xFF for i in range(min(value_bytes, 4096)))
    value = (value * (value_bytes // 4096 + 1))[:value_bytes]
    return records.write_batch([records.Record(base_offset, _TIMESTAMP, None, value)])


def _produce(value_bytes: int) -> dict[str, Any]:
    partition = {"index": 0, "records": _batch(value_bytes)}
    topic = {"name": TOPIC, "topicId": TOPIC_ID, "partitionData": [partition]}
    return {"transactionalId": None, "acks": -1, "timeoutMs": 30_000, "topicData": [topic]}


# As long as those of Java's members.
_HEARTBEAT = {
    "groupId": "orders-service",
    "generationId": 7,
    "memberId": f"consumer-orders-service-1-{uuid.UUID(int=1)}",
}


def _fetch() -> dict[str, Any]:
    partition = {"partition": 0, "fetchOffset": 0, "partitionMaxBytes": FETCHED_BYTES}
    topic = {"topic": TOPIC, "topicId": TOPIC_ID, "partitions": [partition]}
    return {"maxWaitMs": 500, "minBytes": 1, "maxBytes": FETCHED_BYTES, "topics": [topic]}


def _produce_answer(version: int, port: int) -> dict[str, Any]:
    partition = {"index": 0, "errorCode": 0, "baseOffset": 0, "logStartOffset": 0}
    return {"responses": [{"name": TOPIC, "topicId": TOPIC_ID, "partitionResponses": [partition]}]}


def _fetch_answer(version: int, port: int) -> dict[str, Any]:
    data = bytearray()
    offset = 0
    while (left := FETCHED_BYTES - len(data)) > _ONE_RECORD_BYTES:
        data += _batch(min(FETCHED_BATCH_BYTES, left) - _ONE_RECORD_BYTES, offset)
        offset += 1
    partition = {"partitionIndex": 0, "highWatermark": offset, "lastStableOffset": offset, "logStartOffset": 0}
    topic = {"topic": TOPIC, "topicId": TOPIC_ID, "partitions": [{**partition, "records": bytes(data)}]}
    return {"responses": [topic]}


def _heartbeat_answer(version: int, port: int) -> dict[str, Any]:
    return {"errorCode": 0}


def _metadata_answer(version: int, port: int) -> dict[str, Any]:
    partition = {"partitionIndex": 0, "leaderId": NODE_ID, "replicaNodes": [NODE_ID], "isrNodes": [NODE_ID]}
    topic = {"name": TOPIC, "topicId": TOPIC_ID, "partitions": [partition]}
    return {
        "brokers": [{"nodeId": NODE_ID, "host": "127.0.0.1", "port": port}],
        "clusterId": TOPIC,
        "controllerId": NODE_ID,
        "topics": [topic],
    }


def _api_versions_answer(version: int, port: int) -> dict[str, Any]:
    ranges = {api_key: schema().apis[api_key].request.versions for api_key in _ANSWERS}
    return {
        "apiKeys": [
            {"apiKey": api_key, "minVersion": versions[0], "maxVersion": versions[-1]}
            for api_key, versions in ranges.items()
        ]
    }


_ANSWERS = {
    PRODUCE: _produce_answer,
    FETCH: _fetch_answer,
    METADATA: _metadata_answer,
    HEARTBEAT: _heartbeat_answer,
    API_VERSIONS: _api_versions_answer,
}
