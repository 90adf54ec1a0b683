"""The sealer: makes journals Parquet, in the background, and keeps or lets go of what is sealed."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from schedscope.engine.errors import SchedscopeError
from schedscope.recorder import mentions
from schedscope.recorder.compact import tidy
from schedscope.recorder.frame import Rows
from schedscope.recorder.journal import SORTED, Journal, read_journal
from schedscope.recorder.keep import expire, freeze
from schedscope.recorder.manifest import Kept, Manifest, iso
from schedscope.recorder.options import Options
from schedscope.recorder.rank_log import seal_journal
from schedscope.recorder.segment import Segment, write_segment

_NICE = 19

Follower = Callable[[Rows], Rows]
"""Sees all rows of a rank, journal by journal, before they are sealed; what it returns is sealed with them, its
`passes` and `decisions` in their place."""
Follow = Callable[[Manifest, int], Follower | None]
"""Makes one for a rank; None: that rank needs none."""

log = logging.getLogger("schedscope.recorder")


class Moment(NamedTuple):
    """A moment that is to be kept with what lies around it."""

    reason: str
    at: str
    """UTC, ISO 8601; for people. All else goes by the monotonic clock, which never jumps."""
    noticed: float
    due: float
    """When all that follows it has been recorded."""


class Sealer:
    """Works through what it is given in a thread of low priority, in order. What fails stays as it is, and readable.

    Args:
        manifest: the run's, as it is then.
    """

    def __init__(
        self, run_dir: Path, options: Options, follow: Follow | None, manifest: Callable[[], Manifest]
    ) -> None:
        self.kept = 0
        """Moments, also those that are still to come."""
        self._run_dir = run_dir
        self._options = options
        self._follow = follow
        self._manifest = manifest
        self._triggers = list(options.triggers)
        self._followers: dict[int, Follower | None] = {}
        self._waiting: queue.SimpleQueue[Path | Moment | None] = queue.SimpleQueue()
        self._sealed_at: dict[Path, float] = {}
        self._lock = threading.RLock()
        self._coming: Moment | None = None
        """It is not due."""
        self._due = 0
        """Moments that are, and are not kept yet."""
        self._is_full = False
        """As many are kept as may be, and that was said."""
        self._failed: list[Path] = []
        """Journals that could not be sealed."""
        self._is_deleted = False
        """The run's directory is gone, and that was said."""
        self._thread = threading.Thread(target=self._work, name="schedscope-sealer", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def put(self, item: Path | Moment) -> None:
        """Have a journal sealed that nobody writes to any more, or a moment kept. Any thread may call this."""
        self._waiting.put(item)

    def keep(self, reason: str) -> bool:
        """Make a run of its own of what was recorded around this moment, as soon as the time after it is over.

        Moments within that time share one. Any thread may call this, also one that was interrupted in here by a signal.
        Returns False if too many were kept.
        """
        with self._lock:
            if self._coming is not None:
                return True
            most = self._options.most_kept
            if self.kept >= most:
                if not self._is_full:
                    log.warning("%d moments are kept; no more will be (--keep-at-most)", most)
                    self._is_full = True
                return False
            self.kept += 1
            now = time.monotonic()
            self._coming = Moment(reason, iso(datetime.now(UTC)), now, now + self._options.after_s)
            return True

    def take_due(self, now: float) -> Moment | None:
        """The moment whose time after is over: to be put behind everything that was recorded up to now."""
        with self._lock:
            due = self._coming
            if due is None or due.due > now:
                return None
            self._coming = None
            self._due += 1
        return due

    def stop(self, directories: Sequence[Path]) -> None:
        """Finish what is waiting, then try again what failed, and merge what is small in the directories of ranks."""
        self._waiting.put(None)
        self._thread.join()
        for path in self._failed:
            if path.exists():
                seal_journal(path)
        if not self._options.is_flight_recorder:
            for directory in directories:
                tidy(directory, grace_s=0.0, final=True)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (item := self._waiting.get()) is not None:
            try:
                if isinstance(item, Moment):
                    self._freeze(item)
                else:
                    self._seal(item)
            except (OSError, SchedscopeError) as error:
                self._warn(item, error)
            except Exception:
                log.exception("can't seal or keep %s; what is recorded can be read as it is", item)

    def _warn(self, item: Path | Moment, error: Exception) -> None:
        if isinstance(item, Moment):
            log.warning("can't keep what lies around %s (%s): %s", item.at, item.reason, error)
        elif self._run_dir.exists():
            log.warning("can't seal %s now; it can be read as it is: %s", item, error)
            self._failed.append(item)
        elif not self._is_deleted:
            log.warning("%s was deleted: what is recorded from now on is lost; serving goes on", self._run_dir)
            self._is_deleted = True

    def _seal(self, path: Path) -> None:
        journal = read_journal(path)
        self._add_rows(journal)
        self._sealed_at[write_segment(journal).path] = time.monotonic()
        for trigger in self._triggers.copy():
            try:
                reason = trigger.check(journal.rows, journal.rank, self._manifest().config_of(journal.rank))
            except Exception as error:
                log.warning("--keep-when %s: it is not looked at any more: %s", trigger.text, error)
                self._triggers.remove(trigger)
                continue
            if reason is not None:
                self.keep(reason)
        with self._lock:
            needed = self._coming is not None or self._due
        if self._options.keep is not None and not needed:
            for segment in expire(self._run_dir, journal.rank, self._options.keep, self._age):
                self._sealed_at.pop(segment.path, None)
        if self._options.is_flight_recorder:
            with contextlib.suppress(OSError, SchedscopeError):  # it can be done without
                mentions.update(path.parent)
        else:
            tidy(path.parent)
            self._sealed_at = {path: at for path, at in self._sealed_at.items() if path.exists()}

    def _add_rows(self, journal: Journal) -> None:
        """Add what the rank's follower makes of a journal."""
        if journal.rank not in self._followers:
            self._followers[journal.rank] = self._follow and self._follow(self._manifest(), journal.rank)
        follower = self._followers[journal.rank]
        if follower is not None:
            for table, rows in follower(journal.rows).items():
                journal.rows[table] = rows if table in SORTED else sorted([*journal.rows.get(table, ()), *rows])

    def _age(self, segment: Segment) -> float:
        """Seconds since it was sealed."""
        sealed_at = self._sealed_at.get(segment.path)
        return 0.0 if sealed_at is None else time.monotonic() - sealed_at  # merged: as young as it can be

    def _freeze(self, moment: Moment) -> None:
        kept = Kept(
            run=self._run_dir.name,
            reason=moment.reason,
            at=moment.at,
            before_s=self._options.before_s,
            after_s=self._options.after_s,
        )
        try:
            since_s = time.monotonic() - moment.noticed + self._options.before_s
            path = freeze(self._run_dir, kept, self._age, since_s)
        finally:
            with self._lock:
                self._due -= 1
        log.warning("kept %s: %s", path, moment.reason)
