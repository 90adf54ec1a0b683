"""A flight recorder keeps the last minutes or bytes, and what lay around an event for good.

What is kept or deleted is whole segments. What is kept for good begins with one that holds a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from schedscope.engine.errors import UsageError
from schedscope.recorder.manifest import Kept, Manifest, create_run, read_manifest, sealed, write_manifest
from schedscope.recorder.rank_files import list_ranks, list_segments, summarize
from schedscope.recorder.rank_log import rank_dir
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import Segment

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


class Keep(NamedTuple):
    """How much of a run is kept; None: no limit of that kind."""

    seconds: float | None = None
    size: int | None = None
    """Bytes."""

    def __str__(self) -> str:
        return f"{self.seconds:g} s" if self.seconds is not None else f"{self.size} bytes"


def parse_keep(text: str) -> Keep:
    """What `10m`, `2h`, `500MB` or `2GiB` says. Raises UsageError."""
    keep = _amount(text)
    if keep is not None:
        return keep
    raise UsageError(f"--keep {text}: expected a time such as 10m (s, m, h, d) or a size such as 2GB (KB, MB, GB, TB)")


def parse_size(option: str, text: str) -> int:
    """Bytes that `32MB` or `64MiB` says. Raises UsageError, naming the option."""
    size = _amount(text)
    if size is None or size.size is None:
        raise UsageError(f"{option} {text}: expected a size such as 32MB (KB, MB, GB, KiB, MiB, GiB)")
    return size.size


def _amount(text: str) -> Keep | None:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not float(match[1]):
        return None
    amount, unit = float(match[1]), match[2]
    if unit in _SECONDS:
        return Keep(seconds=amount * _SECONDS[unit])
    return Keep(size=int(amount * _BYTES[unit.upper()])) if unit.upper() in _BYTES else None


def expire(run_dir: Path, rank: int, keep: Keep, age: Callable[[Segment], float]) -> list[Segment]:
    """Delete a rank's oldest segments that `keep` doesn't hold, but never the newest one with passes. Returns them.

    Args:
        age: seconds since a segment was sealed.
    """
    segments = list_segments(run_dir, rank)
    segments = segments[: max((i for i, s in enumerate(segments) if s.first_pass is not None), default=0)]
    gone = 0
    if keep.seconds is not None:
        gone = sum(age(segment) > keep.seconds for segment in segments)
    if keep.size is not None:
        left = keep.size - _size(rank_dir(run_dir, rank))
        while left < 0 and gone < len(segments):
            left += _size(segments[gone].path)
            gone += 1
    for segment in segments[:gone]:
        # A reader sees all of it or nothing.
        hidden = segment.path.with_name(f".{segment.path.name}.expired")
        segment.path.rename(hidden)
        shutil.rmtree(hidden)
    return segments[:gone]


def freeze(run_dir: Path, kept: Kept, age: Callable[[Segment], float], since_s: float) -> Path:
    """Make a run of its own of what was sealed in the last `since_s` seconds, and of what it takes to re-run that.

    Shares the files' space.
    """
    manifest = read_manifest(run_dir)
    path = create_run(run_dir.parent, f"{manifest.name}-kept", command=manifest.command)
    own = read_manifest(path)
    for rank in list_ranks(run_dir):
        target = rank_dir(path, rank)
        target.mkdir()
        for segment in _replayable(list_segments(run_dir, rank), lambda segment: age(segment) <= since_s):
            shutil.copytree(segment.path, target / segment.path.name, copy_function=_share)
    facts = {name: getattr(manifest, name) for name in ("source", "ranks", "config", "rank_configs", "model", "detail")}
    frozen: Manifest = msgspec.structs.replace(own, **facts, source_gaps=manifest.source_gaps, kept=kept)
    write_manifest(path, sealed(frozen, *summarize(path, frozen)))
    return path


def _replayable(segments: Sequence[Segment], is_wanted: Callable[[Segment], bool]) -> Sequence[Segment]:
    """Those that are wanted, from the last one on, up to their first, that has a checkpoint of its own."""
    first = next((i for i, segment in enumerate(segments) if is_wanted(segment)), len(segments))
    if first == len(segments):
        return ()
    while first and not _stands_alone(segments[first]):
        first -= 1
    return segments[first:]


def _stands_alone(segment: Segment) -> bool:
    """Whether it holds a checkpoint that needs nothing before it."""
    rows = segment.read(TABLES["checkpoints"], ("seq", "since"))
    return any(seq == since for seq, since in zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _size(path: Path) -> int:
    """Bytes on disk: without the ring, which is a link to memory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _share(source: str, target: str) -> None:
    """The same file under a second name, or a copy where that can't be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
