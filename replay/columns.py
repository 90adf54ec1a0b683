"""Arrow columns as Python values, without a detour over one object per value where that can be avoided."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.recorder.files import Within
from schedscope.recorder.rows import Row

_FORMATS = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}


class Readable(Protocol):
    """A part of a log."""

    def table(self, name: str, columns: Sequence[str] | None = None, within: Within | None = None) -> pa.Table:
        """Its rows of a table."""


def rows_of(part: Readable, table: str, names: Sequence[str], within: Within | None = None) -> Iterable[Row]:
    """A part's rows of a table, these columns only."""
    return zip(*(values_of(column) for column in part.table(table, names, within).columns), strict=True)


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """What `to_pylist` gives, many times faster for numbers without nulls, and for texts that repeat."""
    if column.null_count:
        return list(column.to_pylist())
    if pa.types.is_string(column.type):
        values: list[Any] = []
        for chunk in column.dictionary_encode().chunks:
            texts = chunk.dictionary.to_pylist()
            values += map(texts.__getitem__, _numbers(chunk.indices, "i"))
        return values
    letter = _FORMATS.get(column.type)
    if letter is None:
        return list(column.to_pylist())
    return list(chain.from_iterable([_numbers(chunk, letter) for chunk in column.chunks]))


def packed_lists(column: pa.ChunkedArray) -> list[bytes]:
    """A column of lists of token ids, each list as packed tokens."""
    packed = []
    for chunk in column.chunks:
        data = memoryview(chunk.values.buffers()[1] or b"").cast("B")
        if sys.byteorder == "big":
            ids = array("i", data)
            ids.byteswap()
            data = memoryview(ids).cast("B")
        first = chunk.values.offset
        ends = [(first + offset) * TOKEN_BYTES for offset in values_of(pa.chunked_array([chunk.offsets]))]
        packed += [bytes(data[start:end]) for start, end in pairwise(ends)]
    return packed


def first_items(column: pa.ChunkedArray) -> list[int]:
    """The first id of each list; none may be empty."""
    return values_of(pc.list_element(column, 0))


def _numbers(chunk: pa.Array, letter: str) -> list[Any]:
    if not len(chunk):
        return []
    values: Any = memoryview(chunk.buffers()[1]).cast("B")
    found: list[Any] = values.cast(letter)[chunk.offset : chunk.offset + len(chunk)].tolist()
    return found
