"""Kept frames: the bytes that count towards the limit of their table in memory."""

from types import SimpleNamespace

from kproxy.convert.kept_frames import KeptFrameColumns
from kproxy.tables.names import Names
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import NONE, Exchange
from kproxy.wire.interest import Interest

INFO = ConnectionInfo("demo", "a.pcap", "10.0.0.7", 5000, "10.0.0.1", 9092, 1, 0)
HEARTBEAT = Interest().plan(12 << 16 | 4)


def exchange(request, response):
    made = Exchange(HEARTBEAT, 7, 0, 0, 100, 1)
    made.request_end, made.response_start = 2, NONE if response is None else 3
    made.request_frame, made.response_frame = request, response
    return made


def test_requests_responses_and_batches_count_until_they_are_returned():
    """A response may be much larger than its request: uncounted ones would exceed any limit of memory."""
    kept = KeptFrameColumns(Names())
    kept.append(INFO, exchange(None, b"no frames were kept"))
    assert (kept.rows, kept.size) == (0, 0)
    kept.append(INFO, exchange(b"q" * 1000, None))
    of_a_row = kept.size - 1000
    assert of_a_row >= 0
    kept.append(INFO, exchange(b"q" * 1000, b"a" * 50_000))
    assert kept.size == 2 * of_a_row + 52_000
    logged = [
        SimpleNamespace(topic="__consumer_offsets", topic_id=None, partition=3, copy=copy)
        for copy in (None, SimpleNamespace(data=b"b" * 7000))
    ]
    kept.append_logged(INFO, exchange(b"", b""), logged)
    assert (kept.rows, kept.size) == (3, 3 * of_a_row + 59_000)
    rows = kept.batch().to_pylist()
    assert [(row["at_ns"], row["response_start"]) for row in rows] == [(2, 0), (3, 3), (3, 3)]
    assert [len(row["request"] or b"") for row in rows] == [1000, 1000, 0]
    assert (kept.rows, kept.size) == (0, 0)
