"""`python -m tests.fuzz.lenient sizes | bits`: compares a reader that is too lenient with Kafka's own classes.

A process of its own: plans are compiled once, and those of a lenient reader must not be left to other tests.
"""

import sys

from kproxy.protocol import plans, primitives
from kproxy.proxy.filters.policy.resources import _NamesPlan
from tests.fuzz.compare import compare

COUNT = 6000
SEED = 3


def skip_tags_by_their_sizes() -> None:
    """Tagged fields that the schema knows are skipped by the sizes in front of them, not read."""
    _NamesPlan.strict_tags = False


def read_more_than_32_bits() -> None:
    """Unsigned varints keep the bits that Java drops."""

    def uvarint(buffer: primitives.Buffer, pos: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (buffer[pos] & 127) << shift
            pos, shift = pos + 1, shift + 7
            if buffer[pos - 1] < 128:
                return value, pos

    plans.read_uvarint = uvarint


LENIENT = {"sizes": skip_tags_by_their_sizes, "bits": read_more_than_32_bits}

if __name__ == "__main__":
    LENIENT[sys.argv[1]]()
    compare(COUNT, seed=SEED)
