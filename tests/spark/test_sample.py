"""The generated capture, whole and split into parts like a large one."""

import pyarrow.parquet as pq

from kproxy.capture.formats import splits
from kproxy.convert.processes import convert
from kproxy.spark import sample


def test_the_sample_is_a_valid_capture_with_several_splits(tmp_path):
    capture = tmp_path / "sample.pcapng"
    sample.write(capture)
    assert len(splits.ranges(str(capture), sample.SPLIT_BYTES)) > 2
    summary = convert([capture], tmp_path / "tables", processes=1)
    assert not summary.failed
    rows = pq.read_table(tmp_path / "tables" / "exchanges")
    assert rows.num_rows == sample.EXCHANGES and set(rows["api"].to_pylist()) == {"ApiVersions"}
