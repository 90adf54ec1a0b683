"""The parts of a rank's log, as one consistent view: every row once, also while a journal is being sealed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.journal import SUFFIX, Journal, read_journal, read_ring
from schedscope.recorder.lock import is_held
from schedscope.recorder.manifest import Gap, Manifest
from schedscope.recorder.rank_log import rank_dir
from schedscope.recorder.ring import peek
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import Segment

_TRIES = 1_000


@dataclass(frozen=True, slots=True)
class PassRange:
    """The recorded passes of a rank."""

    count: int
    first: int | None
    """None: no pass was recorded."""
    last: int | None


class _Extent(NamedTuple):
    """What gaps need to know of a part."""

    number: int
    first_frame: int
    next_frame: int
    passes: tuple[int, int] | None
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A rank's segments and, behind them, the journals that were not sealed at the moment of looking."""

    rank: int
    segments: tuple[Segment, ...]
    journals: tuple[Journal, ...]

    @property
    def ended(self) -> bool:
        """The writer closed: nothing will come behind."""
        return any(journal.ended for journal in self.journals) or (
            bool(self.segments) and self.segments[-1].index.ended
        )

    def count(self, table: str) -> int:
        """Rows of a table."""
        sealed = sum(segment.index.rows.get(table, 0) for segment in self.segments)
        return sealed + sum(len(journal.rows.get(table, ())) for journal in self.journals)

    def passes(self) -> PassRange:
        """Count, first and last of the recorded passes."""
        ranges = [extent.passes for extent in self._extents() if extent.passes is not None]
        if not ranges:
            return PassRange(0, None, None)
        return PassRange(self.count("passes"), ranges[0][0], ranges[-1][1])

    def gaps(self) -> list[Gap]:
        """What the frame numbers and checksums show as lost, in order, with the passes around it."""
        gaps: list[Gap] = []
        unbounded: list[int] = []
        """Gaps that no pass was recorded behind yet."""
        next_frame = 0
        last_pass: int | None = None
        for extent in self._extents():
            if extent.passes is not None:
                for i in unbounded:
                    gaps[i] = msgspec.structs.replace(gaps[i], before_pass=extent.passes[0])
                unbounded.clear()
            for gap in (*self._skipped(extent, next_frame), *extent.gaps):
                if gap.before_pass is None:
                    unbounded.append(len(gaps))
                gaps.append(gap if gap.after_pass is not None else msgspec.structs.replace(gap, after_pass=last_pass))
            next_frame = max(next_frame, extent.next_frame)
            if extent.passes is not None:
                last_pass = extent.passes[1]
        return gaps

    def open_end(self, reason: str) -> Gap:
        """The gap behind the last frame of a rank whose writer didn't close."""
        frame = max((extent.next_frame for extent in self._extents()), default=0)
        torn = self.journals[-1].torn_gap() if self.journals else None
        detail = torn.detail if torn is not None else None
        return Gap(rank=self.rank, reason=reason, frame=frame, after_pass=self.passes().last, detail=detail)

    def _skipped(self, extent: _Extent, next_frame: int) -> Iterator[Gap]:
        """Frames between a part and the one before it: someone removed files."""
        missing = extent.first_frame - next_frame
        if missing > 0:
            yield Gap(
                rank=self.rank,
                reason="lost",
                frame=next_frame,
                frames=missing,
                before_pass=extent.passes[0] if extent.passes is not None else None,
                detail=f"what comes before part {extent.number} is missing",
            )

    def _extents(self) -> Iterator[_Extent]:
        for segment in self.segments:
            index = segment.index
            yield _Extent(index.number, index.first_frame, index.next_frame, index.passes, tuple(index.gaps))
        for journal in self.journals:
            rows = journal.rows.get("passes")
            passes = (rows[0][0], rows[-1][0]) if rows else None
            torn = journal.torn_gap() if journal is not self.journals[-1] else None
            gaps = (*journal.gaps, torn) if torn is not None else tuple(journal.gaps)
            yield _Extent(journal.number, journal.first_frame, journal.next_frame, passes, gaps)


def list_ranks(run_dir: Path) -> list[int]:
    """Ranks that have files in a run, ascending."""
    names = [path.name.removeprefix("rank=") for path in run_dir.glob("rank=*")]
    return sorted(int(name) for name in names if name.isdecimal())


def is_recorded(run_dir: Path, *, whole: bool = True) -> bool:
    """Whether someone writes to a run: its companion, or the writer of a rank. `whole=False` asks for the latter."""
    return (whole and is_held(run_dir)) or any(is_held(rank_dir(run_dir, rank)) for rank in list_ranks(run_dir))


def summarize(run_dir: Path, manifest: Manifest) -> tuple[dict[int, dict[str, int]], list[Gap]]:
    """Rows per rank and table, and all gaps, of a run that no one writes any more."""
    totals: dict[int, dict[str, int]] = {}
    gaps = list(manifest.gaps)
    for rank in list_ranks(run_dir):
        parts = read_parts(run_dir, rank)
        totals[rank] = {table: parts.count(table) for table in TABLES}
        gaps += map(manifest.explain, parts.gaps())
        if not parts.ended and not manifest.kept:
            gaps.append(parts.open_end("cut"))
    return totals, gaps


def list_segments(run_dir: Path, rank: int) -> list[Segment]:
    """The sealed segments of a rank, in order. Opens no file."""
    return [segment for _, segment in sorted(_list(rank_dir(run_dir, rank))[0].items())]


def read_parts(run_dir: Path, rank: int, known: dict[Path, Segment] | None = None) -> Parts:
    """Look at a rank's log: a consistent prefix of it, with everything that was there when this was called.

    Segments are listed, journals are read. A journal that vanishes in between was sealed: then once more.
    `known` remembers segments, which never change, from call to call.
    """
    directory = rank_dir(run_dir, rank)
    for _ in range(_TRIES):
        ring = peek(directory)
        segments, journals = _list(directory)
        if known is not None:
            segments = {number: known.setdefault(segment.path, segment) for number, segment in segments.items()}
        try:
            tails = [read_journal(path) for number, path in sorted(journals.items()) if number not in segments]
        except FileNotFoundError:
            continue
        sealed = [segment for _, segment in sorted(segments.items())]
        if ring:
            last = tails[-1] if tails else sealed[-1].index if sealed else None
            number, next_frame = (0, 0) if last is None else (last.number + 1, last.next_frame)
            tails.append(read_ring(directory, ring, rank, number, next_frame))
        return Parts(rank, tuple(sealed), tuple(tails))
    raise RunFormatError(f"{directory}: journals come and go too fast to be read")


def _list(directory: Path) -> tuple[dict[int, Segment], dict[int, Path]]:
    """Segments and journals by number.

    A listing isn't atomic: an entry renamed meanwhile may show under neither name. Two equal listings in a row can't
    both have missed it.
    """
    previous: list[str] | None = None
    for _ in range(_TRIES):
        try:
            names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return {}, {}
        if names == previous:
            break
        previous = names
    segments: dict[int, Segment] = {}
    journals: dict[int, Path] = {}
    for name in names:
        segment = Segment.named(directory / name)
        if segment is not None:
            segments[segment.number] = segment
        elif name.endswith(SUFFIX) and name.removesuffix(SUFFIX).isdecimal():
            journals[int(name.removesuffix(SUFFIX))] = directory / name
    return segments, journals
