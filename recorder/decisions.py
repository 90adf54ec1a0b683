"""Rows of `decisions` that are made only when somebody looks: until then each pass is what the scheduler packed.

A log has a hundred of these rows for any other, so most of what is read, sealed or compared is spared making them one
by one; Arrow gets them column by column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.rows import NOT_LOOKED_AT, Decided, Row, key_texts, said

_decode = msgspec.msgpack.Decoder(Decided).decode


class Told(NamedTuple):
    """What was told of a pass."""

    number: int
    decided: Decided


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

    def pieces(self) -> Iterator[list[Told] | list[Row]]:
        """Everything in order, passes and single rows apart. Raises RunFormatError for what can't be read."""
        for is_row, run in groupby(self._passes, lambda each: not isinstance(each[2], bytes)):
            if is_row:
                yield [row for _, _, row in run]  # type: ignore[misc]
            else:
                yield [Told(number, _decided(number, packed)) for _, number, packed in run]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        for piece in self.pieces():
            for each in piece:
                if isinstance(each, Told):
                    yield from _rows(*each)
                else:
                    yield each

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


def _decided(number: int, packed: bytes) -> Decided:
    try:
        return _decode(packed)
    except msgspec.DecodeError as error:
        raise RunFormatError(f"the decisions of pass {number} can't be read: {error}") from None


def _rows(number: int, told: Decided) -> Iterator[Row]:
    """The rows of a pass: the continuing chunk first, then the queue as sorted."""
    chunks = told.count - len(told.rids)
    looked_at = dict(zip(told.places(), told.verdicts, strict=True))
    for place in range(chunks):
        verdict = looked_at[place]
        yield number, verdict.rid, None, None, None, None, 0, 0, False, None, None, *said(verdict)
    names = None if told.names is None else ",".join(told.names)
    texts = key_texts(told.keys) if told.keys else [None if told.names is None else "[]"] * len(told.rids)
    for after, before in enumerate(told.positions):
        held = told.duplicates[before]
        found = looked_at.get(chunks + after)
        yield (
            number,
            told.rids[before],
            before,
            after,
            texts[before],
            names,
            told.prefix_lens[before],
            told.matched[before],
            held is not None,
            None if held is None else held.partner,
            None if held is None else held.shared_len,
            *(NOT_LOOKED_AT if found is None else said(found)),
        )
