"""Points of a log: how far they reach back, how exact they are, and that they are few."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.metrics.consumers.marks import MAX_POINTS, MIN_SPACING_NS, Marks

S = 10**9


@pytest.mark.parametrize("per_second", [1, 20])
def test_an_hour_of_a_busy_log_is_known_to_a_quarter_of_its_age(per_second):
    marks = Marks()
    last = 2 * 3600 * per_second
    for number in range(last + 1):
        marks.add(number * 7, number * S // per_second, number * S // per_second)
        assert len(marks) <= MAX_POINTS
    now_ns = last * S // per_second
    for number in range(0, last, 101):
        age_ns = now_ns - number * S // per_second
        known_ns = now_ns - marks.latest_ns(number * 7 + 3)
        assert age_ns <= known_ns <= age_ns * 1.26 + 2 * MIN_SPACING_NS
    assert now_ns - marks.points()[0][1] > 3600 * S


@given(seed=st.integers(0, 2**32))
def test_an_answer_is_never_later_than_what_was_learned(seed):
    """Several readers of one log learn of it in any order; the points stay ascending and few."""
    dice = random.Random(seed)
    written = [0]
    for _ in range(400):
        written.append(written[-1] + dice.choice((0, 1, S // 10, S, 90 * S)))
    marks, learned = Marks(), {}
    for _ in range(600):
        offset = dice.randrange(len(written))
        marks.add(offset, written[offset], written[-1])
        learned[offset] = written[offset]
        points = marks.points()
        assert points == sorted(points) and [at for _, at in points] == sorted(at for _, at in points)
        assert len(points) <= MAX_POINTS
        asked = dice.randrange(len(written))
        best = max((at for each, at in learned.items() if each <= asked), default=None)
        answer = marks.latest_ns(asked)
        assert answer is None or answer <= best
    marks.clear()
    assert marks.latest_ns(10**6) is None


@pytest.mark.parametrize(
    ("time_ns", "now_ns", "is_kept"),
    [
        (10 * S + MIN_SPACING_NS - 1, 20 * S, False),
        (10 * S + MIN_SPACING_NS, 19 * S, True),
        (30 * S, 30 * S + 160 * S - 1, True),
        (30 * S, 30 * S + 160 * S, True),  # an eighth of its age
        (30 * S, 30 * S + 160 * S + 8, False),
        (9 * S, 20 * S, False),  # earlier than one before it: that one says more
    ],
)
def test_a_point_too_close_behind_another_one_is_left_out(time_ns, now_ns, is_kept):
    marks = Marks()
    marks.add(5, 10 * S, 10 * S)
    marks.add(6, time_ns, now_ns)
    assert marks.points() == [(5, 10 * S), *([(6, time_ns)] if is_kept else [])]


def test_a_point_replaces_the_later_offsets_that_are_not_later():
    marks = Marks()
    for offset, at_s in ((5, 10), (7, 20), (9, 30), (11, 40)):
        marks.add(offset, at_s * S, 40 * S)
    marks.add(6, 30 * S, 40 * S)
    assert marks.points() == [(5, 10 * S), (6, 30 * S), (11, 40 * S)]
    marks.add(6, 32 * S, 40 * S)  # the later time of the same offset counts
    assert [marks.latest_ns(offset) for offset in (4, 5, 6, 10, 11)] == [None, 10 * S, 32 * S, 32 * S, 40 * S]


def test_points_that_are_too_many_are_thinned_to_an_eighth_of_their_age():
    marks = Marks()
    for second in range(MAX_POINTS + 1):
        marks.add(second, second * S, second * S)
        assert len(marks) == second + 1 or second == MAX_POINTS
    times = [at for _, at in marks.points()]
    now_ns = MAX_POINTS * S
    naive = [0]
    for second in range(1, MAX_POINTS + 1):
        if second * S - naive[-1] >= max(MIN_SPACING_NS, (now_ns - second * S) // 8):
            naive.append(second * S)
    assert times == naive[-MAX_POINTS:]


def test_if_no_point_is_too_close_the_newest_ones_stay():
    """After weeks: a log whose newest points were dropped would never learn the age of new records."""
    ages_ns = [0]
    while len(ages_ns) < MAX_POINTS + 3:
        ages_ns.append(ages_ns[-1] + max(MIN_SPACING_NS, ages_ns[-1] // 8))
    now_ns = ages_ns[-1]
    times = [now_ns - age_ns for age_ns in reversed(ages_ns)]
    marks = Marks()
    for offset, time_ns in enumerate(times):
        marks.add(offset, time_ns, now_ns)
    assert marks.points() == [*enumerate(times)][-MAX_POINTS:]
