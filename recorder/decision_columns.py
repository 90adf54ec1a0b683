"""Decisions as Arrow columns, many passes at once.

A pass tells what it knows in the order of its queue before sorting. Here Arrow sorts it, and repeats what is the same
in all rows of a pass, so that in Python next to nothing is done for each of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, chain, compress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.dedup import Duplicate
from schedscope.recorder.rows import NOT_LOOKED_AT, Decided, Row, key_texts, said


class DecisionColumns:
    """The columns of `decisions` but the rank, pass by pass.

    What a pass told is packed when it comes: it need not stay, and all of it is close at hand then.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._counts: list[int] = []
        self._chunks: list[int] = []
        """Rows of continuing chunks, one or none; they come first."""
        self._names: list[str | None] = []
        self._rids: list[str | list[str]] = []
        """Of a pass, joined by line breaks where no rid has one."""
        self._keys: list[bytes | list[str | None]] = []
        """Of a pass, packed where a key is an integer, or as texts."""
        self._positions: list[bytes] = []
        self._prefix_lens: list[bytes] = []
        self._matched: list[bytes] = []
        self._duplicates: list[Sequence[Duplicate | None] | None] = []
        self._said: list[Row] = []
        self._said_of: list[int] = []
        """The row that each is about."""
        self.rows = 0

    def add(self, number: int, told: Decided) -> None:
        """Append a pass."""
        rids, waiting, count = told.rids, len(told.rids), told.count
        chunk = count - waiting
        prefix_lens, matched, duplicates = told.prefix_lens, told.matched, told.duplicates
        if chunk:
            rids, prefix_lens, matched = [told.verdicts[0].rid, *rids], [0, *prefix_lens], [0, *matched]
            duplicates = [None, *duplicates]
        joined = "\n".join(rids)
        self._numbers.append(number)
        self._counts.append(count)
        self._chunks.append(chunk)
        self._names.append(None if told.names is None else ",".join(told.names))
        self._rids.append(joined if joined.count("\n") == count - 1 else list(rids))
        self._keys.append(_keys(told, chunk))
        self._positions.append(_packed([-1, *told.positions] if chunk else told.positions))
        self._prefix_lens.append(_packed(prefix_lens))
        self._matched.append(_packed(matched))
        self._duplicates.append(duplicates if any(duplicates) else None)
        self._said += map(said, told.verdicts)
        self._said_of += [self.rows + place for place in told.places()]
        self.rows += count

    @property
    def counts(self) -> dict[int, int]:
        """Rows of each pass."""
        return dict(zip(self._numbers, self._counts, strict=True))

    def arrays(self, types: Sequence[pa.DataType]) -> list[pa.Array]:
        """All of it.

        Args:
            types: of the columns.
        """
        *starts, rows = accumulate(self._counts, initial=0)
        of = _repeated(self._counts)
        start, skip = _integers(starts).take(of), _integers(self._chunks).take(of)
        after = pc.subtract(pc.subtract(_integers(range(rows)), start), skip)
        before = _unpacked(self._positions)
        source = pc.add(pc.add(before, skip), start)
        """Where the request of each row stands in what the passes told."""
        of_queue = of
        if any(self._chunks):
            waits = pc.greater_equal(after, 0)
            before, after, of_queue = (pc.if_else(waits, column, None) for column in (before, after, of))
        columns = [
            _integers(self._numbers).take(of),
            self._rid_texts().take(source),
            before,
            after,
            self._key_texts().take(source),
            pa.array(self._names, pa.string()).take(of_queue),
            _unpacked(self._prefix_lens).take(source),
            _unpacked(self._matched).take(source),
        ]
        columns += [column.take(source) for column in self._held(types[8:11])]
        columns += self._verdicts(types[11:])
        return [column.cast(type_) for column, type_ in zip(columns, types, strict=True)]

    def _rid_texts(self) -> pa.Array:
        if all(isinstance(each, str) for each in self._rids):
            texts = [each for each, count in zip(self._rids, self._counts, strict=True) if count]
            return pc.split_pattern(pa.array(["\n".join(texts)]), "\n").values  # type: ignore[arg-type]
        lists = [each.split("\n") if isinstance(each, str) else each for each in self._rids]
        return pa.array(chain.from_iterable(compress(lists, self._counts)), pa.string())

    def _key_texts(self) -> pa.Array:
        """Before sorting."""
        if all(isinstance(each, bytes) for each in self._keys):
            # Many are the same.
            distinct = _unpacked(self._keys).dictionary_encode()  # type: ignore[arg-type]
            return pa.array(key_texts([distinct.dictionary.to_pylist()]), pa.string()).take(distinct.indices)
        texts = [key_texts([_unpacked([each]).to_pylist()]) if isinstance(each, bytes) else each for each in self._keys]
        return pa.array(chain.from_iterable(texts), pa.string())

    def _held(self, types: Sequence[pa.DataType]) -> list[pa.Array]:
        """What is said of duplicates, before sorting."""
        if not any(self._duplicates):
            return [pa.repeat(pa.scalar(False), self.rows), *(pa.nulls(self.rows, type_) for type_ in types[1:])]
        none = (False, None, None)
        facts: list[Row] = []
        for held, count in zip(self._duplicates, self._counts, strict=True):
            facts += [none] * count if held is None else [none if each is None else (True, *each) for each in held]
        return [pa.array(column, type_) for column, type_ in zip(zip(*facts, strict=True), types, strict=True)]

    def _verdicts(self, types: Sequence[pa.DataType]) -> list[pa.Array]:
        """What was said of those whom a pass looked at."""
        values = [*self._said, NOT_LOOKED_AT]
        which = [len(self._said)] * self.rows
        for i, row in enumerate(self._said_of):
            which[row] = i
        indices = _integers(which)
        columns = zip(zip(*values, strict=True), types, strict=True)
        return [pa.array(column, type_).take(indices) for column, type_ in columns]


def _keys(told: Decided, chunk: int) -> bytes | list[str | None]:
    if not chunk and (not told.rids or (len(told.keys) == 1 and set(map(type, told.keys[0])) == {int})):
        return _packed(told.keys[0]) if told.rids else b""
    texts: Sequence[str | None] = [None if told.names is None else "[]"] * len(told.rids)
    if told.keys:
        texts = key_texts(told.keys)
    return [*[None] * chunk, *texts]


# ---- arrays of what Python has, several times faster than Arrow makes them, for values that are never null --------


def _packed(values: Sequence[int]) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


def _unpacked(packed: Sequence[bytes]) -> pa.Array:
    data = b"".join(packed)
    return pa.Array.from_buffers(pa.int64(), len(data) // 8, [None, pa.py_buffer(data)])


def _integers(values: Sequence[int]) -> pa.Array:
    return _unpacked([_packed(values)])


def _repeated(counts: Sequence[int]) -> pa.Array:
    """The place of each count, as often as it says."""
    places: list[Any] = list(compress(range(len(counts)), counts))
    ends = pa.array(list(compress(accumulate(counts), counts)), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, _integers(places)))
