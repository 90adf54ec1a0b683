"""What killed processes left in memory is brought to disk, and the memory given back.

Such a run can be read without this: readers look into its rings. But memory is scarce, and gone when the machine is
restarted.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec
from schedscope.engine.errors import SchedscopeError
from schedscope.recorder.frame import Header, Kind
from schedscope.recorder.journal import JournalWriter
from schedscope.recorder.listing import Directory
from schedscope.recorder.lock import hold, is_held
from schedscope.recorder.manifest import read_manifest, sealed, write_manifest
from schedscope.recorder.rank_files import is_recorded, list_ranks, read_parts, summarize
from schedscope.recorder.rank_log import rank_dir, seal_journal
from schedscope.recorder.ring import LINK, RingReader, left_over, remove_ring

log = logging.getLogger("schedscope.recorder")


def salvage() -> int:
    """Empty the rings of this machine that neither a scheduler nor a companion uses, and seal those runs.

    Returns the number of rings. Safe to interrupt: a frame that is in both places counts once.
    """
    done = 0
    runs = set()
    for ring in left_over():
        with contextlib.closing(ring):
            try:
                if _salvage(ring):
                    done += 1
                    runs.add(ring.owner.parent)
            except Exception as error:  # one that is damaged must not be in the way of others
                log.warning(
                    "%s: what its recorder left in %s can't be written to disk: %s", ring.owner, ring.path, error
                )
    for run_dir in runs:
        with contextlib.suppress(OSError, SchedscopeError):  # it can be read as it is
            finish_run(run_dir)
    _remove_dead_sockets()
    return done


def _salvage(ring: RingReader) -> bool:
    """Whether a ring was emptied. Raises OSError, ValueError, SchedscopeError."""
    link = ring.owner / LINK
    if not link.is_symlink() or link.readlink() != ring.path:
        if ring.read == ring.written:
            ring.path.unlink(missing_ok=True)
        else:
            log.warning(
                "%s holds records of %s, which was moved or deleted; delete it too, or move that back",
                ring.path,
                ring.owner,
            )
        return False
    lock = hold(ring.owner.parent)
    if lock is None:
        return False  # its companion lives
    try:
        _empty(ring)
    finally:
        lock.release()
    return True


def _empty(ring: RingReader) -> None:
    """Append a ring's frames to its rank's log as one more journal."""
    directory = ring.owner
    if ring.read < ring.written:
        rank = int(directory.name.removeprefix("rank="))
        parts = read_parts(directory.parent, rank)
        ends = [(segment.index.number, segment.index.next_frame) for segment in parts.segments]
        ends += [(journal.number, journal.next_frame) for journal in parts.journals if journal.path.name != LINK]
        number, next_frame = max(ends, default=(-1, 0))
        frames = [(header, frame) for header, frame in ring.look() if _is_new(header, next_frame)]
        writer = JournalWriter(directory, rank, number + 1, next_frame)
        try:
            for header, frame in frames:
                writer.append(frame, header.passes)
            writer.sync()
        except OSError:
            writer.path.unlink(missing_ok=True)
            raise
        finally:
            writer.close()
    remove_ring(directory)


def _is_new(header: Header, next_frame: int) -> bool:
    return header.ordinal >= next_frame or header.kind is Kind.END


def _remove_dead_sockets() -> None:
    """Remove what killed companions left in the directory for temporary files."""
    for path in Path(tempfile.gettempdir()).glob("schedscope-*/companion"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                shutil.rmtree(path.parent, ignore_errors=True)
            except OSError:
                continue  # someone else's


def finish_run(run_dir: Path) -> bool:
    """Seal a run whose recorder was killed, with what it received. Returns whether it is sealed now.

    It isn't while a scheduler still holds its buffer. Call `salvage` before. Raises RunFormatError, OSError.
    """
    manifest = read_manifest(run_dir)
    if manifest.status == "sealed":
        return True
    directories = [rank_dir(run_dir, rank) for rank in list_ranks(run_dir)]
    if is_recorded(run_dir):
        return False
    for directory in directories:
        link = directory / LINK
        if link.is_symlink() or (link.exists() and is_held(link)):
            return False
        if link.exists():  # there was no room in memory
            with contextlib.closing(RingReader(link)) as ring:
                _empty(ring)
    for directory in directories:
        for name in Directory(directory).look().journals:
            seal_journal(directory / name)
    totals, gaps = summarize(run_dir, manifest)
    ends = [msgspec.structs.replace(gap, reason="interrupted") if gap.reason == "cut" else gap for gap in gaps]
    write_manifest(run_dir, sealed(manifest, totals, ends))
    return True
