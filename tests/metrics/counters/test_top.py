"""Top keys by size: the largest keep their own series, the number of series is bounded, and no count is lost."""

import random
from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.metrics.counters.named import ClientCells, TopicCells
from kproxy.metrics.counters.top import HALVE_NS, LEAVE_NS, REPLACE_NS, SWEEP_NS, Top

SECOND = 10**9
SCRAPE = 15 * SECOND


class Scraped:
    """A Top of topics as Prometheus scrapes it: counters by series, and all keys that ever had a series."""

    def __init__(self, limit):
        self.top = Top(limit, TopicCells)
        self.limit = limit
        self.true = Counter()
        self.ever = set()  # keys that had a series
        self.seen = {}  # series of the last scrape -> value
        self.ended = 0  # sum of the last values of all ended series
        self.now_ns = 1_700_000_000 * SECOND
        self.begun_ns = self.now_ns

    def count(self, key, size):
        self.true[key] += size
        cell = self.top.cells.get(key)
        if cell is None:
            cell = self.top.cell_for(key, size, self.now_ns)
        cell.rank += size
        cell.seen_ns = self.now_ns
        cell.request.bytes += size

    def scrape(self):
        shown = {key: cell.request.bytes for key, cell in self.top.shown(self.now_ns)}
        for key, value in shown.items():
            assert value >= self.seen.get(key, 0), "a counter never falls"
        self.ended += sum(value for key, value in self.seen.items() if key not in shown)
        self.seen = shown
        self.ever |= shown.keys() - {None}
        assert len(self.top.cells) <= self.limit
        assert len(self.top._candidates) <= self.limit
        assert len(self.top._heap) <= 2 * self.limit
        assert len(shown) <= self.limit + 1 + self.limit // 10 + 1 + LEAVE_NS // REPLACE_NS
        return shown

    def total(self):
        """Return the sum over all series that Prometheus has seen."""
        return self.ended + sum(self.seen.values())

    def most_ever(self):
        """Return the largest possible number of keys that had a series so far."""
        return self.limit + max(1, self.limit // 10) + (self.now_ns - self.begun_ns) // REPLACE_NS + 1


def test_topics_of_equal_size_do_not_take_turns_in_having_a_series():
    """A hundred large topics, 2400 small ones, a limit of 500, ten minutes of scrapes."""
    dice = random.Random(1)
    scraped = Scraped(500)
    names = [f"hot-{number}" for number in range(100)] * 10 + [f"cool-{number}" for number in range(2400)]
    for _ in range(40):
        for _ in range(3000):
            scraped.now_ns += SCRAPE // 3000
            scraped.count(dice.choice(names), 1000)
        scraped.scrape()
    shown = scraped.scrape().keys()
    assert {f"hot-{number}" for number in range(100)} <= shown
    assert len(scraped.ever) < 1.2 * 500
    assert scraped.total() == scraped.true.total()


def test_a_large_new_topic_gets_a_series_and_random_names_do_not():
    dice = random.Random(2)
    scraped = Scraped(20)
    for step in range(20_000):
        scraped.now_ns += SECOND // 10
        key = f"heavy-{dice.randrange(8)}" if step > 5000 and dice.random() < 0.5 else f"invented-{step}"
        scraped.count(key, dice.randrange(1, 1000))
        if step % 150 == 0:
            scraped.scrape()
    heavy = {f"heavy-{number}" for number in range(8)}
    assert heavy <= scraped.scrape().keys()
    assert len(scraped.ever) <= scraped.most_ever()
    assert scraped.total() == scraped.true.total()
    for key in heavy:
        assert scraped.seen[key] > 0.25 * scraped.true[key]  # it had to grow before its admission


def test_a_series_begins_at_its_admission_and_other_never_jumps():
    scraped = Scraped(10)
    for number in range(10):
        scraped.count(f"old-{number}", 100)
    before = scraped.scrape()
    scraped.count("new", 250)
    after = scraped.scrape()
    assert after["new"] == 250 and None not in after
    assert before.items() <= after.items()  # a replaced key is shown unchanged
    lost = (before.keys() - scraped.top.cells.keys()).pop()
    scraped.count(lost, 10)
    assert scraped.scrape()[None] == 10 and scraped.scrape()[lost] == 100
    scraped.count(lost, 250)  # its recent size is at least 260, but the one immediate replacement is used up
    scraped.now_ns += REPLACE_NS
    scraped.count(lost, 5)
    assert scraped.scrape()[lost] == 105
    scraped.now_ns += LEAVE_NS + SWEEP_NS
    scraped.count("another", 1)
    assert sum(key is not None for key in scraped.scrape()) == 10


def test_a_series_that_had_ended_begins_at_0():
    """Its key returns after LEAVE_NS and before the sweep of replaced cells."""
    scraped = Scraped(1)
    for key, size, pause_s in (("a", 10, 0), ("b", 100, 0), ("c", 1, 250), ("a", 900, 51), ("a", 5, 0)):
        scraped.now_ns += pause_s * SECOND
        scraped.scrape()
        scraped.count(key, size)
    assert "b" not in scraped.top.cells
    assert scraped.scrape()["a"] == 905
    assert scraped.total() == scraped.true.total()


def test_a_topic_that_was_large_long_ago_is_replaced():
    scraped = Scraped(10)
    for number in range(10):
        scraped.count(f"old-{number}", 1 << 20)
    for _ in range(20):
        scraped.now_ns += HALVE_NS
        for number in range(10):
            scraped.count(f"old-{number}", 1)  # still active, at a low rate
        scraped.count("new", 1000)
    assert "new" in scraped.scrape()


@pytest.mark.parametrize("sizes", [(20,), (10, 10)], ids=["at once", "when the smallest is known"])
def test_a_key_with_exactly_half_as_much_is_not_replaced(sizes):
    scraped = Scraped(2)
    scraped.count("a", 10)
    scraped.count("b", 11)
    for size in sizes:
        scraped.count("new", size)
        assert "new" not in scraped.top.cells
    assert scraped.top._candidates["new"].count == 20 and scraped.top._floor == 10
    scraped.count("new", 1)
    assert set(scraped.top.cells) == {"b", "new"} and scraped.top.cells["new"].rank == 21
    assert scraped.scrape() == {"a": 10, "b": 11, "new": 1, None: 20}


def test_a_replaced_series_is_shown_for_exactly_leave_ns():
    scraped = Scraped(1)
    scraped.count("a", 10)
    scraped.count("new", 21)
    begun_ns = scraped.now_ns
    scraped.now_ns = begun_ns + LEAVE_NS - 1
    assert set(scraped.scrape()) == {"a", "new"}
    scraped.now_ns = begun_ns + LEAVE_NS
    assert set(scraped.scrape()) == {"new"}


def test_unused_replacements_do_not_accumulate():
    for limit, most in ((5, 1), (30, 3)):
        scraped = Scraped(limit)
        for number in range(limit):
            scraped.count(f"old-{number}", 1)
        scraped.now_ns += 4 * REPLACE_NS
        for number in range(limit):
            scraped.count(f"new-{number}", 100)
            scraped.count(f"new-{number}", 1)
        assert sum(key.startswith("new") for key in scraped.top.cells) == most


def test_halving_never_raises_the_certain_size_of_a_candidate():
    """A candidate that replaced another may have had its count: this error is rounded up."""
    scraped = Scraped(1)
    scraped.count("a", 1_000_000)
    scraped.count("b", 7)
    scraped.count("c", 4)  # at least 4, at most 11: b's count may have been its own
    scraped.now_ns += HALVE_NS
    scraped.count("a", 0)
    scraped.top._sweep(scraped.now_ns)
    (candidate,) = scraped.top._candidates.values()
    assert (candidate.count, candidate.error) == (5, 4)


def test_keys_of_different_types_can_be_candidates_together():
    """Topics have a name or an id, clients a pair: with equal counts the keys themselves cannot be compared."""
    scraped = Scraped(4)
    for number in range(4):
        scraped.count(f"old-{number}", 1000)
    for turn in range(3):
        for number in range(12):
            scraped.count((f"t-{number}", UUID(int=number), ("id", number), None)[(number + turn) % 4], 7)
    assert len(scraped.top._candidates) == 4 and scraped.scrape()[None] == 3 * 12 * 7


@settings(max_examples=100)
@given(
    limit=st.integers(1, 6),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 50), st.integers(0, 90)), max_size=200),
)
def test_no_count_is_lost_and_the_number_of_series_is_bounded(limit, steps):
    """For any input, all series together hold everything that was counted."""
    scraped = Scraped(limit)
    for key, size, pause_s in steps:
        scraped.now_ns += pause_s * SECOND
        scraped.scrape()
        scraped.count(key, size)
        scraped.scrape()
    assert scraped.total() == scraped.true.total()
    assert len(scraped.ever) <= scraped.most_ever()


