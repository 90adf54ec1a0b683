"""Rows of `decisions` that are made only when somebody looks: until then each pass is what the scheduler packed.

A log has a hundred of these rows for any other, so most of what is read, sealed or compared is spared making them one
by one; Arrow gets them column by column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from schedscope.engine.dedup import Duplicate
from schedscope.engine.errors import RunFormatError
from schedscope.engine.verdict import Verdict
from schedscope.recorder.rows import Decided, Row, key_texts

_decode = msgspec.msgpack.Decoder(Decided).decode

Columns = Sequence[Sequence[Any]]
"""One per column of `decisions` but the rank."""


class Decisions:
    """The decisions of consecutive passes, as rows."""

    __slots__ = ("_count", "_passes")

    def __init__(self) -> None:
        self._passes: list[tuple[int, int, bytes | Row]] = []
        """Rows, number of the pass, and what was packed; or a single row as it is."""
        self._count = 0

    def add(self, number: int, count: int, packed: bytes) -> None:
        """Append a pass, with as many rows as `pack_decision` said."""
        self._passes.append((count, number, packed))
        self._count += count

    def extend(self, rows: Iterable[Row] | Decisions) -> None:
        """Append rows."""
        if isinstance(rows, Decisions):
            self._passes += rows._passes
            self._count += rows._count
            return
        before = len(self._passes)
        self._passes += ((1, row[0], row) for row in rows)
        self._count += len(self._passes) - before

    def copy(self) -> Decisions:
        """The same rows; the copy doesn't grow with the original."""
        twin = Decisions()
        twin.extend(self)
        return twin

    def behind(self, count: int) -> Decisions:
        """All but the first `count` rows, which end with a pass."""
        rest, skipped = Decisions(), 0
        for place, (rows, _, _) in enumerate(self._passes):
            if skipped == count:
                rest._passes = self._passes[place:]
                rest._count = self._count - count
                break
            skipped += rows
        return rest

    def of_pass(self, number: int) -> Decisions:
        """The rows of one pass."""
        found = Decisions()
        found._passes = [each for each in self._passes if each[1] == number]
        found._count = sum(count for count, _, _ in found._passes)
        return found

    def by_pass(self) -> dict[int, Decisions]:
        """The rows of each pass."""
        found: defaultdict[int, Decisions] = defaultdict(Decisions)
        for each in self._passes:
            found[each[1]]._passes.append(each)
            found[each[1]]._count += each[0]
        return dict(found)

    def pass_range(self) -> tuple[int, int] | None:
        """The first and last pass; None without any."""
        return (self._passes[0][1], self._passes[-1][1]) if self._passes else None

    def columns(self) -> Columns:
        """All rows, column by column. Raises RunFormatError if what was packed can't be read."""
        if not self._passes:
            return []
        made = [_columns(number, packed, count) for count, number, packed in self._passes]
        return [list(chain.from_iterable(column)) for column in zip(*made, strict=True)]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        for count, number, packed in self._passes:
            yield from zip(*_columns(number, packed, count), strict=True)

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Iterable) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Decisions({list(self)!r})"


def append(rows: dict[str, Any], more: dict[str, Any]) -> None:
    """Append rows to those of the same tables."""
    for table, values in more.items():
        if table in rows:
            rows[table].extend(values)
        else:
            rows[table] = values.copy()


def _columns(number: int, packed: bytes | Row, count: int) -> Columns:
    """The rows of a pass, or a row as it is, column by column: the continuing chunk first, then the queue as sorted."""
    if not isinstance(packed, bytes):
        return [(value,) for value in packed]
    try:
        told = _decode(packed)
    except msgspec.DecodeError as error:
        raise RunFormatError(f"the decisions of pass {number} can't be read: {error}") from None
    positions, verdicts = list(told.positions), told.verdicts
    waiting = len(positions)
    chunks = count - waiting
    rids: list[Any] = [verdict.rid for verdict in verdicts[:chunks]]
    prefix_lens, matched = [0] * chunks, [0] * chunks
    keys: list[Any] = [None] * chunks
    names: list[Any] = [None] * chunks
    held: list[Duplicate | None] = [None] * chunks
    if waiting:
        texts: list[Any] = [None if told.names is None else "[]"] * waiting
        if told.keys:
            texts = key_texts(told.keys)
        rids += map(told.rids.__getitem__, positions)
        prefix_lens += map(told.prefix_lens.__getitem__, positions)
        matched += map(told.matched.__getitem__, positions)
        keys += map(texts.__getitem__, positions)
        names += [None if told.names is None else ",".join(told.names)] * waiting
        held += map(told.duplicates.__getitem__, positions)
    columns: list[Sequence[Any]] = [
        [number] * count,
        rids,
        [None] * chunks + positions,
        [None] * chunks + list(range(waiting)),
        keys,
        names,
        prefix_lens,
        matched,
    ]
    if any(held):
        columns.append([each is not None for each in held])
        columns.append([each and each.partner for each in held])
        columns.append([each and each.shared_len for each in held])
    else:
        columns += [False] * count, [None] * count, [None] * count
    said: list[list[Any]] = [[value] * count for value in _NOT_LOOKED_AT]
    said.append([[] for _ in range(count)])
    if verdicts:
        places = dict(zip(rids, range(count), strict=True))
        for verdict in verdicts:
            place = places[verdict.rid]
            for column, value in zip(said, _said(verdict), strict=True):
                column[place] = value
    return columns + said


_NOT_LOOKED_AT = (None, None, False, None, None, False, *(None,) * 6)
"""What is said about a request that a pass ended before, but for those preempted."""


def _said(verdict: Verdict) -> Row:
    remaining = verdict.remaining
    return (
        str(verdict.result),
        str(verdict.reason),
        verdict.admitted,
        verdict.prefix_len,
        verdict.extend_len,
        verdict.chunked,
        verdict.need,
        verdict.have,
        remaining.total,
        remaining.current,
        remaining.input,
        remaining.chunk,
        list(verdict.preempted),
    )
