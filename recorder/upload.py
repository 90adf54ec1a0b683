"""Recording into an object store: what a companion seals on this machine is copied there, behind its back.

The store is made to hold what a run's directory holds: new segments are added, each with its index last; those that
were merged or expired are taken away, each with its index first; the manifest says `sealed` when all else is done. It
is the directory that says what to do, so it doesn't matter when, how often or by which process that is tried.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import msgspec
from schedscope.engine.errors import SchedscopeError, StoreError
from schedscope.recorder.listing import Directory
from schedscope.recorder.manifest import MANIFEST, create_run, read_manifest
from schedscope.recorder.mirror import ALIVE_S, INDEX
from schedscope.recorder.parcel import Parcel, spool_dir
from schedscope.recorder.rank_files import list_ranks
from schedscope.recorder.rids import NAME as RIDS
from schedscope.recorder.segment import Segment
from schedscope.recorder.store import PARALLEL, Store, is_url, shown_url

PATIENCE_S = 30.0
"""How long the end of a recording waits for a store that doesn't answer."""

_TICK_S = 1.0
_RENEW_S = ALIVE_S / 4
_FIRST_S = 5.0
_LONGEST_PAUSE_S = 60.0
_STUCK_S = 600.0
"""A request that neither comes back nor fails."""
_NICE = 5
"""Behind a busy server, yet not so far that it would hold up the threads beside it, which receive."""

log = logging.getLogger("schedscope.recorder")


class Left(NamedTuple):
    """What could not be uploaded."""

    path: Path
    """The parcel."""
    url: str
    files: int
    size: int
    """Bytes."""
    reason: str

    def __str__(self) -> str:
        what = f"{self.files} files ({self.size / 1e6:.1f} MB) could not be uploaded to {self.url}: {self.reason}."
        return f"{what} They are in {self.path}; try again with: schedscope upload"


