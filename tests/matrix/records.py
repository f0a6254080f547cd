"""The records of a case, and whether what came back is what was sent: every byte of them, in their order, each once."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

PARTITIONS = 3
_SIZES = (1, 2, 17, 100, 128, 1000, 1024, 4000, 16_384)
_LARGE = 150_000  # one of each codec: more than a read of a socket


def records(seed: int, codecs: Sequence[str], *, headers: bool, text: bool) -> list[dict[str, Any]]:
    """As drivers read them (clients/README.md). text: keys and headers as a command line can carry them."""
    chosen = random.Random(seed)
    found: list[dict[str, Any]] = []
    for codec in codecs:
        for number, size in enumerate((*_SIZES, _LARGE)):
            key: bytes | None = None
            if number % 4:
                key = f"key-{chosen.randrange(99)}".encode() if text else chosen.randbytes(chosen.randrange(1, 40))
            pairs: list[list[str]] = []
            if headers:
                contents = [b"text-%d" % number] if text else [chosen.randbytes(9), b"\x00\xff"][: number % 3]
                pairs = [[f"name-{place}", content.hex()] for place, content in enumerate(contents)]
            # half of it is repetition, so that codecs have something to do
            value = chosen.randbytes(size - size // 2) + b"again " * (size // 12)
            found.append(
                {
                    "partition": number % PARTITIONS,
                    "codec": codec,
                    "key": None if key is None else key.hex(),
                    "value": value.hex(),
                    "headers": pairs,
                }
            )
    return found


def fault(
    sent: Sequence[dict[str, Any]], received: Sequence[dict[str, Any]], *, ordered: bool, dense: bool
) -> str | None:
    """What is wrong with what was consumed, or None.

    ordered: the records of a partition come in the order in which they were sent to it; else at all, each once. dense:
    their offsets count up without holes.
    """

    def content(record: dict[str, Any]) -> tuple[Any, ...]:
        return record["key"], record["value"], tuple(map(tuple, record["headers"]))

    for part in (1, 2):
        if not any(record["part"] == part for record in received):
            return f"member {part} of the group consumed nothing"
    if not ordered:
        wanted, found = Counter(map(content, sent)), Counter(map(content, received))
        return None if wanted == found else f"{(wanted - found).total()} lost, {(found - wanted).total()} too many"
    for partition in range(PARTITIONS):
        there = [record for record in received if record["partition"] == partition]
        due = [content(record) for record in sent if record["partition"] == partition]
        came = [content(record) for record in there]
        if came != due:
            missing, extra = Counter(due) - Counter(came), Counter(came) - Counter(due)
            return f"partition {partition}: {missing.total()} lost, {extra.total()} too many, or out of order"
        offsets = [record["offset"] for record in there]
        if offsets != (list(range(len(due))) if dense else sorted(set(offsets))):
            return f"partition {partition}: offsets {offsets}"
    return None