def test_connected_clients_keep_their_series_and_disconnected_ones_are_replaced():
    top = Top(10, ClientCells)
    now_ns = 1_700_000_000 * SECOND
    stay = [top.cell_for(f"stays-{number}", 1, now_ns) for number in range(9)]
    leaves = top.cell_for("leaves", 1, now_ns)
    for cell in (*stay, leaves):
        cell.open += 1
    for number in range(50):
        assert top.cell_for(f"churns-{number}", 1, now_ns) is top.other
    leaves.left(now_ns)
    now_ns += SWEEP_NS
    assert top.cell_for("comes", 1, now_ns) is not top.other
    assert {f"stays-{number}" for number in range(9)} | {"comes"} == top.cells.keys()


def test_a_series_is_replaced_by_a_key_more_than_twice_as_large_and_once_a_minute():
    """On whole minutes: a tenth of the series may be replaced at once, and one more each minute."""
    begun = 1_700_000_040 * SECOND
    assert begun % (60 * SECOND) == 0
    top = Top(10, TopicCells)

    def count(key, size, now_ns):
        cell = top.cells.get(key) or top.cell_for(key, size, now_ns)
        cell.rank += size
        cell.seen_ns = now_ns
        return key in top.cells

    def series(now_ns):
        return {key for key, _ in top.shown(now_ns)}

    assert all(count(f"old{number}", 100 + number, begun) for number in range(10))
    assert not count("new", 200, begun)  # twice as much as the smallest
    assert count("new", 1, begun)
    assert top.cells["new"].rank == 201 and "old0" not in top.cells
    assert not count("next", 10_000, begun)
    assert not count("next", 1, begun + 60 * SECOND - 1)
    assert count("next", 1, begun + 60 * SECOND) and "old1" not in top.cells
    assert not count("third", 10_000, begun + 60 * SECOND)
    assert {"old0", "old1", "new", "next"} <= series(begun + 300 * SECOND - 1)
    assert series(begun + 300 * SECOND) == series(begun + 300 * SECOND - 1) - {"old0"}


