"""Gives a recorded run the checkpoints that a shadow takes while a run is sealed, and other changes behind its back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from schedscope.engine.config import SchedulerConfig
from schedscope.recorder.frame import Rows
from schedscope.recorder.journal import Journal
from schedscope.recorder.rank_files import list_segments
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


def rewrite(segment: Segment, change: Callable[[Rows], None]) -> None:
    """Seal a part again with other rows."""
    rows, index = rows_of(segment), segment.index
    change(rows)
    number = segment.first_number
    path = segment.path.parent / f"{number:08d}.journal"
    journal = Journal(path, index.rank, number, index.first_frame, index.next_frame, rows, ended=index.ended)
    shutil.rmtree(segment.path)
    write_segment(journal)


def shadow_run(
    path: Path, config: SchedulerConfig, *, work: int = 1_000, repeat: int = 2, skip: tuple[int, ...] = ()
) -> Shadow:
    """Follow rank 0 of a sealed run, and seal what the shadow adds. Returns the shadow.

    Args:
        skip: numbers of parts that it never gets to see.
    """
    shadow = Shadow(config, work=work, repeat=repeat)

    def follow(rows: Rows) -> None:
        for table, made in shadow.advance(rows).items():
            rows[table] = sorted(rows.get(table, []) + made)

    for segment in list_segments(path, 0):
        if segment.first_number not in skip:
            rewrite(segment, follow)
    return shadow
