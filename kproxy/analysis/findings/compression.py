"""Whether compression would pay: records at hand, compressed to see.

Bounds: SAMPLE records of a topic, of 1 MB together. Only whole values are representative: the table `records` has them
if it was made with `--record-values all`. Refuses to know findings.
"""

import zlib

from kproxy.analysis.engine import Frame, ask, rows
from kproxy.analysis.questions.pieces import literal

SAMPLE = 5000
MAX_BYTES = 1_000_000
MIN_BYTES = 10_000  # fewer give no reliable ratio
BATCH_BYTES = 16_384  # batch.size
LEVEL = 1  # of zlib: about what lz4 and snappy gain, less than zstd


def measured(records: Frame, topic: str) -> float | None:
    """How many times smaller batches of a topic's records become; None where there are too few whole ones."""
    sample = ask(
        {"records": records},
        whole=f"""
            select `key`, `value` from records
            where api = 'Produce' and direction = 'request' and coalesce(topic, topic_id) = {literal(topic)}
                and octet_length(`value`) = value_bytes and coalesce(octet_length(`key`) = key_bytes, true)
            order by `time`, connection, `number`, `partition`, `offset`, source limit {SAMPLE}""",
    )
    plain = compressed = 0
    batch = bytearray()
    for key, value in rows(sample):
        batch += bytes(key or b"") + bytes(value)
        if len(batch) >= BATCH_BYTES:
            plain, compressed = plain + len(batch), compressed + len(zlib.compress(batch, LEVEL))
            batch.clear()
        if plain >= MAX_BYTES:
            break
    if batch:
        plain, compressed = plain + len(batch), compressed + len(zlib.compress(batch, LEVEL))
    return plain / compressed if plain >= MIN_BYTES else None