def test_sizes_are_halved_every_ten_minutes():
    begun = 1_700_000_040 * SECOND
    top = Top(10, TopicCells)
    top.cell_for("first", 1, begun).rank = 1001
    top.cells["first"].seen_ns = begun
    for seconds, rank in ((599, 1001), (659, 500), (1199, 500), (1259, 250)):
        top.cell_for(f"at {seconds}", 1, begun + seconds * SECOND).seen_ns = begun + seconds * SECOND
        assert top.cells["first"].rank == rank, seconds


@pytest.mark.parametrize("more_ns", [-1, 0, 1])
def test_a_replaced_series_is_shown_for_five_minutes_and_then_restarts_at_0(more_ns):
    top = Top(1, TopicCells)
    begun_ns = 1_700_000_000 * SECOND
    first = top.cell_for("a", 1, begun_ns)
    first.request.bytes, first.seen_ns = 7, begun_ns
    second = top.cell_for("b", 100, begun_ns)
    assert second not in (first, top.other)
    ended_ns = begun_ns + LEAVE_NS + more_ns
    second.seen_ns, second.rank = ended_ns, 50
    top.cell_for("c", 1, ended_ns - SECOND)  # the last sweep before
    assert {key for key, _ in top.shown(ended_ns)} - {None} == ({"a", "b"} if more_ns < 0 else {"b"})
    again = top.cell_for("a", 1000, ended_ns)
    assert (again is first) == (more_ns < 0) and again is not top.other
    assert again.request.bytes == (7 if more_ns < 0 else 0)
