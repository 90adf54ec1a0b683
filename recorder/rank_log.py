"""A rank's log: the one writer of a rank's directory. Frames go in, journals and segments come out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from schedscope.recorder.frame import Header, Kind
from schedscope.recorder.journal import JournalWriter, read_journal
from schedscope.recorder.lock import hold
from schedscope.recorder.segment import write_segment

log = logging.getLogger("schedscope.recorder")


class Limits(NamedTuple):
    """When a journal is sealed: at the first of these."""

    passes: int = 1_000
    size: int = 16 * 2**20
    """Bytes. Sealing, and reading the tail, takes about ten times this in memory."""
    seconds: float = 60.0


LIMITS = Limits()


def rank_dir(run_dir: Path, rank: int) -> Path:
    """Where a rank's files are."""
    return run_dir / f"rank={rank}"


class RankLog:
    """Appends a rank's frames, and hands each full journal to `seal`, which may do its work at once or later.

    Raises FileExistsError if the rank has been recorded already or is being recorded, OSError if it can't write.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        seal: Callable[[Path], None],
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.ended = False
        """The writer closed."""
        self.directory = rank_dir(run_dir, rank)
        self._seal = seal
        self._limits = limits
        self._clock = clock
        self._next_frame = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = hold(self.directory)
        if lock is None:
            raise FileExistsError(f"{self.directory}: another process records this rank")
        self._lock = lock
        try:
            if any(self.directory.iterdir()):
                raise FileExistsError(f"{self.directory}: this rank has been recorded already")
            self._journal = JournalWriter(self.directory, rank, 0, 0)
        except OSError:
            lock.release()
            raise
        self._born = 0.0
        """When the journal's first frame came."""

    def append(self, header: Header, frame: bytes) -> None:
        """Write a frame, rows or the end. Raises OSError; the frame is then lost, and missing by its number."""
        if self._is_full():
            with contextlib.suppress(OSError):  # the old journal will do until a new one can be made
                self.rotate()
        if not self._journal.frames:
            self._born = self._clock()
        self._journal.append(frame, header.passes)
        if header.kind is Kind.END:
            self.ended = True
        else:
            self._next_frame = header.ordinal + 1

    def tick(self) -> None:
        """Seal what is old. To be called now and then. Raises OSError."""
        if self._journal.frames and self._clock() - self._born >= self._limits.seconds:
            self.rotate()

    def sync(self) -> None:
        """Make what was appended survive a loss of power. Raises OSError."""
        self._journal.sync()

    def close(self) -> None:
        """Seal the rest. Nothing may be appended after."""
        self._journal.close()
        self._seal(self._journal.path)

    def release(self) -> None:
        """Show to readers that no one writes any more."""
        self._lock.release()

    def _is_full(self) -> bool:
        journal = self._journal
        return journal.frames > 0 and (journal.passes >= self._limits.passes or journal.size >= self._limits.size)

    def rotate(self) -> None:
        """Go on in a new journal, unless this one is empty. The new one is there before the old one is sealed.

        Raises OSError.
        """
        if not self._journal.frames:
            return
        full = self._journal
        self._journal = JournalWriter(self.directory, self.rank, full.number + 1, self._next_frame)
        full.close()
        self._seal(full.path)


def seal_journal(path: Path) -> None:
    """Make a journal a segment. If that fails it stays a journal, which readers read as well."""
    try:
        write_segment(read_journal(path))
    except Exception:
        log.exception("can't seal %s; it stays as it is and can be read", path)
