"""Reading runs in an object store: a directory of this machine in which a run's files appear when they are needed.

Readers work on that directory as on any run's. What is new to them is asked of the store: which runs and segments
there are, and the manifest. All else never changes once it is there, so it is fetched once and kept in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from schedscope.engine.errors import RunFormatError, RunNotFoundError, SchedscopeError
from schedscope.recorder.manifest import MANIFEST, write_file
from schedscope.recorder.store import Store, join_url, shown_url, split_url

ALIVE_S = 60.0
"""A recorder that didn't renew its manifest for this long is gone."""
RELIST_S = 1.0
"""How long an answer of the store about a run that is being recorded counts as new."""
CACHE_BYTES = 20 * 10**9
INDEX = "index.json"
"""What makes a directory of files a segment; it comes last and goes first."""

_MARKER = ".mirror.json"
_PARALLEL = 16
_LISTINGS = 10
_IN_USE_S = 3600.0
"""What was fetched this recently is not removed from the cache."""


class _Origin(msgspec.Struct, frozen=True):
    """What a mirror's marker holds."""

    url: str


class _Facts(msgspec.Struct, frozen=True):
    """What a mirror has to know of a manifest."""

    created: str = ""
    status: str = ""
    ranks: list[int] = []


class _Listed(NamedTuple):
    """A rank's segments."""

    names: tuple[str, ...]
    at: float
    """Monotonic clock, s; infinite for those of a run that is complete."""


