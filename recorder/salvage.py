"""What killed processes left in memory is brought to disk, and the memory given back.

Such a run can be read without this: readers look into its rings. But memory is scarce, and gone when the machine is
restarted.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec
from schedscope.engine.errors import SchedscopeError
from schedscope.recorder.frame import Kind
from schedscope.recorder.journal import JournalWriter
from schedscope.recorder.listing import Directory
from schedscope.recorder.lock import hold
from schedscope.recorder.manifest import read_manifest, sealed, write_manifest
from schedscope.recorder.parts import is_recorded, list_ranks, read_parts, summarize
from schedscope.recorder.rank_log import rank_dir, seal_journal
from schedscope.recorder.ring import LINK, RingReader, left_over, remove_ring

log = logging.getLogger("schedscope.recorder")


def salvage() -> int:
    """Empty the rings of this machine that neither a scheduler nor a companion uses, and seal those runs.

    Returns the number of rings.

    Safe to interrupt: a frame that is in both places counts once.
    """
    done = 0
    runs = set()
    for ring in left_over():
        with contextlib.closing(ring):
            if not ring.owner.is_dir():
                ring.path.unlink(missing_ok=True)  # its run was deleted
                continue
            lock = hold(ring.owner.parent)
            if lock is None:
                continue  # its companion lives
            try:
                _empty(ring)
                done += 1
                runs.add(ring.owner.parent)
            except OSError as error:
                log.warning("%s: what its recorder left in memory can't be written to disk now: %s", ring.owner, error)
            finally:
                lock.release()
    for run_dir in runs:
        with contextlib.suppress(OSError, SchedscopeError):  # it can be read as it is
            finish_run(run_dir)
    return done


def _empty(ring: RingReader) -> None:
    """Append a ring's frames to its rank's log as one more journal."""
    directory = ring.owner
    rank = int(directory.name.removeprefix("rank="))
    parts = read_parts(directory.parent, rank)
    ends = [(segment.index.number, segment.index.next_frame) for segment in parts.segments]
    ends += [(journal.number, journal.next_frame) for journal in parts.journals if journal.path.name != LINK]
    number, next_frame = max(ends, default=(-1, 0))
    writer = JournalWriter(directory, rank, number + 1, next_frame)
    try:
        for header, frame in ring.frames():
            if header.ordinal >= next_frame or header.kind is Kind.END:
                writer.append(frame, header.passes)
        writer.sync()
    finally:
        writer.close()
    remove_ring(directory)


def finish_run(run_dir: Path) -> bool:
    """Seal a run whose recorder was killed, with what it received. Returns whether it is sealed now.

    It isn't while a scheduler still holds its buffer. Call `salvage` before. Raises RunFormatError, OSError.
    """
    manifest = read_manifest(run_dir)
    if manifest.status == "sealed":
        return True
    directories = [rank_dir(run_dir, rank) for rank in list_ranks(run_dir)]
    if any((directory / LINK).is_symlink() for directory in directories) or is_recorded(run_dir):
        return False
    for directory in directories:
        for name in Directory(directory).look().journals:
            seal_journal(directory / name)
    totals, gaps = summarize(run_dir, manifest)
    ends = [msgspec.structs.replace(gap, reason="interrupted") if gap.reason == "cut" else gap for gap in gaps]
    write_manifest(run_dir, sealed(manifest, totals, ends))
    return True
