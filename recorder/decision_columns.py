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
from schedscope.recorder.decisions import Told
from schedscope.recorder.rows import NOT_LOOKED_AT, Decided, key_texts, said


def columns_of(passes: Sequence[Told], types: Sequence[pa.DataType]) -> list[pa.Array]:
    """The columns of `decisions` but the rank.

    Args:
        types: of these columns.
    """
    told = [each.decided for each in passes]
    counts = [each.count for each in told]
    *starts, rows = accumulate(counts, initial=0)
    chunks = [count - len(each.rids) for each, count in zip(told, counts, strict=True)]
    """Rows of continuing chunks, one or none; they come first."""
    of = _repeated(counts)
    start, skip = _integers(starts).take(of), _integers(chunks).take(of)
    after = pc.subtract(pc.subtract(_integers(range(rows)), start), skip)
    before = _integers(_joined(chunks, [-1] * len(told), [each.positions for each in told]))
    source = pc.add(pc.add(before, skip), start)
    """Where the request of each row stands in what the passes told."""
    of_queue = of
    if any(chunks):
        waits = pc.greater_equal(after, 0)
        before, after, of_queue = (pc.if_else(waits, column, None) for column in (before, after, of))
    firsts = [each.verdicts[0].rid if n else "" for n, each in zip(chunks, told, strict=True)]
    zeros = [0] * len(told)
    columns = [
        _integers([each.number for each in passes]).take(of),
        _texts(_joined(chunks, firsts, [each.rids for each in told])).take(source),
        before,
        after,
        _keys(told, chunks).take(source),
        _names(told).take(of_queue),
        _integers(_joined(chunks, zeros, [each.prefix_lens for each in told])).take(source),
        _integers(_joined(chunks, zeros, [each.matched for each in told])).take(source),
    ]
    if any(any(each.duplicates) for each in told):
        held = _joined(chunks, [None] * len(told), [each.duplicates for each in told])
        columns += [column.take(source) for column in _duplicates(held, types[8:11])]
    else:
        columns += [pa.repeat(pa.scalar(False), rows), pa.nulls(rows, types[9]), pa.nulls(rows, types[10])]
    columns += _verdicts(told, starts, rows, types[11:])
    return [column.cast(type_) for column, type_ in zip(columns, types, strict=True)]


def _joined(chunks: Sequence[int], firsts: Sequence[Any], queues: Sequence[Sequence[Any]]) -> list[Any]:
    """The values of all queues, before each that of its continuing chunk, if it has one."""
    if any(chunks):
        queues = [[first, *queue] if n else queue for n, first, queue in zip(chunks, firsts, queues, strict=True)]
    return list(chain.from_iterable(queues))


def _names(told: Sequence[Decided]) -> pa.Array:
    return pa.array([None if each.names is None else ",".join(each.names) for each in told], pa.string())


def _keys(told: Sequence[Decided], chunks: Sequence[int]) -> pa.Array:
    """The keys as texts, before sorting."""
    if not any(chunks) and all(len(each.keys) == 1 for each in told if each.rids):
        values = list(chain.from_iterable([each.keys[0] for each in told if each.rids]))
        if set(map(type, values)) == {int}:
            # Many are the same.
            distinct = _integers(values).dictionary_encode()
            return pa.array(key_texts([distinct.dictionary.to_pylist()]), pa.string()).take(distinct.indices)
    texts = [
        key_texts(each.keys) if each.keys else [None if each.names is None else "[]"] * len(each.rids) for each in told
    ]
    return pa.array(_joined(chunks, [None] * len(told), texts), pa.string())


def _duplicates(held: Sequence[Duplicate | None], types: Sequence[pa.DataType]) -> list[pa.Array]:
    facts = [(False, None, None) if each is None else (True, *each) for each in held]
    return [pa.array(column, type_) for column, type_ in zip(zip(*facts, strict=True), types, strict=True)]


def _verdicts(
    told: Sequence[Decided], starts: Sequence[int], rows: int, types: Sequence[pa.DataType]
) -> list[pa.Array]:
    """The columns that tell what was said of those whom a pass looked at."""
    values = [*(said(verdict) for each in told for verdict in each.verdicts), NOT_LOOKED_AT]
    which = [len(values) - 1] * rows
    places = [start + place for start, each in zip(starts, told, strict=True) for place in each.places()]
    for i, place in enumerate(places):
        which[place] = i
    indices = _integers(which)
    columns = zip(zip(*values, strict=True), types, strict=True)
    return [pa.array(column, type_).take(indices) for column, type_ in columns]


# ---- arrays of what Python has, several times faster than Arrow makes them, for values that are never null --------


def _integers(values: Sequence[int]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(struct.pack(f"{len(values)}q", *values))])


def _texts(values: Sequence[str]) -> pa.Array:
    found = pc.split_pattern(pa.array(["\n".join(values)]), "\n").values if values else ()
    return found if len(found) == len(values) else pa.array(values, pa.string())


def _repeated(counts: Sequence[int]) -> pa.Array:
    """The place of each count, as often as it says."""
    places = range(len(counts))
    ends = pa.array(list(compress(accumulate(counts), counts)), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, _integers(list(compress(places, counts)))))