class Mirror:
    """A run in an object store. Any thread may call.

    Methods that ask the store raise StoreError, and SchedscopeError where the cache can't be written.
    """

    def __init__(self, path: Path, url: str) -> None:
        """Use `mirror_of` or `mirror_run`."""
        self.path = path
        self.url = url
        self._store = Store(url)
        self._refreshing = threading.Lock()
        self._facts = _Facts()
        self._refreshed = -math.inf
        self._renewed = 0.0
        """When the recorder last wrote the manifest, Unix time, s."""
        self._listed: dict[str, _Listed] = {}

    def refresh(self, *, anew: bool = False) -> None:
        """Take over the manifest, if it may have changed. Raises RunNotFoundError if there is none.

        Args:
            anew: don't go by what the store said a moment ago.
        """
        with self._refreshing:
            if not anew and (self._facts.status == "sealed" or time.monotonic() - self._refreshed < RELIST_S):
                return
            try:
                data = self._store.read(MANIFEST)
            except FileNotFoundError:
                self._store.check()
                raise RunNotFoundError(f"{self._store.shown} is not a run: it has no {MANIFEST}") from None
            facts = _facts(data)
            if facts.status != "sealed":
                entry = self._store.find(MANIFEST)
                self._renewed = entry.changed if entry is not None else 0.0
            before = self._facts
            self._take_over(data, facts)
            self._refreshed = time.monotonic()
            if anew or facts.status != before.status:
                for rank, known in list(self._listed.items()):
                    self._listed[rank] = known._replace(at=-math.inf)

    def recall(self) -> bool:
        """Go by the manifest that is here, if it is of a complete run: then it is the last one. Returns whether."""
        with self._refreshing, contextlib.suppress(OSError):
            facts = _facts((self.path / MANIFEST).read_bytes())
            if facts.status == "sealed":
                self._facts = facts
                return True
        return False

    def is_recorded(self) -> bool:
        """Whether its recorder lives, as far as the store tells."""
        self.refresh()
        return self._facts.status != "sealed" and time.time() - self._renewed < ALIVE_S

    def segments(self, rank: str) -> tuple[str, ...]:
        """Names of the directories of a rank that have an index, ascending; the same object while nothing changes."""
        known = self._listed.get(rank)
        if known is not None and time.monotonic() - known.at < RELIST_S:
            return known.names
        status = self._facts.status
        complete = status == "sealed"
        names = self._names(rank)
        # A list of many objects isn't of a single moment. Two equal ones in a row can't have missed the same.
        previous = known.names if known is not None else None
        for _ in range(0 if complete else _LISTINGS):
            if names == previous:
                break
            previous, names = names, self._names(rank)
        if known is not None and names == known.names:
            names = known.names
        if status == self._facts.status:
            self._listed[rank] = _Listed(names, math.inf if complete else time.monotonic())
        return names

    def fetch(self, paths: Iterable[Path]) -> None:
        """Have these files here. Raises FileNotFoundError if a segment is gone, RunFormatError for a missing file."""
        missing = [path for path in paths if not path.exists()]
        if len(missing) == 1:
            self._fetch(missing[0])
        elif missing:
            _make_room(cache_dir() / "mirror")
            with ThreadPoolExecutor(_PARALLEL, "schedscope-fetch") as pool:
                list(pool.map(self._fetch, missing))

    def size(self) -> int:
        """Bytes in the store."""
        return sum(entry.size for entry in self._store.files())

    def _take_over(self, data: bytes, facts: _Facts) -> None:
        path = self.path / MANIFEST
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if path.exists() else None
            if before is not None and _facts(before).created != facts.created:
                # Another run of the same name, long ago.
                for directory in self.path.glob("rank=*"):
                    shutil.rmtree(directory, ignore_errors=True)
            for rank in facts.ranks:
                (self.path / f"rank={rank}").mkdir(exist_ok=True)
            if before != data:
                write_file(path, data)
        self._facts = facts

    def _names(self, rank: str) -> tuple[str, ...]:
        found = (entry.name.split("/") for entry in self._store.files(rank))
        return tuple(sorted(parts[0] for parts in found if len(parts) == 2 and parts[1] == INDEX))

    def _fetch(self, path: Path) -> None:
        name = path.relative_to(self.path).as_posix()
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with _writing(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._store.download(name, temporary)
                temporary.replace(path)
            except FileNotFoundError:
                pass
            else:
                return
            finally:
                temporary.unlink(missing_ok=True)
        self._say_missing(path, name)

    def _say_missing(self, path: Path, name: str) -> None:
        self._listed.pop(path.parent.parent.name, None)
        if path.name != INDEX and self._store.find(f"{name.rpartition('/')[0]}/{INDEX}") is not None:
            raise RunFormatError(f"{shown_url(join_url(self.url, name))}: there is no such file")
        shutil.rmtree(path.parent, ignore_errors=True)
        raise FileNotFoundError(f"{path}: the segment is gone")


_mirrors: dict[tuple[int, Path], Mirror] = {}
_making = threading.Lock()


def mirror_of(run_dir: Path) -> Mirror | None:
    """The mirror that a run's directory is; None for a run that lies where it is."""
    marker = run_dir / _MARKER
    if not marker.exists():
        return None
    # A forked process has no use for its parent's connections.
    key = (os.getpid(), run_dir)
    with _making:
        if key not in _mirrors:
            try:
                _mirrors[key] = Mirror(run_dir, msgspec.json.decode(marker.read_bytes(), type=_Origin).url)
            except (OSError, msgspec.DecodeError) as error:
                raise RunFormatError(f"{marker}: can't be read: {error}") from None
        return _mirrors[key]


def mirror_run(url: str, *, recall: bool = False) -> Mirror:
    """A mirror of the run at a URL, with its manifest. Raises RunNotFoundError, UsageError, StoreError.

    Args:
        recall: a run that was complete when it was last looked at is still there: don't ask.
    """
    above, name = split_url(url)
    Store(url)
    if not name or name.startswith("."):
        raise RunNotFoundError(f"{shown_url(url)} is not a run")
    path = _mirror_dir(above) / name
    marker = path / _MARKER
    if not marker.exists():
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            write_file(marker, msgspec.json.encode(_Origin(url)))
            marker.chmod(0o600)  # a URL may hold a password
    mirror = mirror_of(path)
    assert mirror is not None
    if not (recall and mirror.recall()):
        mirror.refresh(anew=True)
    return mirror


def mirror_runs(url: str) -> list[Mirror]:
    """Mirrors of all runs below a URL, by name. Errors as `mirror_run`."""
    store = Store(url)
    names = [name for name in store.directories() if not name.startswith(".")]
    if not names:
        store.check()
        return []
    with ThreadPoolExecutor(_PARALLEL, "schedscope-fetch") as pool:
        found = list(pool.map(lambda name: _if_there(join_url(url, name)), names))
    return [mirror for mirror in found if mirror is not None]


def bring(path: Path) -> None:
    """Fetch a segment's file if it is one of a mirror and not here yet. Errors as of `Mirror.fetch`."""
    if path.exists() or len(path.parents) < 3:
        return
    mirror = mirror_of(path.parents[2])
    if mirror is not None:
        mirror.fetch([path])


def cache_dir() -> Path:
    """Where schedscope keeps what it could get again: `$XDG_CACHE_HOME/schedscope`, else `~/.cache/schedscope`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedscope"


def _if_there(url: str) -> Mirror | None:
    try:
        return mirror_run(url, recall=True)
    except RunNotFoundError:
        return None


def _mirror_dir(url: str) -> Path:
    return cache_dir() / "mirror" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _facts(manifest: bytes) -> _Facts:
    try:
        return msgspec.json.decode(manifest, type=_Facts)
    except msgspec.DecodeError:
        return _Facts()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SchedscopeError(f"{path}: can't write the cache: {error}") from None


@cache
def _make_room(root: Path, limit: int = CACHE_BYTES) -> None:
    """Remove the oldest files of the cache beyond its size; once per process."""
    files = []
    for path in root.glob("*/*/rank=*/*/*.parquet"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            files.append((facts.st_mtime, facts.st_size, path))
    excess = sum(size for _, size, _ in files) - limit
    for changed, size, path in sorted(files):
        if excess <= 0 or time.time() - changed < _IN_USE_S:
            return
        path.unlink(missing_ok=True)
        excess -= size
