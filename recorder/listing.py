"""The names in a rank's directory: which segments and journals count, at one moment."""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from schedscope.recorder.journal import SUFFIX
from schedscope.recorder.mirror import INDEX, Mirror, mirror_of

_TRIES = 1_000
_SETTLED_NS = 50_000_000
"""A directory that was changed this recently may be changed again under the same timestamp."""

_SEGMENTS = re.compile(r"^\d{8,}(?:-\d{8,})?\.p(?:-?\d+--?\d+)?$", re.MULTILINE)
_MERGED = re.compile(r"^\d{8,}-\d{8,}\.p(?:-?\d+--?\d+)?$", re.MULTILINE)
_JOURNALS = re.compile(rf"^\d{{8,}}{re.escape(SUFFIX)}$", re.MULTILINE)
_LONG = re.compile(r"^\d{9}", re.MULTILINE)


class Listing(NamedTuple):
    """Names, each in recorded order. Anything else in the directory is not ours."""

    segments: tuple[str, ...]
    journals: tuple[str, ...]
    """Those without a segment."""
    merged: tuple[str, ...]
    """Segments whose rows are in one of `segments` too: they are about to be removed."""


class Directory:
    """A directory that is listed again and again. While it doesn't change, that costs one `stat`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: Listing | None = None
        self._changed_ns = 0
        self._mirror = mirror_of(path.parent)
        self._mirrored: tuple[str, ...] | None = None
        """What `_known` was made of, in a mirror."""

    def look(self) -> Listing:
        """What is there now; nothing where there is no directory."""
        if self._mirror is not None:
            return self._look_into(self._mirror)
        if self._known is not None and self._now_ns() == self._changed_ns:
            return self._known
        self._known = None
        before = self._now_ns()
        names = self._names()
        if before is not None and before == self._now_ns() and time.time_ns() - before > _SETTLED_NS:
            self._known, self._changed_ns = _sort_out(names), before
            return self._known
        # A listing isn't atomic: an entry renamed meanwhile may show under neither name. Two equal listings in a row
        # can't both have missed it.
        for _ in range(_TRIES):
            previous, names = names, self._names()
            if names == previous:
                break
        return _sort_out(names)

    def forget(self) -> None:
        """List it anew at the next look."""
        self._known = None

    def _look_into(self, mirror: Mirror) -> Listing:
        names = mirror.segments(self.path.name)
        if self._known is None or names is not self._mirrored:
            self._known, self._mirrored = _sort_out(list(names)), names
            # One that is gone by now will be missed by whoever reads it.
            with suppress(FileNotFoundError):
                mirror.fetch(self.path / name / INDEX for name in self._known.segments)
        return self._known

    def _now_ns(self) -> int | None:
        try:
            return self.path.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))  # noqa: PTH208 - a path object for each name takes as long again
        except (FileNotFoundError, NotADirectoryError):
            return []


def _sort_out(names: list[str]) -> Listing:
    # Thousands of names: a pattern over all of them takes a fraction of one look at each.
    lines = "\n".join(names)
    if lines.count("\n") >= len(names) > 0:
        lines = "\n".join(name for name in names if "\n" not in name)
    segments, journals = _SEGMENTS.findall(lines), _JOURNALS.findall(lines)
    if _LONG.search(lines) is not None:
        segments.sort(key=lambda name: _numbers(name)[0])
        journals.sort(key=lambda name: _numbers(name)[0])
    spans = [(*_numbers(name), name) for name in _MERGED.findall(lines)]
    covers: list[tuple[int, int, str]] = []
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not covers or span[1] > covers[-1][1]:
            covers.append(span)
    counting, merged = _without(segments, covers)
    unsealed = [name for name in _without(journals, covers)[0] if not _has(counting, _numbers(name)[0])]
    return Listing(tuple(counting), tuple(unsealed), tuple(merged))


def _has(segments: list[str], number: int) -> bool:
    place = bisect_left(segments, number, key=lambda name: _numbers(name)[0])
    return place < len(segments) and _numbers(segments[place])[0] == number


def _without(names: list[str], covers: list[tuple[int, int, str]]) -> tuple[list[str], list[str]]:
    """Names in order, without and only those that a merged segment covers."""
    kept, covered = names, []
    for first, last, name in covers:
        start = bisect_left(kept, first, key=lambda each: _numbers(each)[0])
        stop = bisect_left(kept, last + 1, key=lambda each: _numbers(each)[0])
        covered += [each for each in kept[start:stop] if each != name]
        kept = [*kept[:start], *(each for each in kept[start:stop] if each == name), *kept[stop:]]
    return kept, covered


def _numbers(name: str) -> tuple[int, int]:
    """First and last number of a segment or journal."""
    first, _, last = name.partition(".")[0].partition("-")
    return int(first), int(last or first)
