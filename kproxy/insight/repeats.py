"""Repeated Metadata responses, which are by far the most: they need not be decoded.

Duty: recognise them by digest. Digests are dropped when the topology changes, because a response that repeats the
former state is then another change. A response that refuses topics counts as repeated for the same client only. The
caller of `Knowledge.feed` checks `is_one` before it decodes, and passes the resulting rows to `fed`.

Bounds: MAX_DIGESTS digests. Refuses to know the contents of a response.
"""

from collections.abc import Iterable
from hashlib import blake2b

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.rows import Leadership, Row, Topology
from kproxy.insight.topology import REFUSALS
from kproxy.protocol.apis import METADATA
from kproxy.protocol.primitives import Buffer
from kproxy.protocol.schema import schema

MAX_DIGESTS = 256
_CLIENT = 12  # offset of the client id in a request frame: after size, API key, version and correlation id
_THROTTLE_SINCE = 3  # since this version of Metadata a response begins with its throttle time


class Repeats:
    """The repeats of one cluster. Call `is_one` for each exchange, then `fed` for each one decoded and fed."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: set[bytes] = set()
        self._digest = b""  # digest of the last response given to `is_one`
        self._for_client = b""  # digest of that response and its client id
        self._topics = 0

    def is_one(self, api_key: int, api_version: int, request_frame: Buffer, response_frame: Buffer | None) -> bool:
        """Return whether a response repeats an earlier one, and count it. Frames include their 4-byte sizes."""
        self._digest = self._for_client = b""
        if api_key != METADATA or response_frame is None:
            return False
        self._digest = digest(api_version, response_frame)
        self._for_client = blake2b(_client(request_frame), digest_size=16, key=self._digest).digest()
        found = self._digest in self._seen or self._for_client in self._seen
        self.count += found
        return found

    def fed(self, exchange: DecodedExchange, rows: Iterable[Row], topics: int) -> None:
        """Learn from a decoded exchange and its rows. topics: number of changes of topic names and counts so far."""
        if topics != self._topics or any(isinstance(row, Leadership | Topology) for row in rows):
            self._seen.clear()
            self._topics = topics
        if self._digest:
            if len(self._seen) >= MAX_DIGESTS:
                self._seen.clear()
            self._seen.add(self._for_client if _refuses(exchange) else self._digest)


def _refuses(exchange: DecodedExchange) -> bool:
    return any(topic["errorCode"] in REFUSALS for topic in (exchange.response or {}).get("topics", ()))


def _client(request_frame: Buffer) -> bytes:
    """Return the client id of a request with its length, which all header versions of Metadata have in one place."""
    view = memoryview(request_frame)
    size = int.from_bytes(view[_CLIENT : _CLIENT + 2], signed=True)
    return bytes(view[_CLIENT : _CLIENT + 2 + max(0, size)])


def digest(api_version: int, response_frame: Buffer) -> bytes:
    """Return the digest of a Metadata response without its correlation id and throttle time, which vary."""
    start = 8
    if api_version in schema().apis[METADATA].response.flexible_versions:
        start += 1  # the empty tagged fields of the header
    if api_version >= _THROTTLE_SINCE:
        start += 4
    return blake2b(memoryview(response_frame)[start:], digest_size=16, salt=api_version.to_bytes(2)).digest()
