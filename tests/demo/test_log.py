"""A partition's log: offsets, error codes, idempotence, and its limit."""

import pytest

from kproxy.demo.log import RETENTION_BYTES, Log, Refused
from kproxy.protocol.apis import (
    CORRUPT_MESSAGE,
    INVALID_PRODUCER_EPOCH,
    INVALID_RECORD,
    MESSAGE_TOO_LARGE,
    OFFSET_OUT_OF_RANGE,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
)
from kproxy.protocol.compression import LZ4
from kproxy.protocol.records import Record, read_batches, write_batch, write_message_set


def batch(*values, timestamp=1000, **settings):
    return write_batch([Record(index, timestamp, None, value) for index, value in enumerate(values)], **settings)


def values(data):
    batches, trailing = read_batches(data)
    assert trailing == 0
    assert all(batch.crc_valid for batch in batches)
    return {record.offset: record.value for batch in batches for record in batch.records()}


def refusal(action):
    with pytest.raises(Refused) as refused:
        action()
    return refused.value.error_code


def test_batches_get_their_offsets_and_come_back_whole():
    log = Log()
    assert [log.append(data, 3) for data in (batch(b"a", b"b"), batch(b"c", codec=LZ4), batch(b"d"))] == [0, 2, 3]
    assert values(log.read(0, 1 << 20)) == {0: b"a", 1: b"b", 2: b"c", 3: b"d"}
    assert values(log.read(1, 1)) == {0: b"a", 1: b"b"}  # the batch that holds it, and one at least
    assert values(log.read(3, 1 << 20)) == {3: b"d"}
    assert log.read(4, 1 << 20) == b""
    assert read_batches(log.read(0, 1))[0][0].header.leader_epoch == 3
    assert refusal(lambda: log.read(5, 1)) == OFFSET_OUT_OF_RANGE
    assert refusal(lambda: log.read(-1, 1)) == OFFSET_OUT_OF_RANGE


def test_waiters_wake_up_at_each_append_and_only_then():
    log = Log()
    heard = []
    log.waiters.add(lambda: heard.append(log.end_offset))
    log.append(batch(b"a"), 0)
    refusal(lambda: log.append(b"", 0))
    log.append(batch(b"b"), 0)
    assert heard == [1, 2]


def test_invalid_batches_get_the_error_codes_of_a_broker():
    log = Log()
    good = batch(b"value")
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for data, error in (
        (b"", CORRUPT_MESSAGE),
        (good[:-1], CORRUPT_MESSAGE),
        (good + b"x", CORRUPT_MESSAGE),
        (bytes(flipped), CORRUPT_MESSAGE),
        (bytes(100), CORRUPT_MESSAGE),
        (write_message_set([Record(0, 0, None, b"old")], magic=1), INVALID_RECORD),
        (write_batch([Record(0, 0, None, b"a"), Record(7, 0, None, b"gap")]), INVALID_RECORD),
        (batch(bytes(2 << 20)), MESSAGE_TOO_LARGE),
    ):
        assert refusal(lambda data=data: log.append(data, 0)) == error
    assert (log.start_offset, log.end_offset) == (0, 0)


def test_an_idempotent_producer_is_written_once_and_in_order():
    log = Log()

    def send(sequence, *records, epoch=0):
        return log.append(batch(*records, producer_id=7, producer_epoch=epoch, base_sequence=sequence), 0)

    assert send(0, b"a", b"b") == 0
    assert send(2, b"c") == 2
    assert send(0, b"a", b"b") == 0  # again, since the answer was lost
    assert send(2, b"c") == 2
    assert refusal(lambda: send(4, b"e")) == OUT_OF_ORDER_SEQUENCE_NUMBER
    assert send(3, b"d") == 3
    assert send(0, b"new", epoch=1) == 4
    assert refusal(lambda: send(4, b"old")) == INVALID_PRODUCER_EPOCH
    assert values(log.read(0, 1 << 20)) == {0: b"a", 1: b"b", 2: b"c", 3: b"d", 4: b"new"}
    assert send(2**31 - 1, b"last", b"wraps", epoch=2) == 5
    assert send(1, b"after", epoch=2) == 7


def test_the_oldest_batches_are_dropped_at_the_limit():
    log = Log()
    for _ in range(20):
        log.append(batch(bytes(RETENTION_BYTES // 10)), 0)
    assert 0 < log.start_offset < log.end_offset == 20
    kept = log.read(log.start_offset, 1 << 30)
    assert len(kept) <= RETENTION_BYTES
    assert list(values(kept)) == list(range(log.start_offset, 20))
    assert refusal(lambda: log.read(log.start_offset - 1, 1)) == OFFSET_OUT_OF_RANGE


def test_remembered_producers_are_bounded():
    log = Log()
    for producer_id in range(1000):
        log.append(batch(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=0), 0)
    assert len(log._producers) == 256


def test_offsets_are_found_by_time():
    log = Log()
    assert log.newest() is None
    for timestamp in (1000, 3000, 2000):
        log.append(batch(b"a", b"b", timestamp=timestamp), 0)
    assert log.offset_for(0) == (0, 1000)
    assert log.offset_for(1001) == (2, 3000)
    assert log.offset_for(3001) is None
    assert log.newest() == (3, 3000)
