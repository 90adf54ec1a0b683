"""The parts of a rank's log, as one consistent view of what is being sealed and merged: every row once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.files import OpenFiles, Within
from schedscope.recorder.journal import Journal, JournalTail, read_ring
from schedscope.recorder.listing import Directory, Listing
from schedscope.recorder.lock import is_held
from schedscope.recorder.manifest import Gap, Manifest
from schedscope.recorder.mirror import mirror_of
from schedscope.recorder.rank_log import rank_dir
from schedscope.recorder.ring import peek
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
        return _kept(self._read(TABLES[name], _with(within, columns), within), within, columns)

    def file(self, table: Table) -> Path | None:
        """The file with its rows of a table; None if there is none."""
        return self._source.file(table) if isinstance(self._source, Segment) else None

    def chunks(
        self, name: str, columns: Sequence[str] | None = None, within: Within | None = None
    ) -> Iterator[pa.Table]:
        """What `table` gives, a row group at a time: what a big part holds need not be in memory at once."""
        if isinstance(self._source, Journal):
            yield self.table(name, columns, within)
            return
        done = 0
        try:
            for rows in self._source.chunks(TABLES[name], _with(within, columns), within):
                kept = _kept(rows, within, columns)
                yield kept
                done += kept.num_rows
        except FileNotFoundError:
            yield self.table(name, columns, within).slice(done)

    def _read(self, table: Table, columns: Sequence[str] | None, within: Within | None) -> pa.Table:
        if isinstance(self._source, Journal):
            rows = self._source.table(table.name)
            return rows if columns is None else rows.select(list(columns))
        try:
            return self._source.read(table, columns, within=within)
        except FileNotFoundError:
            return self._read_merged(self._source, table, columns)

    def _read_merged(self, source: Segment, table: Table, columns: Sequence[str] | None) -> pa.Table:
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
                        return segment.read(table, columns, rows=segment.rows_of(table.name, source))
                    except FileNotFoundError:
                        break
            else:
                raise RunFormatError(f"{source.path}: it is gone, and no other segment has its rows")
        raise RunFormatError(f"{source.path}: segments come and go too fast to be read")


def _with(within: Within | None, columns: Sequence[str] | None) -> list[str] | None:
    """The columns to read for these columns of the rows within; None: all."""
    return None if columns is None else list(dict.fromkeys((*columns, *([within.column] if within else []))))


def _kept(rows: pa.Table, within: Within | None, columns: Sequence[str] | None) -> pa.Table:
    kept = rows if within is None else within.rows(rows)
    return kept if columns is None else kept.select(list(columns))


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


class RankFiles:
    """The files of a rank, looked at again and again: what is known of them stays known."""

    def __init__(self, directory: Path, rank: int, files: OpenFiles | None = None) -> None:
        self.rank = rank
        self._directory = Directory(directory)
        self._files = files or OpenFiles()
        self._segments: dict[str, Segment] = {}
        self._tails: dict[str, JournalTail] = {}

    def look(self) -> Parts:
        """A consistent prefix of the log, with everything that was there when this was called.

        Segments are listed, journals are read. A journal that vanishes in between was sealed: then once more.
        """
        for _ in range(_TRIES):
            ring = peek(self._directory.path)
            listing = self._directory.look()
            self._forget(listing)
            try:
                tails = [self._tail(name).look() for name in listing.journals]
                sources: list[Segment | Journal] = [self._segment(name) for name in listing.segments]
                for journal in tails:
                    insort(sources, journal, key=_number)
                if ring:
                    sources.append(read_ring(self._directory.path, ring, self.rank, *_end(sources)))
            except FileNotFoundError:
                self._directory.forget()
                continue
            return Parts(self.rank, tuple(sources))
        raise RunFormatError(f"{self._directory.path}: journals come and go too fast to be read")

    def with_pass(self, number: int) -> list[Segment | Journal]:
        """What can hold rows of a pass, in recorded order. Looks at no more segments than it has to, opens none."""
        listing = self._directory.look()
        names = listing.segments

        def reached(place: int) -> float:
            """The last pass up to there."""
            while place >= 0:
                if (last := self._segment(names[place]).last_pass) is not None:
                    return last
                place -= 1
            return -inf

        if listing.journals and (number >= reached(len(names) - 1) or len(listing.journals) > 1):
            return [each for each in self.look().sources if isinstance(each, Journal) or each.has_pass(number)]
        found: list[Segment | Journal] = []
        for place in range(bisect_left(range(len(names)), float(number), key=reached), len(names)):
            segment = self._segment(names[place])
            if segment.first_pass is not None and segment.first_pass > number:
                break
            if segment.has_pass(number):
                found.append(segment)
        return found

    def forget(self) -> None:
        """Look at everything anew: something that was listed is gone."""
        self._directory.forget()

    def _segment(self, name: str) -> Segment:
        segment = self._segments.get(name)
        if segment is None:
            segment = Segment.named(self._directory.path / name, self._files)
            assert segment is not None
            self._segments[name] = segment
        return segment

    def _tail(self, name: str) -> JournalTail:
        return self._tails.setdefault(name, JournalTail(self._directory.path / name))

    def _forget(self, listing: Listing) -> None:
        """Let go of journals that are sealed."""
        for name in self._tails.keys() - set(listing.journals):
            del self._tails[name]


def list_ranks(run_dir: Path) -> list[int]:
    """Ranks that have files in a run, ascending."""
    names = [path.name.removeprefix("rank=") for path in run_dir.glob("rank=*")]
    return sorted(int(name) for name in names if name.isdecimal())


def is_recorded(run_dir: Path, *, whole: bool = True) -> bool:
    """Whether someone writes to a run: its companion, or the writer of a rank. `whole=False` asks for the latter."""
    if (mirror := mirror_of(run_dir)) is not None:
        return mirror.is_recorded()
    return (whole and is_held(run_dir)) or any(is_held(rank_dir(run_dir, rank)) for rank in list_ranks(run_dir))


def summarize(run_dir: Path, manifest: Manifest) -> tuple[dict[int, dict[str, int]], list[Gap]]:
    """Rows per rank and table, and all gaps, of a run that no one writes any more."""
    totals: dict[int, dict[str, int]] = {}
    gaps = list(manifest.gaps)
    for rank in list_ranks(run_dir):
        parts = read_parts(run_dir, rank)
        totals[rank] = {table: parts.count(table) for table in TABLES}
        gaps += map(manifest.explain, parts.gaps())
        watched = manifest.source is not None and manifest.source.is_observed
        if not parts.ended and not manifest.kept and not (watched and parts.rests):
            gaps.append(parts.open_end("cut"))
    return totals, gaps


def _end(sources: Sequence[Segment | Journal]) -> tuple[int, int]:
    """Number and first frame of what would come behind."""
    if not sources:
        return 0, 0
    last = sources[-1]
    # A journal whose writer was killed while making it doesn't know its first frame.
    ends = [source.next_frame for source in sources if isinstance(source, Journal)]
    ends += [source.index.next_frame for source in sources if isinstance(source, Segment)][-1:]
    return (last.number if isinstance(last, Journal) else last.last_number) + 1, max(ends)


def _number(source: Segment | Journal) -> int:
    return source.number if isinstance(source, Journal) else source.first_number


def list_segments(run_dir: Path, rank: int) -> list[Segment]:
    """The sealed segments of a rank, in order. Opens no file."""
    directory = rank_dir(run_dir, rank)
    found = [Segment.named(directory / name) for name in Directory(directory).look().segments]
    return [segment for segment in found if segment is not None]


def read_parts(run_dir: Path, rank: int) -> Parts:
    """Look at a rank's log once, see `RankFiles.look`."""
    return RankFiles(rank_dir(run_dir, rank), rank).look()
