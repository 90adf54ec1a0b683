"""What a run takes on disk, by table and column, and in how many pieces it is."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.manifest import MANIFEST, Gap
from schedscope.recorder.parts import Parts
from schedscope.recorder.rank_files import read_parts
from schedscope.recorder.rank_log import rank_dir
from schedscope.recorder.rids import NAME as RIDS
from schedscope.recorder.ring import LINK
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES, Table
from schedscope.recorder.segment import Segment

_TRIES = 100


class ColumnSize(NamedTuple):
    """A column in the sealed part of a run."""

    name: str
    bytes: int
    """Compressed."""
    plain_bytes: int
    """Encoded, before compression."""


class TableSize(NamedTuple):
    """A table of a run."""

    name: str
    rows: int
    """With those in journals."""
    sealed_rows: int
    bytes: int
    """Of its Parquet files: the columns, and what describes them."""
    columns: tuple[ColumnSize, ...]
    """In the order of the schema."""

    @property
    def bytes_per_row(self) -> float:
        """Of the sealed part."""
        return self.bytes / self.sealed_rows if self.sealed_rows else 0.0


class RankSize(NamedTuple):
    """The pieces of a rank's log."""

    rank: int
    passes: int
    first_pass: int | None
    last_pass: int | None
    sealed: int
    """Segments of one journal."""
    merged: int
    """Segments of several."""
    journals: int
    """Not sealed."""
    journal_bytes: int
    bytes: int
    """All files."""


class Overhead(NamedTuple):
    """What recording cost the schedulers."""

    per_step_us: float
    """Microseconds on a scheduler's thread, mean."""
    share: float
    """Of the time that steps took, forwards included; idle steps left out."""


class Footprint(NamedTuple):
    """A run's sizes at one moment."""

    path: Path
    where: str
    """Its path, or its URL."""
    status: str
    version: int
    """Of the log."""
    schedscope: str
    """Version that wrote it."""
    tables: tuple[TableSize, ...]
    ranks: tuple[RankSize, ...]
    gaps: tuple[Gap, ...]
    overhead: Overhead | None
    """None: no step was recorded, or by a version that did not measure it."""

    @property
    def bytes(self) -> int:
        """All files of all ranks."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def decisions(self) -> int:
        """Rows of `decisions`, the measure of a run's length."""
        return next(table.rows for table in self.tables if table.name == "decisions")

    @property
    def bytes_per_decision(self) -> float:
        """Everything in the run, by its decisions."""
        return self.bytes / self.decisions if self.decisions else 0.0


def measure(run: Run) -> Footprint:
    """Measure a run, from the footers of its files. Raises RunFormatError, naming the file, for one it can't read."""
    for _ in range(_TRIES):
        try:
            parts = [read_parts(run.path, rank) for rank in run.ranks]
            run.bring(parts, rids=True)
            return Footprint(
                path=run.path,
                where=run.where,
                status=run.status,
                version=run.manifest.version,
                schedscope=run.manifest.schedscope,
                tables=tuple(_table(table, parts) for table in TABLES.values()),
                ranks=tuple(_rank(run.path, each) for each in parts),
                gaps=tuple(run.gaps),
                overhead=_overhead(run),
            )
        except FileNotFoundError:  # merged away under us
            continue
    raise RunFormatError(f"{run.path / MANIFEST}: its segments come and go too fast to be measured")


def _overhead(run: Run) -> Overhead | None:
    steps = run.table("steps", columns=("kind", "start_ns", "end_ns", "record_ns"))
    steps = steps.filter(pc.and_(pc.not_equal(steps["kind"], "idle"), pc.is_valid(steps["record_ns"])))
    if not steps.num_rows:
        return None
    spent_ns = pc.sum(steps["record_ns"]).as_py()
    lasted_ns = pc.sum(pc.subtract(steps["end_ns"], steps["start_ns"])).as_py()
    return Overhead(spent_ns / steps.num_rows / 1e3, spent_ns / lasted_ns if lasted_ns else 0.0)


def _table(table: Table, parts: list[Parts]) -> TableSize:
    compressed: defaultdict[str, int] = defaultdict(int)
    plain: defaultdict[str, int] = defaultdict(int)
    size = sealed = 0
    for segment in (segment for each in parts for segment in each.segments):
        path = segment.file(table)
        metadata = segment.metadata(table)
        if path is None or metadata is None:
            continue
        size += path.stat().st_size
        sealed += segment.count(table.name)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema.partition(".")[0]
                compressed[name] += column.total_compressed_size
                plain[name] += column.total_uncompressed_size
    columns = tuple(ColumnSize(name, compressed[name], plain[name]) for name in table.names)
    return TableSize(table.name, sum(each.count(table.name) for each in parts), sealed, size, columns)


def _rank(run_dir: Path, parts: Parts) -> RankSize:
    segments, journals = parts.segments, [journal for journal in parts.journals if journal.path.name != LINK]
    passes = parts.passes()
    journal_bytes = sum(journal.path.stat().st_size for journal in journals)
    sealed = [file for segment in segments for file in segment.path.iterdir()]
    sealed += rank_dir(run_dir, parts.rank).glob(RIDS)
    return RankSize(
        rank=parts.rank,
        passes=passes.count,
        first_pass=passes.first,
        last_pass=passes.last,
        sealed=sum(not _is_merged(segment) for segment in segments),
        merged=sum(_is_merged(segment) for segment in segments),
        journals=len(journals),
        journal_bytes=journal_bytes,
        bytes=journal_bytes + sum(file.stat().st_size for file in sealed),
    )


def _is_merged(segment: Segment) -> bool:
    return segment.first_number != segment.last_number
