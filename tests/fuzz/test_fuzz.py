"""In short what `./dev fuzz` does a million times: kproxy reads requests as Kafka's own classes do, or refuses."""

from collections.abc import Callable

import pytest

from kproxy.protocol import primitives
from kproxy.proxy.access.policy_resources import _NamesPlan, reader
from tests.fuzz.compare import compare
from tests.fuzz.mutations import KEYS, MUTATIONS

COUNT = 6000


def test_names_are_read_as_kafka_reads_them_or_the_request_is_refused() -> None:
    seen = compare(COUNT, seed=3)
    assert seen["requests"] == COUNT
    assert seen["read by both"] > COUNT * 0.3, seen  # compared name by name
    assert seen["first fields read by both"] > COUNT * 0.3, seen
    assert min(seen["peeked, True"], seen["peeked, False"]) > COUNT * 0.005, seen
    assert seen["refused by both"] > COUNT * 0.3, seen
    assert seen["refused by kproxy alone"] > COUNT * 0.02, seen  # where a broker's reading can be another one
    assert sum(name.startswith("api ") for name in seen) > len(set(KEYS)) * 0.8, seen
    assert all(seen[f"read, {name}"] + seen[f"refused, {name}"] > COUNT * 0.002 for name in MUTATIONS), seen
    # Names that only one of two readings has.
    assert min(seen["refused, hide"], seen["refused, alias"]) > 10 and not seen["read, hide"] + seen["read, alias"], (
        seen
    )
    assert min(seen[f"replaced, {what}"] for what in ("Fetch", "Metadata", "cursor")) > 10, seen


def _by_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_NamesPlan, "strict_tags", False)


def _beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def uvarint(buffer: primitives.Buffer, pos: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (buffer[pos] & 127) << shift
            pos, shift = pos + 1, shift + 7
            if buffer[pos - 1] < 128:
                return value, pos

    monkeypatch.setattr("kproxy.protocol.plans.read_uvarint", uvarint)


@pytest.mark.parametrize(("lenient", "mutation"), [(_by_sizes, "hide"), (_beyond_32_bits, "alias")])
def test_a_lenient_reader_is_found_out(
    lenient: Callable[[pytest.MonkeyPatch], None], mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tagged fields skipped by their sizes; tags of more bits than Java reads."""
    lenient(monkeypatch)
    reader.cache_clear()
    try:
        with pytest.raises(AssertionError, match=rf"{mutation}.*Kafka reads"):
            compare(COUNT, seed=3)
    finally:
        reader.cache_clear()
