"""Runs that are open, shared by everyone who looks at them.

However many browsers ask, a run is condensed once, and a question about it is answered once. A run that is being
recorded is condensed again now and then, by at most one thread, while questions go on being answered from the last
time: a slow disk or a slow browser slows nobody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from schedscope.engine.errors import RunNotFoundError, SchedscopeError
from schedscope.recorder.manifest import MANIFEST, read_manifest
from schedscope.recorder.run import Run
from schedscope.recorder.runs import RunInfo, find_runs
from schedscope.recorder.store import is_url
from schedscope.replay.series import Timeline

_LOG = logging.getLogger(__name__)
_OPEN = 3
"""Runs that are kept open."""
_MEMORY_MB = 600
"""Of a run while it is condensed; then it takes about a third of a kilobyte for each of its requests."""
_KEPT_ANSWERS = 400
_KEPT_TASKS = 24
_STANDING_S = 20.0
"""How long an answer about a run that grows stands, at least."""
_LISTED_S = 3.0
"""How long a list of runs is good for."""
_SHORTEST_S = 1.0
"""Between two looks at a run that is being recorded."""
_REST = 5.0
"""And at least so many times as long as the look took."""

_Answer = TypeVar("_Answer")


class Pending:
    """Stands for an answer that is being worked out."""


PENDING = Pending()
_WORKERS = ThreadPoolExecutor(2, "schedscope-work")


class Answers:
    """Answers by question. Who asks what is being worked out waits for it."""

    def __init__(self, most: int = _KEPT_ANSWERS) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, tuple[threading.Lock, list[Any]]] = OrderedDict()
        self._tasks: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, question: Hashable, find: Callable[[], _Answer]) -> _Answer:
        """The answer, found now or before. What `find` raises isn't kept."""
        with self._lock:
            lock, found = self._known.setdefault(question, (threading.Lock(), []))
            self._known.move_to_end(question)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        with lock:
            if not found:
                found.append(find())
            answer: _Answer = found[0]
            return answer

    def later(self, question: Hashable, find: Callable[[], _Answer]) -> _Answer | Pending:
        """The answer, if it is there; else somebody is set to work and nobody waits. Errors are raised to all."""
        with self._lock:
            task = self._tasks.get(question)
            if task is None:
                task = self._tasks[question] = _WORKERS.submit(find)
                while len(self._tasks) > _KEPT_TASKS:
                    self._tasks.popitem(last=False)
            self._tasks.move_to_end(question)
        if not task.done():
            return PENDING
        answer: _Answer = task.result()
        return answer


class _Last(NamedTuple):
    """An answer that stands."""

    generation: int
    found: float
    """When, on the monotonic clock."""
    took: float
    answer: Any


class Standing:
    """Answers that are worked out anew while the last ones stand: for what takes long of a run that grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[Hashable, _Last] = {}
        self._tasks: dict[Hashable, Future[_Last]] = {}

    def get(self, question: Hashable, generation: int, find: Callable[[], _Answer]) -> _Answer | Pending:
        """The last answer, perhaps of an earlier generation. What `find` raises is raised once, then tried again."""

        def work() -> _Last:
            begin = time.monotonic()
            answer = find()
            return _Last(generation, time.monotonic(), time.monotonic() - begin, answer)

        with self._lock:
            task = self._tasks.get(question)
            if task is not None and task.done():
                task = self._tasks.pop(question)
                self._last[question] = task.result()
                task = None
            last = self._last.get(question)
            if task is None and (last is None or self._is_old(last, generation)):
                self._tasks[question] = _WORKERS.submit(work)
        if last is None:
            return PENDING
        found: _Answer = last.answer
        return found

    def _is_old(self, last: _Last, generation: int) -> bool:
        rest = max(_STANDING_S, 2 * _REST * last.took)
        return last.generation != generation and time.monotonic() - last.found > rest


class Book:
    """A run as it was at one moment.

    Args:
        generation: grows with every look at a run that is being recorded.
    """

    def __init__(self, run: Run, timeline: Timeline, generation: int, took_s: float) -> None:
        self.run = run
        self.name = run.path.name
        self.timeline = timeline
        self.generation = generation
        self.took_s = took_s
        self.opened = time.monotonic()
        self.status = run.status
        self.answers = Answers()

    @property
    def live(self) -> bool:
        """It was being recorded."""
        return self.status == "recording"

    @property
    def due(self) -> bool:
        """There may be more of it by now."""
        rest = max(_SHORTEST_S, _REST * self.took_s)
        return self.live and time.monotonic() - self.opened > rest


class _Shelf:
    """Where one run stands."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.book: Book | None = None
        self.changed_ns = 0
        self.looking = False
        self.ended = False
        """What is recorded of the run is all there will be."""


