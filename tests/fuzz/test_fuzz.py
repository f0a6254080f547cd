"""A short run of `./dev fuzz`: kproxy reads requests like Kafka's own classes, or refuses them."""

import re
import subprocess
import sys

import pytest

from tests.fuzz.compare import compare
from tests.fuzz.lenient import COUNT, SEED
from tests.fuzz.mutations import KEYS, MUTATIONS
from tests.project import ROOT


def test_names_are_read_as_kafka_reads_them_or_the_request_is_refused() -> None:
    seen = compare(COUNT, seed=SEED)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("lenient", "mutation"), [("sizes", "hide"), ("bits", "alias")])
def test_a_lenient_reader_is_detected(lenient: str, mutation: str) -> None:
    """Tagged fields skipped by their sizes; tags of more bits than Java reads."""
    command = [sys.executable, "-m", "tests.fuzz.lenient", lenient]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    said = done.stderr.rstrip().rpartition("\n")[2]
    assert re.match(rf"AssertionError: \w+ v\d+, {mutation}, .*Kafka", said), done.stderr
