"""Answers of Metadata that say what an earlier one said, which are by far the most: they need not be decoded.

Duty: known by digest, as long as nothing else changed what is known: then what was known before may be told again, and
is another change. One that refuses topics is known for the client that was refused alone: to another one it is news.
Whoever feeds `Knowledge` asks before it decodes, and says which rows came of what it fed.

Bounds: MAX_DIGESTS digests. Refuses to know what an answer says.
"""

from collections.abc import Iterable
from hashlib import blake2b

from kproxy.insight.rows import Leadership, Row, Topology
from kproxy.insight.spoken import Spoken
from kproxy.insight.topology import REFUSALS
from kproxy.protocol.apis import METADATA
from kproxy.protocol.primitives import Buffer
from kproxy.protocol.schema import schema

MAX_DIGESTS = 256
_CLIENT = 12  # where a request's client id begins: behind size, API, version and correlation id
_THROTTLE_SINCE = 3  # version of Metadata whose answer begins with its throttle


class Repeats:
    """Of one cluster. `is_one` for each exchange, then `fed` for those that were decoded and fed."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: set[bytes] = set()
        self._digest = b""  # of the answer that was asked about last
        self._for_client = b""  # of the same, and its client
        self._topics = 0

    def is_one(self, api_key: int, api_version: int, request_frame: Buffer, response_frame: Buffer | None) -> bool:
        """Whether an answer, of frames with their 4-byte sizes, says nothing new; it is counted then."""
        self._digest = self._for_client = b""
        if api_key != METADATA or response_frame is None:
            return False
        self._digest = digest(api_version, response_frame)
        self._for_client = blake2b(_client(request_frame), digest_size=16, key=self._digest).digest()
        found = self._digest in self._seen or self._for_client in self._seen
        self.count += found
        return found

    def fed(self, spoken: Spoken, rows: Iterable[Row], topics: int) -> None:
        """The exchange, and what came of it; topics: how often names and counts of topics changed so far."""
        if topics != self._topics or any(isinstance(row, Leadership | Topology) for row in rows):
            self._seen.clear()
            self._topics = topics
        if self._digest:
            if len(self._seen) >= MAX_DIGESTS:
                self._seen.clear()
            self._seen.add(self._for_client if _refuses(spoken) else self._digest)


def _refuses(spoken: Spoken) -> bool:
    return any(topic["errorCode"] in REFUSALS for topic in (spoken.response or {}).get("topics", ()))


def _client(request_frame: Buffer) -> bytes:
    """The client id of a request, as it is written in a header of any version that Metadata has."""
    view = memoryview(request_frame)
    size = int.from_bytes(view[_CLIENT : _CLIENT + 2], signed=True)
    return bytes(view[_CLIENT : _CLIENT + 2 + max(0, size)])


def digest(api_version: int, response_frame: Buffer) -> bytes:
    """Of an answer of Metadata, without its correlation id and its throttle, which differ from one to the next."""
    start = 8
    if api_version in schema().apis[METADATA].response.flexible_versions:
        start += 1  # no tagged fields in the header, as brokers send it
    if api_version >= _THROTTLE_SINCE:
        start += 4
    return blake2b(memoryview(response_frame)[start:], digest_size=16, salt=api_version.to_bytes(2)).digest()
