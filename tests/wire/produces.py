"""Records of Produce requests for tests."""

import random

from kproxy.protocol.compression import GZIP, NONE
from kproxy.protocol.records import Record, write_batch, write_message_set


def records(chance: random.Random) -> bytes | None:
    """A records field: mostly one batch or two of magic 2; also other batches, and bytes that are none."""
    some = [Record(number, 1, None, bytes(chance.choice((10, 100, 1000)))) for number in range(chance.randint(1, 4))]
    kind = chance.choices(("one", "two", "control", "old", "cut", "none", "zeros"), (40, 10, 1, 1, 1, 1, 1))[0]
    if kind in ("none", "zeros"):
        return None if kind == "none" else bytes(chance.choice((0, 70)))
    if kind == "old":
        return write_message_set(some, magic=1)
    batch = write_batch(some, codec=chance.choice((NONE, GZIP)), is_transactional=chance.random() < 0.2)
    if kind == "control":
        return write_batch(some[:1], is_control=True)
    return {"one": batch, "two": 2 * batch, "cut": batch + batch[:80]}[kind]
