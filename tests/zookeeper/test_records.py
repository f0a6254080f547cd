"""Records that are written are read back, by the layouts of the official jars; truncated or random bytes are
Malformed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.zookeeper.records import layouts, names_of, read, write

RECORDS = sorted(layouts()["records"])

_VALUES = {
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "long": st.integers(-(1 << 63), (1 << 63) - 1),
    "bool": st.booleans(),
    "string": st.none() | st.text(max_size=20),
    "buffer": st.none() | st.binary(max_size=20),
}


def values(kind):
    if kind in _VALUES:
        return _VALUES[kind]
    if kind.startswith("[]"):
        return st.none() | st.lists(values(kind.removeprefix("[]")), max_size=4)
    return st.fixed_dictionaries({name: values(inner) for name, inner in layouts()["records"][kind]})


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("record", RECORDS)
@given(data=st.data())
def test_records_are_read_back_and_truncated_ones_are_malformed(record, data):
    given_values = data.draw(values(record))
    written = write(record, given_values)
    assert read(record, memoryview(written), 0) == (given_values, len(written))
    if written:
        with pytest.raises(Malformed):
            read(record, memoryview(written)[: data.draw(st.integers(0, len(written) - 1))], 0)


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("record", RECORDS)
@given(noise=st.binary(max_size=200))
def test_noise_is_malformed_or_a_record(record, noise):
    try:
        _, end = read(record, memoryview(noise), 0)
    except Malformed:
        return
    assert end <= len(noise)


def test_a_value_that_a_field_cannot_have_is_malformed():
    for wrong in ({"xid": 1 << 40, "type": 1}, {"xid": 1}, {"xid": "one", "type": 1}):
        with pytest.raises(Malformed):
            write("RequestHeader", wrong)


def test_numbers_have_their_names():
    assert names_of("operations")[14] == "multi"
    assert names_of("errors")[-101] == "NONODE"
    assert names_of("event_types")[4] == "NodeChildrenChanged"