class Uploader:
    """Copies a parcel's runs to their store, in a thread that nobody waits for while they are recorded."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.shown = shown_url(parcel.address.url)
        self._store = Store(parcel.address.url, attempts=2)
        self._runs: dict[Path, _RunUpload] = {}
        self._pool = ThreadPoolExecutor(PARALLEL, "schedscope-upload", _step_back)
        self._wake = threading.Event()
        self._first = threading.Event()
        """It was tried once."""
        self._finishing = False
        self._done = threading.Event()
        self._complete = False
        self._error: Exception | None = None
        self._progress = time.monotonic()
        """When the store last took something, monotonic clock, s."""
        self._thread = threading.Thread(target=self._work, name="schedscope-uploader", daemon=True)

    def start(self, first_s: float = _FIRST_S) -> None:
        """Begin. Waits a moment for what the store says first: raises StoreError if it will never take anything."""
        self._thread.start()
        self._first.wait(first_s)
        error = self._error
        if isinstance(error, StoreError) and error.final:
            self._stop()
            self.parcel.release()
            raise error
        if error is not None or not self._first.is_set():
            why = error or f"{self.shown} doesn't answer"
            log.warning("can't upload now: %s; what is recorded is kept in %s", why, self.parcel.path)

    def finish(self, patience_s: float = PATIENCE_S) -> Left | None:
        """Upload the rest, and remove the parcel when all of it is there. Returns what is left, and leaves it.

        Args:
            patience_s: how long to go on while the store takes nothing.
        """
        self._finishing = True
        self._progress = time.monotonic()
        self._wake.set()
        # Ctrl-C: it stays where it is.
        with contextlib.suppress(KeyboardInterrupt):
            while not self._done.wait(0.05):
                silent = time.monotonic() - self._progress
                if silent > (patience_s if self._error is not None else max(patience_s, _STUCK_S)):
                    break
        self._stop()
        if self._complete:
            self.parcel.remove()
            return None
        files, size = self._waiting()
        reason = str(self._error) if self._error is not None else "it was interrupted"
        self.parcel.release()
        return Left(self.parcel.path, self.shown, files, size, reason)

    def discard(self) -> None:
        """Forget the parcel, and what is in the store of it, as well as that works."""
        self._stop()
        self._thread.join(_FIRST_S)
        for upload in self._runs.values():
            with contextlib.suppress(StoreError):
                self._store.remove_all(upload.name)
        self.parcel.remove()

    def _stop(self) -> None:
        self._done.set()
        self._wake.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        _step_back()
        failures = 0
        while not self._done.is_set():
            self._wake.clear()
            finishing = self._finishing
            pause = _TICK_S
            try:
                complete = self._sync()
                if self._error is not None:
                    log.warning("%s takes what is recorded again", self.shown)
                self._error, failures = None, 0
                if finishing:
                    self._complete = complete
                    self._error = None if complete else SchedscopeError("the run was not sealed")
                    self._done.set()
            except Exception as error:
                failures += 1
                pause = min(2.0**failures, _LONGEST_PAUSE_S if not finishing else 4.0)
                self._fail(error, finishing=finishing)
            self._first.set()
            if not self._done.is_set():
                self._wake.wait(pause)

    def _fail(self, error: Exception, *, finishing: bool) -> None:
        """Say so once: it may take hours until the store answers again."""
        if self._done.is_set():
            return
        if self._error is None and self._first.is_set() and not finishing:
            log.warning("can't upload now: %s; what is recorded is kept in %s", error, self.parcel.path)
        if not isinstance(error, (SchedscopeError, OSError)):
            log.exception("the upload failed; it is tried again")
        # Without what it holds on to.
        self._error = error.with_traceback(None)
        if finishing and isinstance(error, StoreError) and error.final:
            self._done.set()

    def _sync(self) -> bool:
        """Make the store hold what the parcel holds. Returns whether that is all there will be."""
        complete = True
        for run_dir in self.parcel.runs:
            upload = self._runs.get(run_dir)
            if upload is None:
                upload = _RunUpload(self._store, run_dir, self.parcel.name_of(run_dir), self._advance)
                # What is being cut out of the recorded run is not a run before it is sealed.
                if upload.name != run_dir.name and read_manifest(run_dir).status != "sealed":
                    continue
                self._runs[run_dir] = upload
            complete &= upload.sync(self._pool)
        return complete

    def _advance(self) -> None:
        self._progress = time.monotonic()

    def _waiting(self) -> tuple[int, int]:
        """How many files of the parcel are not in the store, and their bytes."""
        sizes: list[int] = []
        for run_dir in self.parcel.runs:
            upload = self._runs.get(run_dir)
            files = {*run_dir.rglob("*")} - {*run_dir.glob(f"rank=*/{RIDS}")}  # which readers of a store do without
            left = [path for path in files if not (upload and upload.has(path.parent))]
            sizes += [path.stat().st_size for path in left if path.is_file() and not path.is_symlink()]
        return len(sizes), sum(sizes)


class _Status(msgspec.Struct):
    """What an upload has to know of a manifest."""

    status: str


class _RunUpload:
    """One run, and what of it is in the store."""

    def __init__(self, store: Store, run_dir: Path, name: str, advance: Callable[[], None]) -> None:
        self.name = name
        self._store = store
        self._run_dir = run_dir
        self._advance = advance
        self._ranks: dict[int, _RankUpload] = {}
        self._manifest = b""
        self._renewed = 0.0
        self._complete = False

    def sync(self, pool: ThreadPoolExecutor) -> bool:
        """Bring the store up to date. Returns whether the run is sealed. Raises StoreError."""
        if self._complete:
            return True
        manifest = (self._run_dir / MANIFEST).read_bytes()
        sealed = msgspec.json.decode(manifest, type=_Status).status == "sealed"
        if not sealed and manifest != self._manifest:
            self._write_manifest(manifest)
        self._renew()
        for rank in list_ranks(self._run_dir):
            if rank not in self._ranks:
                self._ranks[rank] = _RankUpload(self._store, self._run_dir / f"rank={rank}", self.name, self._advance)
        # Each to its end, whatever becomes of the others.
        futures = [pool.submit(rank.sync) for rank in self._ranks.values()]
        while wait(futures, _TICK_S).not_done:
            self._renew()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        if sealed:
            self._write_manifest(manifest)
            self._complete = True
        return sealed

    def has(self, segment: Path) -> bool:
        """Whether a segment is in the store, or the manifest of a run that is complete."""
        if segment == self._run_dir:
            return self._complete
        return any(segment.name in rank.known for rank in self._ranks.values() if rank.directory == segment.parent)

    def _renew(self) -> None:
        """Write the manifest once more as it was: that shows that its recorder lives."""
        if self._manifest and time.monotonic() - self._renewed >= _RENEW_S:
            self._write_manifest(self._manifest)

    def _write_manifest(self, manifest: bytes) -> None:
        self._store.write(f"{self.name}/{MANIFEST}", manifest)
        self._manifest, self._renewed = manifest, time.monotonic()
        self._advance()


class _RankUpload:
    """One rank's segments."""

    def __init__(self, store: Store, directory: Path, run: str, advance: Callable[[], None]) -> None:
        self.directory = directory
        self.known: set[str] = set()
        """Segments that are in the store whole."""
        self._store = store
        self._name = f"{run}/{directory.name}"
        self._advance = advance
        self._listing = Directory(directory)
        self._looked = False
        self._torn: set[str] = set()
        """Directories in the store in which something of a segment may be."""

    def sync(self) -> None:
        """Add what is new, in its order, so that a reader never sees a hole; then take away what is gone."""
        if not self._looked:
            self._look()
        listing = self._listing.look()
        for name in listing.segments:
            if name not in self.known:
                self._add(name)
        here = {*listing.segments, *listing.merged}
        for name in sorted((self.known | self._torn) - here):
            self._store.remove(f"{self._name}/{name}/{INDEX}")
            self._store.remove_all(f"{self._name}/{name}")
            self.known.discard(name)
            self._torn.discard(name)
            self._advance()

    def _look(self) -> None:
        """What an earlier process uploaded. Whatever has another name than a segment is none of our business."""
        for entry in self._store.files(self._name):
            segment, _, file = entry.name.partition("/")
            if Segment.named(Path(segment)) is not None:
                (self.known if file == INDEX else self._torn).add(segment)
        self._torn -= self.known
        self._looked = True

    def _add(self, name: str) -> None:
        self._torn.add(name)
        try:
            for file in _index_last(self.directory / name):
                self._store.upload(f"{self._name}/{name}/{file.name}", file, self._advance)
        except FileNotFoundError:
            return  # it was merged or has expired; the next look tells
        self.known.add(name)
        self._torn.discard(name)


def begin_run(
    log_dir: str | Path, name: str, command: Sequence[str] | None = None, spool: Path | None = None
) -> tuple[Path, Uploader | None]:
    """Make the directory of a new run: in a folder, or, for a URL, in a new parcel, with its uploader at work.

    Raises UsageError where that can't be done, StoreError for a store that will never take it.
    """
    words = None if command is None else list(command)
    if not is_url(log_dir):
        return create_run(log_dir, name, command=words), None
    parcel = Parcel.create(spool or spool_dir(), log_dir)
    uploader = Uploader(parcel)
    try:
        run_dir = create_run(parcel.path, name, command=words, suffix=parcel.suffix)
        uploader.start()
    except SchedscopeError:
        parcel.remove()
        raise
    return run_dir, uploader


def _step_back() -> None:
    """Let the server go first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _index_last(segment: Path) -> list[Path]:
    """A segment's files. Raises FileNotFoundError if it is gone."""
    files = [path for path in segment.iterdir() if not path.name.startswith(".")]
    return sorted(files, key=lambda path: (path.name == INDEX, path.name))
