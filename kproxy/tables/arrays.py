"""Arrow arrays from their buffers, and numbers out of them.

Duty: what `pa.array` and `to_numpy` do for the few types that the tables have. Those import pandas, where that is
installed, to see whether they were given a series: a quarter of a second and 50 MB for every process that converts or
records. `fill_null` and `pa.scalar` of a plain number do so too.

Refuses to know tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_NEAR = 1 << 16


def array(kind: pa.DataType, values: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Numbers, times or flags; null where `missing` says so."""
    if pa.types.is_boolean(kind):
        data = _bits(values.astype(bool))
    elif pa.types.is_timestamp(kind):
        data = pa.py_buffer(np.ascontiguousarray(values, np.int64))
    else:
        data = pa.py_buffer(np.ascontiguousarray(values, kind.to_pandas_dtype()))
    validity = None if missing is None or not missing.any() else _bits(~missing)
    return pa.Array.from_buffers(kind, len(values), [validity, data])


def listed(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Strings, bytes, numbers, times, flags, or sequences of such, as a list, with None for null."""
    missing = np.fromiter((value is None for value in values), bool, len(values))
    if pa.types.is_list(kind):
        ends = np.zeros(len(values) + 1, np.int32)
        np.cumsum([0 if value is None else len(value) for value in values], out=ends[1:])
        elements = listed(kind.value_type, [each for value in values if value is not None for each in value])
        buffers = [_bits(~missing) if missing.any() else None, pa.py_buffer(ends)]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[elements])
    if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        numbers = np.fromiter((0 if value is None else value for value in values), np.int64, len(values))
        return array(kind, numbers, missing)
    texts = [
        b"" if value is None else value if isinstance(value, bytes) else value.encode(errors="replace")
        for value in values
    ]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    validity = _bits(~missing) if missing.any() else None
    return pa.Array.from_buffers(kind, len(texts), [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))])


def numbers(column: pa.Array | pa.ChunkedArray, null: int) -> np.ndarray:
    """The integers of a column, with `null` for those that are missing."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    validity, data = whole.buffers()
    begin, count = whole.offset, len(whole)
    if not count:
        return np.zeros(0, np.int64)
    values = np.frombuffer(data, whole.type.to_pandas_dtype(), begin + count)[begin:]
    if not whole.null_count:
        return values
    valid = np.unpackbits(np.frombuffer(validity, np.uint8), count=begin + count, bitorder="little")[begin:]
    return np.where(valid.view(bool), values, null)


def nulls(column: pa.Array) -> np.ndarray:
    """Where the values of a column are missing."""
    if not column.null_count:
        return np.zeros(len(column), bool)
    validity = np.frombuffer(column.buffers()[0], np.uint8)
    there = np.unpackbits(validity, count=column.offset + len(column), bitorder="little")[column.offset :]
    return ~there.view(bool)


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different numbers, in order, and which of them each one is. Near ones, as most are, need no sorting."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low >= _NEAR:
        numbers, index = np.unique(values, return_inverse=True)
        return numbers, index
    seen = np.zeros(high - low + 1, bool)
    seen[values - low] = True
    return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[values - low]


def batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as a batch; what a row does not name is null."""
    return pa.RecordBatch.from_arrays(
        [listed(field.type, [row.get(field.name) for row in rows]) for field in schema], schema=schema
    )


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
