"""A rank's files: looked at again and again while they are written, sealed and merged, each time as one view."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf
from pathlib import Path

from schedscope.engine.errors import RunFormatError
from schedscope.recorder.journal import Journal, JournalTail, read_ring
from schedscope.recorder.listing import Directory, Listing
from schedscope.recorder.lock import is_held
from schedscope.recorder.manifest import Gap, Manifest
from schedscope.recorder.mentions import Mentions
from schedscope.recorder.mirror import mirror_of
from schedscope.recorder.open_files import OpenFiles
from schedscope.recorder.parts import Parts
from schedscope.recorder.rank_log import rank_dir
from schedscope.recorder.ring import peek
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import Segment

_TRIES = 1_000


class RankFiles:
    """The files of a rank, looked at again and again: what is known of them stays known."""

    def __init__(self, directory: Path, rank: int, files: OpenFiles | None = None) -> None:
        self.rank = rank
        self._directory = Directory(directory)
        self._files = files or OpenFiles()
        self._mentions = Mentions(directory)
        self._segments: dict[str, Segment] = {}
        self._tails: dict[str, JournalTail] = {}

    def look(self, rid: str | None = None) -> Parts:
        """A consistent prefix of the log, with everything that was there when this was called.

        Segments are listed, journals are read. A journal that vanishes in between was sealed: then once more.

        Args:
            rid: what can't mention this request may be left out.
        """
        for _ in range(_TRIES):
            ring = peek(self._directory.path)
            listing = self._directory.look()
            self._forget(listing)
            try:
                tails = [self._tail(name).look() for name in listing.journals]
                names = listing.segments if rid is None else self._mentions.candidates(rid, listing.segments)
                sources: list[Segment | Journal] = list(map(self._segment, names))
                for journal in tails:
                    insort(sources, journal, key=_number)
                if ring:
                    last = map(self._segment, listing.segments[-1:])
                    end = _end(sorted([*last, *tails], key=_number))
                    sources.append(read_ring(self._directory.path, ring, self.rank, *end))
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
