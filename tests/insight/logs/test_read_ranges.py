"""A log read in any order and with gaps: nothing is reported twice, and no transaction is ended by another's marker."""

import random
from itertools import pairwise

import pytest

from kproxy.insight.logs import read_ranges
from kproxy.insight.logs.read_ranges import Marker, OpenTransactions, ReadRanges
from kproxy.insight.rows import CommittedOffset

OPEN = CommittedOffset(0, "c", "g", "t", 0, 0, None, None, "pending", 0, None, 0, 0, None, None)


def written(dice, length, producers=3):
    """A log of single records, (producer, change), with change None for an offset; and how the transaction of each
    offset ended."""
    log, is_open = [], {}
    truth = {}
    for at in range(length):
        producer = dice.randrange(producers)
        if is_open.get(producer) and dice.random() < 0.4:
            change = dice.choice(("committed", "aborted"))
            truth |= dict.fromkeys(is_open.pop(producer), (change, at))
            log.append((producer, change))
        else:
            is_open.setdefault(producer, []).append(at)
            log.append((producer, None))
    return log, truth


class Reading:
    """Batches of a log that are read in any order."""

    def __init__(self, log):
        self.log = log
        self.read, self.open = ReadRanges(), OpenTransactions()
        self.taken, self.changes = [], {}

    def batch(self, base, last):
        taken = self.read.take(base, last, 0)
        if taken is None:
            return
        rows = []
        for at in range(base, last + 1):
            self.taken.append(at)
            producer, change = self.log[at]
            if change is None:
                self.open.pend(taken[0], producer, OPEN._replace(offset=at, producer_id=producer))
            else:
                rows += self.open.end(taken[0], producer, Marker(change, at, at, None, None))
        rows += self.open.settle(self.read, taken[0])
        for row in rows:
            assert row.offset not in self.changes
            self.changes[row.offset] = (row.change, row.log_offset)


def parts(dice, length):
    """The batches of a log, as (first, last) offsets."""
    cuts = sorted({0, length, *(dice.randrange(length) for _ in range(length // 3))})
    return [(first, after - 1) for first, after in pairwise(cuts)]


def test_reading_in_any_order_reports_only_true_changes():
    partly = 0
    for seed in range(300):
        dice = random.Random(seed)
        log, truth = written(dice, dice.randrange(5, 60))
        reading = Reading(log)
        batches = parts(dice, len(log))
        order = [each for each in batches for _ in range(dice.choice((1, 1, 2)))]
        dice.shuffle(order)
        lost = [each for each in batches if dice.random() < 0.2]
        for each in order:
            if each not in lost:
                reading.batch(*each)
        assert all(truth[offset] == change for offset, change in reading.changes.items())
        partly += len(reading.changes)
        for each in lost:  # finally the lost batches are read too
            reading.batch(*each)
        assert sorted(reading.taken) == list(range(len(log)))
        assert reading.changes == truth and reading.open.left_out == 0
        (whole,) = reading.read.ranges
        assert (whole.begin, whole.end) == (0, len(log))
    assert partly > 2000


@pytest.mark.parametrize("bound,most", [("MAX_RANGES", 2), ("MAX_PENDING", 4), ("MAX_ENDED", 2)])
def test_beyond_a_limit_changes_are_missing_but_none_is_wrong(monkeypatch, bound, most):
    monkeypatch.setattr(read_ranges, bound, most)
    missing = left_out = 0
    for seed in range(200):
        dice = random.Random(seed)
        log, truth = written(dice, 60, producers=5)
        reading = Reading(log)
        batches = parts(dice, len(log))
        dice.shuffle(batches)
        for each in batches:
            reading.batch(*each)
            ranges, transactions = reading.read.ranges, reading.open
            assert len(ranges) <= read_ranges.MAX_RANGES
            pending = {(each, producer): len(rows) for each in ranges for producer, rows in each.pending.items()}
            assert pending.keys() == transactions._pending.keys()
            assert transactions._pending_count == sum(pending.values()) <= read_ranges.MAX_PENDING
            first = {(each, producer) for each in ranges for producer in each.ended}
            assert first == transactions._ended.keys() and len(first) <= read_ranges.MAX_ENDED
        assert len(reading.taken) == len(set(reading.taken))
        assert all(truth[offset] == change for offset, change in reading.changes.items())
        missing += len(truth) - len(reading.changes)
        left_out += reading.open.left_out
    assert missing > 0 and left_out > 0


def test_a_new_leader_with_a_shorter_log_truncates_what_was_read():
    """The truncated tail included a marker: open transactions are unknown now, and the next marker does not end
    them."""
    read, transactions = ReadRanges(), OpenTransactions()
    where, _ = read.take(0, 4, 1)
    transactions.pend(where, 7, OPEN._replace(offset=3))
    assert not read.is_shorter(3, 1) and not read.is_shorter(5, 2) and read.is_shorter(3, 2)
    transactions.shorten(read, 3)
    assert (where.begin, where.end, transactions.left_out) == (0, 3, 1)
    again, is_history = read.take(3, 3, 2)
    assert again is where and not is_history
    assert list(transactions.end(where, 7, Marker("committed", 0, 3, None, None))) == []
