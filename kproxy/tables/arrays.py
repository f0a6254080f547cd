"""Arrow arrays from buffers, and numpy arrays of numbers from Arrow arrays.

Duty: replaces `pa.array` and `to_numpy` for the few types of the tables. These import pandas, if it is installed, to
check whether their argument is a series: a quarter of a second and 50 MB in every process that converts or records.
`fill_null` and `pa.scalar` of a plain number do so too.

Does not depend on the tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_NEAR = 1 << 16


def array(kind: pa.DataType, values: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Return an array of numbers, times or flags; null where `missing` is true."""
    if pa.types.is_boolean(kind):
        data = _bits(values.astype(bool))
    elif pa.types.is_timestamp(kind):
        data = pa.py_buffer(np.ascontiguousarray(values, np.int64))
    else:
        data = pa.py_buffer(np.ascontiguousarray(values, kind.to_pandas_dtype()))
    validity = None if missing is None or not missing.any() else _bits(~missing)
    return pa.Array.from_buffers(kind, len(values), [validity, data])


def listed(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Return an array of a list of strings, bytes, numbers, times, flags, or sequences of them; None becomes null."""
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
    """Return the integers of a column, with the value `null` in place of nulls."""
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
    """Return a flag for each row of a column: true if its value is null."""
    if not column.null_count:
        return np.zeros(len(column), bool)
    validity = np.frombuffer(column.buffers()[0], np.uint8)
    there = np.unpackbits(validity, count=column.offset + len(column), bitorder="little")[column.offset :]
    return ~there.view(bool)


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (distinct values in order, index of each value in them). A range below _NEAR needs no sorting."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low >= _NEAR:
        numbers, index = np.unique(values, return_inverse=True)
        return numbers, index
    seen = np.zeros(high - low + 1, bool)
    seen[values - low] = True
    return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[values - low]


def batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return rows as a batch; columns that a row lacks are null."""
    return pa.RecordBatch.from_arrays(
        [listed(field.type, [row.get(field.name) for row in rows]) for field in schema], schema=schema
    )


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
