"""What killed processes left in memory is brought to disk, and the memory given back.

Such a run can be read without this: readers look into its rings. But memory is scarce, and gone when the machine is
restarted.
"""

from __future__ import annotations

import contextlib
import logging

from schedscope.recorder.frame import Kind
from schedscope.recorder.journal import JournalWriter
from schedscope.recorder.lock import hold
from schedscope.recorder.parts import read_parts
from schedscope.recorder.ring import LINK, RingReader, left_over, remove_ring

log = logging.getLogger("schedscope.recorder")


def salvage() -> int:
    """Empty the rings of this machine that neither a scheduler nor a companion uses. Returns their number.

    Safe to interrupt: a frame that is in both places counts once.
    """
    done = 0
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
            except OSError as error:
                log.warning("%s: what its recorder left in memory can't be written to disk now: %s", ring.owner, error)
            finally:
                lock.release()
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
