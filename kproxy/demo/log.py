"""The log of one partition, in memory, and the errors with which a broker refuses records.

Batches are stored as the producer sent them except for the broker's fields, base offset and leader epoch, which the
checksum does not cover. Bounded by RETENTION_BYTES (the oldest batches are deleted) and by the number of idempotent
producers remembered. Refuses to know brokers, connections and time.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

from kproxy.errors import ProtocolError
from kproxy.protocol.apis import (
    CORRUPT_MESSAGE,
    INVALID_PRODUCER_EPOCH,
    INVALID_RECORD,
    MESSAGE_TOO_LARGE,
    OFFSET_OUT_OF_RANGE,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
)
from kproxy.protocol.records import Batch, read_batches

RETENTION_BYTES = 4 * 1024 * 1024
MAX_MESSAGE_BYTES = 1024 * 1024 + 12  # default of a broker's message.max.bytes
_PRODUCERS = 256
_REMEMBERED = 5  # batches per producer: the maximum in flight with idempotence


# The start of a batch: base offset, length, leader epoch; the broker writes the first and the last.
_STAMP = Struct(">qii")


class Stored(NamedTuple):
    base_offset: int
    last_offset: int
    max_timestamp: int
    data: bytes


class _Producer:
    """The state of an idempotent producer (KIP-98): its latest batches, by sequence."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)  # first and last sequence, base offset


class Refused(Exception):
    """The broker refuses these records; `error_code` is for the answer."""

    def __init__(self, error_code: int) -> None:
        self.error_code = error_code


class Log:
    """One partition's batches, in order."""

    def __init__(self) -> None:
        self.start_offset = 0
        self.end_offset = 0
        self.waiters: set[Callable[[], None]] = set()  # called after each append
        self._batches: list[Stored] = []
        self._bytes = 0
        self._producers: OrderedDict[int, _Producer] = OrderedDict()

    def append(self, data: bytes, leader_epoch: int) -> int:
        """Append the records of one Produce; returns the base offset. Raises Refused."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise Refused(MESSAGE_TOO_LARGE)
        try:
            batches, trailing = read_batches(data)
        except ProtocolError:
            raise Refused(CORRUPT_MESSAGE) from None
        if trailing or not batches or not all(batch.crc_valid for batch in batches):
            raise Refused(CORRUPT_MESSAGE)
        for batch in batches:
            header = batch.header
            if header.magic != 2 or not 0 <= header.last_offset_delta == header.record_count - 1:
                raise Refused(INVALID_RECORD)
        offset = self._known_offset(batches)
        if offset is not None:
            return offset
        base_offset = self.end_offset
        for batch in batches:
            self._store(batch, leader_epoch)
        self._retain()
        for waiter in tuple(self.waiters):
            waiter()
        return base_offset

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Return whole batches from the one that contains `offset`, at least one if there is any. Raises Refused."""
        if not self.start_offset <= offset <= self.end_offset:
            raise Refused(OFFSET_OUT_OF_RANGE)
        if offset == self.end_offset:
            return b""
        index = bisect_right(self._batches, offset, key=attrgetter("base_offset")) - 1
        parts: list[bytes] = []
        size = 0
        for batch in islice(self._batches, index, None):
            if parts and size + len(batch.data) > max_bytes:
                break
            parts.append(batch.data)
            size += len(batch.data)
        return b"".join(parts)

    def offset_for(self, timestamp: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first batch with a timestamp at or after this one."""
        for batch in self._batches:
            if batch.max_timestamp >= timestamp:
                return batch.base_offset, batch.max_timestamp
        return None

    def newest(self) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the largest timestamp."""
        newest = max(self._batches, key=lambda batch: batch.max_timestamp, default=None)
        return (newest.last_offset, newest.max_timestamp) if newest else None

    def _known_offset(self, batches: list[Batch]) -> int | None:
        """Return the base offset of a duplicate batch of an idempotent producer; None: it is new and in sequence."""
        header = batches[0].header
        if header.producer_id < 0:
            return None
        producer = self._producers.get(header.producer_id)
        if producer is None or header.producer_epoch > producer.epoch:
            producer = _Producer(header.producer_epoch)
        elif header.producer_epoch < producer.epoch:
            raise Refused(INVALID_PRODUCER_EPOCH)
        for first, last, offset in producer.batches:
            if (first, last) == (header.base_sequence, header.last_sequence):
                return offset
        expected = producer.batches[-1][1] + 1 & 0x7FFFFFFF if producer.batches else header.base_sequence
        if header.base_sequence != expected:
            raise Refused(OUT_OF_ORDER_SEQUENCE_NUMBER)
        producer.batches.append((header.base_sequence, header.last_sequence, self.end_offset))
        self._producers[header.producer_id] = producer
        self._producers.move_to_end(header.producer_id)
        if len(self._producers) > _PRODUCERS:
            self._producers.popitem(last=False)
        return None

    def _store(self, batch: Batch, leader_epoch: int) -> None:
        header = batch.header
        data = bytearray(batch.view)
        _STAMP.pack_into(data, 0, self.end_offset, header.length, leader_epoch)
        last_offset = self.end_offset + header.last_offset_delta
        self._batches.append(Stored(self.end_offset, last_offset, header.max_timestamp, bytes(data)))
        self._bytes += len(data)
        self.end_offset = last_offset + 1

    def _retain(self) -> None:
        drop = 0
        while self._bytes > RETENTION_BYTES and drop < len(self._batches) - 1:
            self._bytes -= len(self._batches[drop].data)
            drop += 1
        if drop:
            del self._batches[:drop]
            self.start_offset = self._batches[0].base_offset
