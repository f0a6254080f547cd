"""Columns of bodies that are joined or thinned out hold the rows that their exchanges had, batches included."""

from typing import Any
from uuid import UUID

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kproxy.wire.bulk import NULL, Bodies

TOPICS = [("a", None), ("b", None), (None, UUID(int=1)), (None, UUID(int=2)), (None, None)]
ROW = st.tuples(
    st.sampled_from(TOPICS),
    st.sampled_from((NULL, -1, 0, 7)),
    st.sampled_from((None, "x", "y")),
    st.lists(st.integers(0, 9), max_size=2),  # its batches
)
EXCHANGES = st.lists(st.lists(ROW, max_size=3), min_size=1, max_size=5)
Rows = list[list[tuple[Any, ...]]]  # by exchange


def columns(rows: Rows, texts: bool) -> Bodies:
    flat = [(number, *row) for number, exchange in enumerate(rows) for row in exchange]
    topics = list(dict.fromkeys(row[1] for row in flat))
    return Bodies(
        np.array([row[0] for row in flat], np.int64),
        topics,
        np.array([topics.index(row[1]) for row in flat], np.int64),
        {"offset": np.array([row[2] for row in flat], np.int64)},
        {"group_id": [row[3] for row in flat]} if texts else {},
        np.array([place for place, row in enumerate(flat) for _ in row[4]], np.int64),
        np.array([batch for row in flat for batch in row[4]], np.int64),
    )


def rows_of(bodies: Bodies) -> list[tuple[Any, ...]]:
    """(exchange, topic, number, text, batches) of each row."""
    texts = bodies.texts.get("group_id", [None] * len(bodies.of))
    return [
        (
            int(exchange),
            bodies.topics[int(bodies.topic[place])],
            int(bodies.numbers["offset"][place]),
            texts[place],
            bodies.batches[bodies.batch_of == place].tolist(),
        )
        for place, exchange in enumerate(bodies.of)
    ]


@given(st.lists(st.tuples(EXCHANGES, st.booleans()), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_bodies_together_are_ordered_by_exchange(parts: list[tuple[Rows, bool]], chance: Any) -> None:
    """Each part has texts or none, and its exchanges lie anywhere among those of the others, in their order."""
    numbers = list(range(sum(len(rows) for rows, _ in parts)))
    chance.shuffle(numbers)
    given, expected = [], {}
    for rows, texts in parts:
        mine = sorted(numbers.pop() for _ in rows)
        given.append((columns(rows, texts), np.array(mine, np.int64)))
        for number, exchange in zip(mine, rows, strict=True):
            expected[number] = [(number, *row[:2], row[2] if texts else None, row[3]) for row in exchange]
    together = Bodies.together(given)
    assert rows_of(together) == [row for number in sorted(expected) for row in expected[number]]
    assert (np.diff(together.batch_of) >= 0).all()


@given(EXCHANGES, st.data())
def test_some_of_the_exchanges_are_counted_from_0(rows: Rows, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    left = [exchange for exchange, is_chosen in zip(rows, chosen, strict=True) if is_chosen]
    some = columns(rows, True).some(np.array(chosen))
    assert rows_of(some) == [(number, *row) for number, exchange in enumerate(left) for row in exchange]


@given(EXCHANGES, EXCHANGES)
def test_a_topic_has_one_number_by_its_name_or_else_its_id(first: Rows, second: Rows) -> None:
    keys: dict[str | UUID | None, int] = {}
    for rows in (first, second):
        names = [name or id_ for exchange in rows for (name, id_), *_ in exchange]
        numbers = columns(rows, False).topic_keys(keys).tolist()
        assert [list(keys)[number] for number in numbers] == names
    assert sorted(keys.values()) == list(range(len(keys)))
