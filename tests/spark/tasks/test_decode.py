"""The function of a decoding task, called without Spark."""

from pathlib import Path

from kproxy.convert.job import Settings, captures_of
from kproxy.spark.tasks import decode, pieces
from tests.captures import capture, expected


def test_an_unreadable_capture_does_not_affect_others_of_its_task(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pcap"
    nothing.write_bytes(b"nothing")
    paths = [capture("k0102_sasl_plain"), nothing, capture("k41_sasl_plain")]
    found = [row for batch in decode.whole([*enumerate(captures_of(paths, Settings()))]) for row in batch.to_pylist()]
    assert [row["capture"] for row in found if row["kind"] == pieces.FAILED] == [1]
    counted = [row["capture"] for row in found if row["kind"] == pieces.COUNTS]
    assert counted == [0, 2]
    rows = sum(row["count"] for row in found if row["kind"] == "exchanges")
    assert rows == sum(len(expected(path.stem)) for path in paths if path != nothing)
