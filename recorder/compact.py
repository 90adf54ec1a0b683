"""Merging: consecutive small segments become a big one, in the background, while others read.

The rename of the merged directory is the switch. From then on its name says that it stands for its sources, readers
take it and pass those over, and a while later the sources are removed. Killed at any moment, it leaves every row
readable once; the next call picks up.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.listing import Directory
from schedscope.recorder.parts import extent_of, fold_gaps
from schedscope.recorder.schema import TABLES, Table
from schedscope.recorder.segment import INDEX, Index, Segment, make_segment

LEVEL = 9
"""Of zstd: it is written once and kept."""
GRACE_S = 60.0

_LEFT_OVER = re.compile(r"\.\d{8,}-\d{8,}\.tmp|\..*\.gone")

log = logging.getLogger("schedscope.recorder")


class MergeLimits(NamedTuple):
    """How big a merged segment becomes: none of these is exceeded, but by a segment that does so alone."""

    decisions: int = 1_000_000
    size: int = 128 * 2**20
    """Bytes of its files."""
    passes: int = 100_000
    sources: int = 1_000
    """Journals that it was made of."""
    fan_in: int = 16
    """Equally small segments that are merged before one is full: a quiet server's log stays short too."""

    def share(self, segment: Segment) -> float:
        """How much of a merged segment this one would fill, 0 to 1 or more. Raises RunFormatError."""
        size = sum(facts.size for facts in segment.index.files.values())
        return max(
            segment.count("decisions") / self.decisions,
            size / self.size,
            segment.count("passes") / self.passes,
            (segment.last_number + 1 - segment.first_number) / self.sources,
        )


MERGE_LIMITS = MergeLimits()


class _BrokenError(Exception):
    """A segment that can't be read."""

    def __init__(self, segment: Segment, reason: RunFormatError) -> None:
        super().__init__(str(reason))
        self.segment = segment


def compact(
    directory: Path, limits: MergeLimits = MERGE_LIMITS, grace_s: float = GRACE_S, *, final: bool = False
) -> bool:
    """Merge once in a rank's directory, if there is something to merge, and remove what earlier calls replaced.

    Not for two at a time. Segments that can't be read stay as they are.

    Args:
        grace_s: how long sources stay behind their replacement: readers may have just listed them.
        final: nothing comes behind, so don't wait for more.

    Returns whether segments were merged: then call again. Raises OSError.
    """
    _remove_leftovers(directory)
    merged = _merge_once(directory, limits, final)
    _remove_replaced(directory, grace_s)
    return merged


def tidy(directory: Path, limits: MergeLimits = MERGE_LIMITS, grace_s: float = GRACE_S, *, final: bool = False) -> None:
    """Call `compact` until nothing is left to merge. If it fails, segments stay small, which readers read as well."""
    try:
        while compact(directory, limits, grace_s, final=final):
            pass
    except OSError as error:
        if directory.exists():  # else the run was deleted
            log.warning("can't merge the segments of %s now; they can be read as they are: %s", directory, error)
    except Exception:
        log.exception("can't merge the segments of %s; they can be read as they are", directory)


def choose(shares: Sequence[float], fan_in: int, *, final: bool) -> tuple[int, int] | None:
    """Which of consecutive segments to merge, from one up to another: never more than a whole together; None: none.

    A merged segment is full when the next one doesn't fit in. Before that, `fan_in` small ones are merged into one,
    `fan_in` of those into one again and so on, so that a row is rewritten a few times at most.
    """
    start, filled = 0, 0.0
    for place, share in enumerate(shares):
        if place > start and filled + share > 1:
            if place - start > 1:
                return start, place
            start, filled = place, 0.0
        filled += share
    last = len(shares)
    if final:
        return (start, last) if last - start > 1 else None
    for power in (4, 3, 2, 1):
        begin = start
        for place in range(start, last + 1):
            if place < last and shares[place] <= fan_in**-power:
                continue
            if place - begin >= fan_in:
                return begin, place
            begin = place + 1
    return None


