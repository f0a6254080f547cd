"""Arrays built from buffers equal those that Arrow builds itself; pandas is not imported."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kproxy.tables import arrays
from kproxy.tables.schema import FLAG, I16, I32, I64, TEXT, TIME

VALUES = {
    I16: st.integers(-(1 << 15), (1 << 15) - 1),
    I32: st.integers(-(1 << 31), (1 << 31) - 1),
    I64: st.integers(-(1 << 63), (1 << 63) - 1),
    TIME: st.integers(0, 1 << 52),
    FLAG: st.booleans(),
    TEXT: st.text(),
}


@given(st.data(), st.sampled_from(list(VALUES)))
def test_lists_become_the_same_arrays_as_with_arrow(data, kind):
    values = data.draw(st.lists(st.none() | VALUES[kind], max_size=40))
    made = arrays.listed(kind, values)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))


@given(st.data(), st.sampled_from([I16, I32, I64, TIME, FLAG]))
def test_numpy_arrays_become_the_same_arrays_as_with_arrow(data, kind):
    values = np.array(data.draw(st.lists(VALUES[kind], min_size=1, max_size=40)), np.int64)
    missing = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    made = arrays.array(kind, values, missing)
    made.validate(full=True)
    want = pa.array([None if gone else value for value, gone in zip(values.tolist(), missing, strict=True)])
    assert made.equals(want.cast(kind) if want.type != pa.null() else pa.nulls(len(values), kind))
    assert arrays.array(kind, values).null_count == 0


def test_rows_become_a_batch():
    schema = pa.schema([("text", TEXT), ("flag", FLAG), ("number", I32)])
    rows = [{"text": "a", "flag": True, "number": 3}, {"text": None}, {"flag": False, "number": -1, "text": "\udcff"}]
    assert arrays.batch(schema, rows).to_pylist() == [
        {"text": "a", "flag": True, "number": 3},
        {"text": None, "flag": None, "number": None},
        {"text": "?", "flag": False, "number": -1},
    ]
    assert arrays.batch(schema, []).num_rows == 0


@given(st.data(), st.sampled_from([I16, I32, I64]))
def test_numbers_are_read_back_as_arrow_returns_them(data, kind):
    values = data.draw(st.lists(st.none() | VALUES[kind], max_size=40))
    begin = data.draw(st.integers(0, len(values)))
    for column in (pa.array(values, kind), pa.chunked_array([pa.array(values, kind)])):
        found = arrays.numbers(column.slice(begin), -1)
        assert found.tolist() == [-1 if value is None else value for value in values[begin:]]


def test_a_conversion_imports_no_more_than_it_needs(tmp_path):
    """Imports cost CPU time: pandas 0.25 s; crc32c's lookup of its own version and a hidden progress bar 0.02 s
    each."""
    from tests import captures

    code = f"""
import sys
from kproxy.cli import main
sys.argv = ["kproxy", "convert", "--quiet", {str(captures.capture("k41_midstream"))!r}, "--out", {str(tmp_path)!r}]
try:
    main()
except SystemExit as end:
    assert not end.code
unneeded = {{"crc32c", "duckdb", "importlib.metadata", "pandas", "pydantic", "rich.progress"}}
sys.exit(", ".join(unneeded & set(sys.modules)) or None)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
