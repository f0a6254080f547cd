import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.protocol import primitives

FORMS = {
    "uvarint": (primitives.read_uvarint, primitives.write_uvarint, st.integers(0, 2**32 - 1), 5),
    "varint": (primitives.read_varint, primitives.write_varint, st.integers(-(2**31), 2**31 - 1), 5),
    "varlong": (primitives.read_varlong, primitives.write_varlong, st.integers(-(2**63), 2**63 - 1), 10),
}


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_what_is_written_is_read(form: str, data: st.DataObject) -> None:
    read, write, values, longest = FORMS[form]
    value = data.draw(values)
    written = write(value)
    assert len(written) <= longest
    assert read(b"xx" + written + b"y", 2) == (value, 2 + len(written))
    for cut in range(len(written)):
        with pytest.raises(Malformed):
            read(written[:cut], 0)


@pytest.mark.parametrize("form", FORMS)
def test_a_varint_without_end_is_malformed(form: str) -> None:
    read, _, _, longest = FORMS[form]
    with pytest.raises(Malformed):
        read(b"\xff" * 20, 0)
    with pytest.raises(Malformed):
        read(b"\x80" * longest + b"\0", 0)
    read(b"\x80" * (longest - 1) + b"\0", 0)  # needlessly long, as readers of Kafka's accept it


def test_a_varint_beyond_32_bits_is_malformed_since_java_drops_the_bits_above() -> None:
    for fifth in (16, 32, 127):
        with pytest.raises(Malformed, match="32 bits"):
            primitives.read_uvarint(b"\x81\x80\x80\x80" + bytes((fifth,)), 0)
    assert primitives.read_uvarint(b"\xff\xff\xff\xff\x0f", 0) == (2**32 - 1, 5)


def test_known_forms() -> None:
    assert primitives.write_uvarint(300) == b"\xac\x02"
    assert primitives.write_varint(-1) == b"\x01"
    assert primitives.write_varint(64) == b"\x80\x01"
    with pytest.raises(Malformed):
        primitives.write_uvarint(2**32)


def test_skip_tags() -> None:
    section = b"\x02\x00\x01a\x05\x02bc"
    assert primitives.skip_tags(b"z" + section + b"more", 1, 1 + len(section) + 4) == 1 + len(section)
    for cut in range(len(section)):
        with pytest.raises(Malformed):
            primitives.skip_tags(section, 0, cut)
    with pytest.raises(Malformed):
        primitives.skip_tags(b"\xff\xff\xff\xff\x0f" + b"\0" * 100, 0, 105)


@pytest.mark.parametrize("tag", [0, 127, 128, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 127, 128, 300])
def test_tagged_fields_of_any_number_and_size_are_skipped(tag: int, size: int) -> None:
    field = primitives.write_uvarint(tag) + primitives.write_uvarint(size) + b"\xff" * size
    for count in (1, 2, 127, 128):
        section = primitives.write_uvarint(count) + field * count
        for behind in (b"", b"more"):
            assert primitives.skip_tags(section + behind, 0, len(section)) == len(section)
        with pytest.raises(Malformed):
            primitives.skip_tags(section, 0, len(section) - 1)


def test_the_ends_of_an_unsigned_varint() -> None:
    assert [len(primitives.write_uvarint(value)) for value in (0, 127, 128, 16383, 16384, 2**32 - 1)] == [
        1,
        1,
        2,
        2,
        3,
        5,
    ]
    for value in (-1, 2**32):
        with pytest.raises(Malformed, match=f"{value} does not fit"):
            primitives.write_uvarint(value)
