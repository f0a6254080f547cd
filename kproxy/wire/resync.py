"""Finding the next plausible frame in a side of a capture that lost its framing.

A request is believed by its looks (size, known key and version, printable client id), an answer by the correlation id
of a request that waits; either needs a second witness: it ends where the bytes end, the next frame is as plausible, or
it opens a segment. Never guesses: what cannot be witnessed is skipped, and the session says how much.

Refuses to know connections and events.
"""

import re
from collections.abc import Set

from kproxy.wire import frames

WINDOW = 2048  # bytes kept from one segment to the next: a header may lie across several tiny ones
CANDIDATES = 256  # waiting requests whose answer is looked for: the oldest

# size < 16 MiB, key < 256, version < 32, a client id that is null or shorter than 512: all big-endian.
_REQUEST = re.compile(rb"(?s)(?=\x00.{3}\x00.\x00[\x00-\x1f].{4}(?:\xff\xff|[\x00\x01]))")


def find_request(data: bytes, segment: int) -> int:
    """Where a request begins in `data`, whose newest segment starts at `segment`; -1: nowhere yet."""
    end = len(data)
    for match in _REQUEST.finditer(data):
        pos = match.start()
        if not frames.plausible_request(data, pos, end):
            continue
        after = pos + 4 + int.from_bytes(data[pos : pos + 4])
        if after == end or (after > end and pos in (0, segment)):
            return pos
        if after < end and frames.plausible_request(data, after, end):
            return pos
    return -1


def find_answer(data: bytes, segment: int, waiting: Set[int]) -> int:
    """Where the answer to one of the waiting correlation ids begins; -1: nowhere yet."""
    end = len(data)
    best = -1
    for correlation_id in waiting:
        pattern = correlation_id.to_bytes(4, signed=True)
        at = data.find(pattern, 4)
        while at >= 0:
            pos = at - 4
            if (best < 0 or pos < best) and _answers(data, pos, end, segment, waiting):
                best = pos
                break
            at = data.find(pattern, at + 1)
    return best


def _answers(data: bytes, pos: int, end: int, segment: int, waiting: Set[int]) -> bool:
    size = int.from_bytes(data[pos : pos + 4], signed=True)
    if size < frames.MIN_RESPONSE:
        return False
    after = pos + 4 + size
    if after >= end:
        return after == end or pos in (0, segment)
    return end - after >= 8 and int.from_bytes(data[after + 4 : after + 8], signed=True) in waiting
