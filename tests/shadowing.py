"""Gives a recorded run the checkpoints that a shadow takes while a run is sealed."""

from __future__ import annotations

import shutil
from pathlib import Path

from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.frame import Rows
from schedscope.recorder.journal import Journal
from schedscope.recorder.parts import list_segments
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import Segment, write_segment
from schedscope.replay.shadow import Shadow


def rows_of(segment: Segment) -> Rows:
    """All rows of a part, as its journal had them."""
    found: Rows = {}
    for table in TABLES.values():
        piece = segment.read(table, table.names[1:])
        if piece is not None:
            found[table.name] = list(zip(*(column.to_pylist() for column in piece.columns), strict=True))
    return found


def shadow_run(path: Path, config: SchedulerConfig, *, work: int = 2_000) -> Shadow:
    """Follow rank 0 of a sealed run, and seal what the shadow adds. Returns the shadow."""
    shadow = Shadow(config, work=work)
    for segment in list_segments(path, 0):
        rows, index = rows_of(segment), segment.index
        for table, more in shadow.advance(rows).items():
            rows[table] = sorted(rows.get(table, []) + more)
        frames = index.first_frame, index.next_frame
        journal = Journal(segment.path.parent / f"{segment.number:08d}.journal", 0, segment.number, *frames, rows)
        journal.ended = index.ended
        shutil.rmtree(segment.path)
        write_segment(journal)
    return shadow
