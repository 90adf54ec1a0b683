"""The parts of a rank's log, as one consistent view of what is being sealed and merged: every row once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.files import Within, cut
from schedscope.recorder.journal import Journal
from schedscope.recorder.listing import Directory
from schedscope.recorder.manifest import Gap
from schedscope.recorder.schema import TABLES, Table
from schedscope.recorder.segment import Segment

_TRIES = 1_000


@dataclass(frozen=True, slots=True)
class PassRange:
    """The recorded passes of a rank."""

    count: int
    first: int | None
    """None: no pass was recorded."""
    last: int | None


class Part:
    """A piece of a rank's log, a segment or a journal. It stays readable when it is merged into a bigger one."""

    def __init__(self, rank: int, source: Segment | Journal) -> None:
        self.rank = rank
        self._source = source

    @cached_property
    def _passes(self) -> tuple[int, int] | None:
        if isinstance(self._source, Journal):
            return self._source.pass_range
        first, last = self._source.first_pass, self._source.last_pass
        return None if first is None or last is None else (first, last)

    @property
    def first_pass(self) -> int | None:
        """First pass that any row belongs to; None: no row belongs to one."""
        return self._passes[0] if self._passes is not None else None

    @property
    def last_pass(self) -> int | None:
        """Last pass that any row belongs to. The next part may go on with it."""
        return self._passes[1] if self._passes is not None else None

    def table(self, name: str, columns: Sequence[str] | None = None, within: Within | None = None) -> pa.Table:
        """Its rows of a table, in recorded order; only those `within`, for which no more than needed is read.

        Raises RunFormatError, naming the file, for one that can't be read.
        """
        if isinstance(self._source, Journal):
            return cut(self._source.table(name), columns, within)
        table = TABLES[name]
        try:
            return self._source.read(table, columns, within=within)
        except FileNotFoundError:
            return self._read_merged(self._source, table, columns, within)

    def file(self, table: Table) -> Path | None:
        """The file with its rows of a table; None if there is none."""
        return self._source.file(table) if isinstance(self._source, Segment) else None

    def chunks(
        self, name: str, columns: Sequence[str] | None = None, within: Within | None = None
    ) -> Iterator[pa.Table]:
        """The same a row group at a time: what a big part holds need not be in memory at once."""
        if isinstance(self._source, Journal):
            yield self.table(name, columns, within)
            return
        table = TABLES[name]
        try:
            yield from self._source.chunks(table, columns, within)
        except FileNotFoundError:
            yield self._read_merged(self._source, table, columns, within)

    def _read_merged(
        self, source: Segment, table: Table, columns: Sequence[str] | None, within: Within | None
    ) -> pa.Table:
        for _ in range(_TRIES):
            names = Directory(source.path.parent).look().segments
            for name in names:
                segment = Segment.named(source.path.parent / name)
                assert segment is not None
                if segment.first_number > source.last_number and name == names[0]:
                    # A flight recorder let go of it, and of everything before it.
                    return table.arrow.empty_table().select(list(columns or table.names))
                if segment.first_number <= source.first_number and source.last_number <= segment.last_number:
                    try:
                        rows = segment.rows_of(table.name, source)
                        return segment.read(table, columns, within=within, rows=rows)
                    except FileNotFoundError:
                        break
            else:
                raise RunFormatError(f"{source.path}: it is gone, and no other segment has its rows")
        raise RunFormatError(f"{source.path}: segments come and go too fast to be read")