class Library:
    """The runs of a log, and perhaps one from elsewhere.

    Args:
        log: a folder or URL of runs.
        given: a run that was named when the server was started; other runs come from `log` alone, by their names.
    """

    def __init__(self, log: str | Path, given: Path | None = None) -> None:
        self.log = log
        self._given = given
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._lock = threading.Lock()
        self.standing = Standing()
        self._listed: tuple[float, list[RunInfo]] | None = None
        """When it was made, on the monotonic clock."""
        self._list_lock = threading.Lock()

    def runs(self, *, fresh: bool = False) -> list[RunInfo]:
        """All of them, newest first; some seconds old, unless they have to be fresh. Raises UsageError, StoreError."""
        known = self._listed
        if fresh or known is None or not known[1]:
            return self._list()
        if time.monotonic() - known[0] > _LISTED_S and self._list_lock.acquire(blocking=False):
            # A long list takes long: nobody waits for it but who asks for it alone.
            self._list_lock.release()
            _WORKERS.submit(self._list_again)
        return known[1]

    def _list_again(self) -> None:
        try:
            self._list()
        except SchedscopeError as error:
            # The last list stands, and who asks for a fresh one is told.
            _LOG.warning("%s", error)

    def _list(self) -> list[RunInfo]:
        asked = time.monotonic()
        with self._list_lock:
            if self._listed is not None and self._listed[0] > asked:
                return self._listed[1]
            begun = time.monotonic()
            found = find_runs(self.log)
            if self._given is not None and all(info.path != self._given for info in found):
                found = [*(info for info in find_runs(self._given.parent) if info.path == self._given), *found]
            self._listed = (begun, found)
            return found

    def default(self) -> str:
        """The run that was given, else the newest in which anything was recorded. Raises RunNotFoundError."""
        if self._given is not None:
            return self._given.name
        found = [info for info in self.runs() if info.problem is None]
        recorded = [info for info in found if info.ranks]
        if not found:
            raise RunNotFoundError(f"no run in {self.log} yet; record one with: schedscope record -- serve")
        return (recorded or found)[0].path.name

    def path_of(self, name: str) -> Path:
        """Where a run is. Only names that were listed lead anywhere. Raises RunNotFoundError."""
        if self._given is not None and name == self._given.name:
            return self._given
        for fresh in (False, True):
            for info in self.runs(fresh=fresh):
                if info.path.name == name:
                    return info.path
        raise RunNotFoundError(f"there is no run {name!r} in {self.log}: it was deleted, or never was there")

    def book(self, name: str | None = None) -> Book:
        """A run, open. The first one to ask waits for it. Raises SchedscopeError."""
        wanted = name or self.default()
        path = self.path_of(wanted)
        shelf = self._shelf(wanted)
        with shelf.opening:
            try:
                self._check(shelf, path)
                if shelf.book is None:
                    shelf.book = self._open(path, 1)
            except SchedscopeError:
                shelf.book = None
                raise
            book = shelf.book
        if book.due or (shelf.ended and book.live):
            self._refresh(shelf, path, book)
        return book

    def _shelf(self, name: str) -> _Shelf:
        with self._lock:
            shelf = self._shelves.setdefault(name, _Shelf())
            self._shelves.move_to_end(name)
            while len(self._shelves) > _OPEN:
                self._shelves.popitem(last=False)
        return shelf

    def _check(self, shelf: _Shelf, path: Path) -> None:
        """Let go of a book whose run is gone, or another one by now. Raises RunNotFoundError, RunFormatError."""
        if is_url(str(self.log)):
            return
        try:
            changed = (path / MANIFEST).stat().st_mtime_ns
        except OSError:
            raise RunNotFoundError(f"run {path} is gone: it was deleted or moved") from None
        if changed != shelf.changed_ns:
            shelf.ended = read_manifest(path).status == "sealed"
            if shelf.book is not None and not shelf.book.live:
                shelf.book = None
            shelf.changed_ns = changed

    def _open(self, path: Path, generation: int) -> Book:
        begin = time.monotonic()
        run = Run.open(path)
        timeline = Timeline.open(run, memory_mb=_MEMORY_MB)
        return Book(run, timeline, generation, time.monotonic() - begin)

    def _refresh(self, shelf: _Shelf, path: Path, book: Book) -> None:
        """Look again, in a thread of its own; not if someone does already."""
        with self._lock:
            if shelf.looking:
                return
            shelf.looking = True
        threading.Thread(target=self._look_again, args=(shelf, path, book), daemon=True).start()

    def _look_again(self, shelf: _Shelf, path: Path, book: Book) -> None:
        newer: Book | None = None
        try:
            newer = self._open(path, book.generation + 1)
        except SchedscopeError as error:
            # Whoever asks next opens it anew, and is told.
            _LOG.warning("%s", error)
        finally:
            with shelf.opening:
                shelf.book = newer
            with self._lock:
                shelf.looking = False
