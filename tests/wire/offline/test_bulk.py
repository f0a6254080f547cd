"""Topics of columns have one number in all columns that share the numbers."""

from uuid import UUID

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kproxy.wire.offline.bulk import Bodies

TOPICS = [("a", None), ("b", None), ("a", UUID(int=3)), (None, UUID(int=1)), (None, UUID(int=2)), (None, None)]
Rows = list[tuple[str | None, UUID | None]]
ROWS = st.lists(st.sampled_from(TOPICS), max_size=6)

NONE = np.zeros(0, np.int64)


@given(ROWS, ROWS)
def test_a_topic_has_one_number_by_its_name_or_else_its_id(first: Rows, second: Rows) -> None:
    keys: dict[str | UUID | None, int] = {}
    for rows in (first, second):
        topics = list(dict.fromkeys(rows))
        topic = np.array([topics.index(row) for row in rows], np.int64)
        numbers = Bodies(np.arange(len(rows)), topics, topic, {}, {}, NONE, NONE).topic_keys(keys).tolist()
        assert [list(keys)[number] for number in numbers] == [name or id_ for name, id_ in rows]
    assert sorted(keys.values()) == list(range(len(keys)))