class _Extent(NamedTuple):
    """What gaps need to know of a part."""

    number: int
    first_frame: int
    next_frame: int
    passes: tuple[int, int] | None
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A rank's segments, and the journals that were not sealed at the moment of looking, in recorded order."""

    rank: int
    sources: tuple[Segment | Journal, ...]

    def __iter__(self) -> Iterator[Part]:
        return (Part(self.rank, source) for source in self.sources)

    @property
    def segments(self) -> list[Segment]:
        """The sealed part of it."""
        return [source for source in self.sources if isinstance(source, Segment)]

    @property
    def journals(self) -> list[Journal]:
        """The rest: mostly one, the last. A journal that could not be sealed stays where it is."""
        return [source for source in self.sources if isinstance(source, Journal)]

    def of_passes(self, first: int, last: int) -> list[Part]:
        """The parts that can hold anything that happened in these passes or between them."""
        parts = list(self)
        hits = [
            i
            for i, part in enumerate(parts)
            if part.first_pass is not None
            and part.last_pass is not None
            and part.first_pass <= last
            and first <= part.last_pass
        ]
        return parts[hits[0] : hits[-1] + 1] if hits else []

    @property
    def ended(self) -> bool:
        """The writer closed: nothing will come behind."""
        last = self.sources[-1] if self.sources else None
        return last is not None and (last.ended if isinstance(last, Journal) else last.index.ended)

    @property
    def rests(self) -> bool:
        """The last that was recorded is that there was nothing to do. A writer that is watched holds nothing then."""
        last = list(self)[-1:]
        ticks = [part.table(name, ("seq",)).column("seq") for part in last for name in ("events", "passes", "tokens")]
        for part in last:
            steps = part.table("steps", ("seq", "kind"))
            if len(steps) and steps.column("kind")[-1].as_py() == "idle":
                tick = steps.column("seq")[-1].as_py()
                return all(not len(column) or column[-1].as_py() < tick for column in ticks)
        return False

    def count(self, table: str) -> int:
        """Rows of a table."""
        return sum(source.count(table) for source in self.sources)

    def passes(self) -> PassRange:
        """Count, first and last of the recorded passes."""
        ranges = [extent.passes for extent in self._extents() if extent.passes is not None]
        if not ranges:
            return PassRange(0, None, None)
        return PassRange(self.count("passes"), ranges[0][0], ranges[-1][1])

    def gaps(self) -> list[Gap]:
        """What the frame numbers and checksums show as lost, in order, with the passes around it."""
        return fold_gaps(self.rank, self._extents(), 0)

    def open_end(self, reason: str) -> Gap:
        """The gap behind the last frame of a rank whose writer didn't close."""
        frame = max((extent.next_frame for extent in self._extents()), default=0)
        last = self.sources[-1] if self.sources else None
        torn = last.torn_gap() if isinstance(last, Journal) else None
        detail = torn.detail if torn is not None else None
        return Gap(rank=self.rank, reason=reason, frame=frame, after_pass=self.passes().last, detail=detail)

    def _extents(self) -> Iterator[_Extent]:
        for source in self.sources:
            if isinstance(source, Segment):
                yield extent_of(source)
                continue
            rows = source.rows.get("passes")
            passes = (rows[0][0], rows[-1][0]) if rows else None
            torn = source.torn_gap() if source is not self.sources[-1] else None
            gaps = (*source.gaps, torn) if torn is not None else tuple(source.gaps)
            yield _Extent(source.number, source.first_frame, source.next_frame, passes, gaps)


def fold_gaps(rank: int, extents: Iterable[_Extent], next_frame: int) -> list[Gap]:
    """The gaps in and between consecutive parts, with the passes around them as far as these parts tell.

    Args:
        next_frame: the number that the first of them should begin with.
    """
    gaps: list[Gap] = []
    unbounded: list[int] = []
    """Gaps that no pass was recorded behind yet."""
    last_pass: int | None = None
    for extent in extents:
        if extent.passes is not None:
            for i in unbounded:
                gaps[i] = msgspec.structs.replace(gaps[i], before_pass=extent.passes[0])
            unbounded.clear()
        for gap in (*_skipped(rank, extent, next_frame), *extent.gaps):
            if gap.before_pass is None:
                unbounded.append(len(gaps))
            gaps.append(gap if gap.after_pass is not None else msgspec.structs.replace(gap, after_pass=last_pass))
        next_frame = max(next_frame, extent.next_frame)
        if extent.passes is not None:
            last_pass = extent.passes[1]
    return gaps


def extent_of(segment: Segment) -> _Extent:
    """What `fold_gaps` needs to know of a segment."""
    index = segment.index
    return _Extent(index.number, index.first_frame, index.next_frame, index.passes, tuple(index.gaps))


def _skipped(rank: int, extent: _Extent, next_frame: int) -> Iterator[Gap]:
    """Frames between a part and the one before it: someone removed files."""
    missing = extent.first_frame - next_frame
    if missing > 0:
        yield Gap(
            rank=rank,
            reason="lost",
            frame=next_frame,
            frames=missing,
            before_pass=extent.passes[0] if extent.passes is not None else None,
            detail=f"what comes before part {extent.number} is missing",
        )
