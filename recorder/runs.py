"""The runs of a folder or of a place in an object store: which there are, and which one is meant."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from schedscope.engine.errors import RunFormatError, RunNotFoundError, SchedscopeError
from schedscope.recorder.manifest import MANIFEST, read_manifest
from schedscope.recorder.mirror import mirror_of, mirror_run, mirror_runs
from schedscope.recorder.rank_files import list_ranks
from schedscope.recorder.run import Run
from schedscope.recorder.store import PARALLEL, is_url, shown_url

LOG_DIR_VARIABLE = "SCHEDSCOPE_LOG_DIR"

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run in a list."""

    path: Path
    name: str
    created: str
    """UTC, ISO 8601; empty if unreadable."""
    status: str
    """`recording`, `sealed`, `interrupted`, or `unreadable`."""
    ranks: int
    passes: int
    """Of all ranks."""
    requests: int
    """Ended ones, of all ranks."""
    bytes: int
    """On disk."""
    problem: str | None = None
    """Why it can't be read."""
    where: str = ""
    """Its path, or its URL."""


def default_log_dir() -> Path | str:
    """Where runs are: `$SCHEDSCOPE_LOG_DIR`, which may be a URL, else `./schedscope-logs`."""
    return log_place(os.environ.get(LOG_DIR_VARIABLE) or "schedscope-logs")


def log_place(text: str | Path) -> Path | str:
    """A place of runs: a directory, or the URL of one in an object store as it is."""
    return text if isinstance(text, str) and is_url(text) else Path(text)


def find_runs(log_dir: str | Path | None = None) -> list[RunInfo]:
    """The runs of a directory or URL, newest first. One that can't be read is listed as such; no directory, no runs.

    Raises UsageError, StoreError for a URL that can't be looked at.
    """
    place = _log_dir(log_dir)
    paths = _run_paths(place)
    if not is_url(place):
        return [_info(path) for path in paths]
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(_info, paths))


def resolve_run(text: str | Path | None = None, log_dir: str | Path | None = None) -> Path:
    """The directory of a run: by path or URL, by name (the newest of that name), or None for the newest
    in which anything was decided, or still may be; moments that were cut out of other runs come behind those.

    A name is the directory's, with or without its date. Raises RunNotFoundError; for a URL also UsageError, StoreError.
    """
    if is_url(text):
        return mirror_run(text).path
    directory = _log_dir(log_dir)
    if text is not None and (Path(text) / MANIFEST).is_file():
        return Path(text)
    paths = _run_paths(directory)
    if text is None:
        if paths:
            return next(filter(_has_something, sorted(paths, key=_is_cut_out)), paths[0])
        raise RunNotFoundError(f"no run in {_shown(directory)}; record one with: schedscope record -- COMMAND")
    for path in paths:
        if path.name == str(text):
            return path
    for path in paths:
        if _name(path) == str(text):
            return path
    shown = ", ".join(path.name for path in paths[:_SHOWN]) or "no run"
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    raise RunNotFoundError(
        f"no run {str(text)!r}: neither a run's directory nor a run in {_shown(directory)}, which has {shown}{more}"
    )


def _has_something(path: Path) -> bool:
    """Whether anything was recorded in a run, or still may be. One that can't be read is not passed over in silence."""
    if not list_ranks(path):
        return False
    try:
        run = Run.open(path)
        return run.manifest.status != "sealed" or any(
            run.passes(rank).count or run.table("requests", rank, ["rid"]).num_rows for rank in run.ranks
        )
    except RunFormatError:
        return True


def _is_cut_out(path: Path) -> bool:
    try:
        return read_manifest(path).kept is not None
    except SchedscopeError:
        return False


def _log_dir(log_dir: str | Path | None) -> Path | str:
    return default_log_dir() if log_dir is None else log_place(log_dir)


def _shown(place: Path | str) -> str:
    return shown_url(place) if isinstance(place, str) else str(place)


def _run_paths(place: Path | str) -> list[Path]:
    """Run directories, newest first."""
    if isinstance(place, str):
        paths = [mirror.path for mirror in mirror_runs(place)]
    else:
        paths = [path.parent for path in place.glob(f"*/{MANIFEST}")]
    return sorted(paths, key=_age, reverse=True)


def _age(path: Path) -> tuple[str, str]:
    try:
        return read_manifest(path).created, path.name
    except SchedscopeError:
        return "", path.name


def _name(path: Path) -> str | None:
    try:
        return read_manifest(path).name
    except SchedscopeError:
        return None


def _size(path: Path) -> int:
    """Bytes of all files on disk; while a run is recorded they come and go. Rings are links to memory."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(folder, name).lstat().st_size
    return size


def _info(path: Path) -> RunInfo:
    mirror = mirror_of(path)
    where = str(path) if mirror is None else shown_url(mirror.url)
    size = 0
    try:
        size = _size(path) if mirror is None else mirror.size()
        run = Run.open(path)
        totals = run.totals
        return RunInfo(
            path=path,
            name=run.manifest.name,
            created=run.manifest.created,
            status=run.status,
            ranks=len(totals),
            passes=sum(rows.get("passes", 0) for rows in totals.values()),
            requests=sum(rows.get("requests", 0) for rows in totals.values()),
            bytes=size,
            where=where,
        )
    except SchedscopeError as error:
        return RunInfo(path, path.name, "", "unreadable", 0, 0, 0, size, str(error), where)