def merge(segments: Sequence[Segment]) -> Segment:
    """Make one segment of consecutive ones. They stay. Raises OSError."""
    indexes = [_index(segment) for segment in segments]
    first, last = indexes[0], indexes[-1]
    made = [index.passes for index in indexes if index.passes is not None]
    reached = [s for s in segments if s.first_pass is not None and s.last_pass is not None]
    names = [name for name in TABLES if any(index.rows.get(name) for index in indexes)]
    index = Index(
        rank=first.rank,
        number=segments[0].first_number,
        last_number=segments[-1].last_number,
        first_frame=first.first_frame,
        next_frame=max(index.next_frame for index in indexes),
        first_pass=min((s.first_pass for s in reached if s.first_pass is not None), default=None),
        last_pass=max((s.last_pass for s in reached if s.last_pass is not None), default=None),
        ended=last.ended,
        rows={name: sum(index.rows.get(name, 0) for index in indexes) for name in names},
        passes=(made[0][0], made[-1][1]) if made else None,
        gaps=fold_gaps(first.rank, map(extent_of, segments), first.first_frame),
        starts={name: _starts(segments, name) for name in names},
    )
    tables = {name: _rows(segments, TABLES[name]) for name in names}
    return make_segment(segments[0].path.parent, index, tables, LEVEL)


def _merge_once(directory: Path, limits: MergeLimits, final: bool) -> bool:
    broken: set[str] = set()
    while True:
        listed = [Segment.named(directory / name) for name in Directory(directory).look().segments]
        try:
            for run in _consecutive([segment for segment in listed if segment is not None], broken):
                chosen = choose([_share(limits, segment.path) for segment in run], limits.fan_in, final=final)
                if chosen is not None:
                    merge(run[slice(*chosen)])
                    return True
        except _BrokenError as error:
            _say(error.segment.path, str(error))
            broken.add(error.segment.path.name)
            _remove_leftovers(directory)
            continue
        return False


def _consecutive(segments: Sequence[Segment], broken: set[str]) -> Iterator[list[Segment]]:
    """Runs of segments between which nothing is missing: neither a journal that isn't sealed nor a removed part."""
    run: list[Segment] = []
    for before, segment in pairwise([None, *segments]):
        assert segment is not None
        if before is not None and segment.first_number != before.last_number + 1:
            yield run
            run = []
        if segment.path.name in broken:
            yield run
            run = []
        else:
            run.append(segment)
    yield run


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path)


def _remove_replaced(directory: Path, grace_s: float) -> None:
    listing = Directory(directory).look()
    now = time.time()
    for name in listing.merged:
        source = Segment.named(directory / name)
        assert source is not None
        for each in listing.segments:
            segment = Segment.named(directory / each)
            assert segment is not None
            if segment.first_number <= source.first_number and source.last_number <= segment.last_number:
                if now - (segment.path / INDEX).stat().st_mtime >= grace_s:
                    # First out of the way as a whole: to readers a segment with files missing is a damaged one.
                    gone = directory / f".{name}.gone"
                    source.path.rename(gone)
                    shutil.rmtree(gone)
                break


@lru_cache(maxsize=16_384)
def _share(limits: MergeLimits, path: Path) -> float:
    """What `limits` says of a segment, which never changes."""
    segment = Segment.named(path)
    assert segment is not None
    _index(segment)
    return limits.share(segment)


def _index(segment: Segment) -> Index:
    try:
        return segment.index
    except RunFormatError as error:
        raise _BrokenError(segment, error) from None


def _rows(segments: Sequence[Segment], table: Table) -> Iterator[pa.Table]:
    for segment in segments:
        try:
            yield from segment.chunks(table)
        except RunFormatError as error:
            raise _BrokenError(segment, error) from None


def _starts(segments: Sequence[Segment], table: str) -> list[int]:
    starts: list[int] = []
    behind = 0
    for segment in segments:
        count = segment.last_number + 1 - segment.first_number
        own = segment.index.starts.get(table) or [0] * count
        starts += [behind + start for start in own]
        behind += segment.count(table)
    return starts


@cache
def _say(path: Path, reason: str) -> None:
    """Once: it stays broken."""
    log.warning("%s is not merged with its neighbours: %s", path, reason)
