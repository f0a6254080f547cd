"""Who has a series of its own: the largest, for long; how many series there ever are; and that nothing is lost."""

import random
from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.metrics.named import ClientCells, TopicCells
from kproxy.metrics.top import HALVE_NS, LEAVE_NS, REPLACE_NS, SWEEP_NS, Top

SECOND = 10**9
SCRAPE = 15 * SECOND


class Scraped:
    """A Top of topics that is scraped as it goes, as Prometheus sees it: counters by series, and who was ever shown."""

    def __init__(self, limit):
        self.top = Top(limit, TopicCells)
        self.limit = limit
        self.true = Counter()
        self.ever = set()  # keys that had a series
        self.seen = {}  # series -> last value, of those that the last scrape had
        self.ended = 0  # the last values of all series that ended
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
        """All that Prometheus has of it."""
        return self.ended + sum(self.seen.values())

    def most_ever(self):
        """How many keys can have had a series by now, whatever they did."""
        return self.limit + max(1, self.limit // 10) + (self.now_ns - self.begun_ns) // REPLACE_NS + 1


def test_topics_of_equal_size_are_not_shown_in_turn():
    """A hundred large topics, 2400 small ones, a cap of 500, ten minutes of scrapes."""
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


def test_a_large_newcomer_gets_its_series_and_invented_names_do_not():
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
        assert scraped.seen[key] > 0.25 * scraped.true[key]  # it had to show first that it is large


def test_a_series_begins_at_its_admission_and_other_never_jumps():
    scraped = Scraped(10)
    for number in range(10):
        scraped.count(f"old-{number}", 100)
    before = scraped.scrape()
    scraped.count("new", 250)
    after = scraped.scrape()
    assert after["new"] == 250 and None not in after
    assert before.items() <= after.items()  # whoever lost its place is shown as it was
    lost = (before.keys() - scraped.top.cells.keys()).pop()
    scraped.count(lost, 10)
    assert scraped.scrape()[None] == 10 and scraped.scrape()[lost] == 100
    scraped.count(lost, 250)  # it certainly had 260 lately, but the one place that is given at once has been given
    scraped.now_ns += REPLACE_NS
    scraped.count(lost, 5)
    assert scraped.scrape()[lost] == 105
    scraped.now_ns += LEAVE_NS + SWEEP_NS
    scraped.count("another", 1)
    assert sum(key is not None for key in scraped.scrape()) == 10


def test_a_series_that_had_ended_begins_at_0():
    """Its key comes back after LEAVE_NS, and before the cells that left are swept away."""
    scraped = Scraped(1)
    for key, size, pause_s in (("a", 10, 0), ("b", 100, 0), ("c", 1, 250), ("a", 900, 51), ("a", 5, 0)):
        scraped.now_ns += pause_s * SECOND
        scraped.scrape()
        scraped.count(key, size)
    assert "b" not in scraped.top.cells
    assert scraped.scrape()["a"] == 905
    assert scraped.total() == scraped.true.total()


def test_what_was_large_long_ago_gives_way():
    scraped = Scraped(10)
    for number in range(10):
        scraped.count(f"old-{number}", 1 << 20)
    for _ in range(20):
        scraped.now_ns += HALVE_NS
        for number in range(10):
            scraped.count(f"old-{number}", 1)  # it trickles on: it is not gone
        scraped.count("new", 1000)
    assert "new" in scraped.scrape()


@pytest.mark.parametrize("sizes", [(20,), (10, 10)], ids=["at once", "when the smallest is known"])
def test_whoever_had_exactly_half_as_much_keeps_its_place(sizes):
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


def test_a_series_that_lost_its_place_is_shown_for_so_long_and_no_longer():
    scraped = Scraped(1)
    scraped.count("a", 10)
    scraped.count("new", 21)
    begun_ns = scraped.now_ns
    scraped.now_ns = begun_ns + LEAVE_NS - 1
    assert set(scraped.scrape()) == {"a", "new"}
    scraped.now_ns = begun_ns + LEAVE_NS
    assert set(scraped.scrape()) == {"new"}


def test_places_that_nobody_took_are_not_saved_up():
    for limit, most in ((5, 1), (30, 3)):
        scraped = Scraped(limit)
        for number in range(limit):
            scraped.count(f"old-{number}", 1)
        scraped.now_ns += 4 * REPLACE_NS
        for number in range(limit):
            scraped.count(f"new-{number}", 100)
            scraped.count(f"new-{number}", 1)
        assert sum(key.startswith("new") for key in scraped.top.cells) == most


def test_halving_makes_nobody_larger_than_it_certainly_was():
    """A candidate that took the place of another may have had as much: that doubt is rounded up."""
    scraped = Scraped(1)
    scraped.count("a", 1_000_000)
    scraped.count("b", 7)
    scraped.count("c", 4)  # at least 4, at most 11: what b had may have been its own
    scraped.now_ns += HALVE_NS
    scraped.count("a", 0)
    scraped.top._sweep(scraped.now_ns)
    (candidate,) = scraped.top._candidates.values()
    assert (candidate.count, candidate.error) == (5, 4)


def test_keys_of_any_kind_are_candidates_side_by_side():
    """Topics have a name or an id, clients a pair: equal counts say nothing of which key is less."""
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
def test_nothing_is_lost_and_the_number_of_series_is_bounded(limit, steps):
    """Whatever comes: all series together hold all that was counted."""
    scraped = Scraped(limit)
    for key, size, pause_s in steps:
        scraped.now_ns += pause_s * SECOND
        scraped.scrape()
        scraped.count(key, size)
        scraped.scrape()
    assert scraped.total() == scraped.true.total()
    assert len(scraped.ever) <= scraped.most_ever()


def test_clients_that_are_connected_stay_and_those_that_left_make_room():
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


def test_a_place_is_taken_by_twice_as_much_and_a_bit_and_once_a_minute():
    """At times that are whole minutes: a tenth of the places may change at once, and one more each minute."""
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
def test_a_series_that_was_replaced_goes_on_for_five_minutes_and_then_begins_at_0(more_ns):
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
