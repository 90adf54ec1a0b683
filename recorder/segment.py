"""A segment: the rows of one journal as Parquet, a directory that never changes once it is there.

All tables of a segment appear at once, by the rename of the directory: a journal is either not sealed or sealed
whole. The directory's name gives its number and passes, so that looking up a pass opens no other segment.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.frame import SCHEMA_VERSION
from schedscope.recorder.journal import Journal
from schedscope.recorder.manifest import Gap, sync, write_file
from schedscope.recorder.rows import Row
from schedscope.recorder.schema import TABLES, Table

INDEX = "index.json"

_NAME = re.compile(r"(\d{8,})\.p(?:(\d+)-(\d+))?")
_ROW_GROUP = 16_384
"""Rows. Small enough that reading one pass skips most of a big segment."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """A segment's index.json."""

    version: int = SCHEMA_VERSION
    rank: int
    number: int
    first_frame: int
    next_frame: int
    first_pass: int | None
    last_pass: int | None
    ended: bool
    """The rank's writer closed: no segment comes behind."""
    rows: dict[str, int]
    """Rows per table, only of tables that have any."""
    passes: tuple[int, int] | None
    """First and last row of `passes`: rows of other tables may reach further."""
    gaps: list[Gap] = []


class Within(NamedTuple):
    """Some rows of a table: those with a column from `first` to `last`."""

    column: str
    first: int
    last: int


class Segment:
    """A sealed segment. Reads its files when asked."""

    def __init__(self, path: Path, number: int, first_pass: int | None, last_pass: int | None) -> None:
        self.path = path
        self.number = number
        self.first_pass = first_pass
        self.last_pass = last_pass

    @classmethod
    def named(cls, path: Path) -> Segment | None:
        """The segment of that name, unopened; None if the name is not a segment's."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        number, first, last = match.groups()
        return cls(path, int(number), *((None, None) if first is None else (int(first), int(last))))

    def has_pass(self, number: int) -> bool:
        """Whether rows of that pass may be in here."""
        return (
            self.first_pass is not None and self.last_pass is not None and self.first_pass <= number <= self.last_pass
        )

    @cached_property
    def index(self) -> Index:
        """What is in it. Raises RunFormatError."""
        path = self.path / INDEX
        try:
            return msgspec.json.decode(path.read_bytes(), type=Index)
        except (OSError, msgspec.DecodeError) as error:
            raise RunFormatError(f"{path}: not the index of a segment: {error}") from None

    def file(self, table: Table) -> Path | None:
        """The file with the table's rows; None if there are none."""
        return self.path / f"{table.name}.parquet" if self.index.rows.get(table.name) else None

    def read(self, table: Table, columns: Sequence[str] | None = None, within: Within | None = None) -> pa.Table | None:
        """Its rows of a table, None if there are none. Raises RunFormatError, naming the file."""
        path = self.file(table)
        if path is None or within is None:
            return None if path is None else _read(path, table, columns)
        return _read_within(path, table, table.names if columns is None else columns, within)

    def read_pass(self, table: Table, number: int) -> pa.Table | None:
        """The rows of one pass. Raises RunFormatError, naming the file."""
        path = self.file(table)
        return None if path is None else _read(path, table, None, [("pass", "=", number)])


def to_arrow(table: Table, rank: int, rows: Sequence[Row]) -> pa.Table:
    """Recorded rows as Arrow, with their rank."""
    values: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * len(table.row)
    arrays = [pa.array([rank] * len(rows), pa.int32())]
    arrays += [pa.array(column, definition.type) for column, definition in zip(values, table.row, strict=True)]
    return pa.Table.from_arrays(arrays, schema=table.arrow)


def write_segment(journal: Journal) -> Segment:
    """Seal a journal that no one writes to: make its segment, durably, then remove the journal.

    Whenever this is interrupted, the rows are in the journal or in the segment, and readers take the segment first.
    Raises OSError, and then the journal is still there.
    """
    directory = journal.path.parent
    pass_range = journal.pass_range
    first, last = pass_range if pass_range is not None else (None, None)
    name = f"{journal.number:08d}.p" + ("" if pass_range is None else f"{first}-{last}")
    temporary = directory / f".{journal.number:08d}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    for table_name, rows in journal.rows.items():
        path = temporary / f"{table_name}.parquet"
        table = to_arrow(TABLES[table_name], journal.rank, rows)
        with path.open("wb") as file:
            pq.write_table(table, file, compression="zstd", compression_level=3, row_group_size=_ROW_GROUP)
        sync(path)
    torn = journal.torn_gap()
    passes = journal.rows.get("passes")
    index = Index(
        rank=journal.rank,
        number=journal.number,
        first_frame=journal.first_frame,
        next_frame=journal.next_frame,
        first_pass=first,
        last_pass=last,
        ended=journal.ended,
        rows={table_name: len(rows) for table_name, rows in journal.rows.items()},
        passes=(passes[0][0], passes[-1][0]) if passes else None,
        gaps=journal.gaps if torn is None else [*journal.gaps, torn],
    )
    write_file(temporary / INDEX, msgspec.json.encode(index))
    path = directory / name
    temporary.rename(path)
    sync(directory)
    journal.path.unlink(missing_ok=True)
    return Segment(path, journal.number, first, last)


def _read_within(path: Path, table: Table, columns: Sequence[str], within: Within) -> pa.Table:
    """Only those rows, from only those row groups that may hold one."""
    index = table.names.index(within.column)
    try:
        with pq.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            ranges = [file.metadata.row_group(i).column(index).statistics for i in groups]
            hits = [i for i, r in enumerate(ranges) if r is None or (r.min <= within.last and r.max >= within.first)]
            found = file.read_row_groups(hits, columns=list(dict.fromkeys((*columns, within.column))))
    except (OSError, pa.ArrowException, TypeError) as error:
        raise RunFormatError(f"{path}: not a readable Parquet file: {error}") from None
    value = found.column(within.column)
    found = found.filter(pc.and_(pc.greater_equal(value, within.first), pc.less_equal(value, within.last)))
    return found.select(list(columns))


def _read(path: Path, table: Table, columns: Sequence[str] | None, filters: Any = None) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if filters is None:
                found = file.read(columns=columns)
            else:
                found = pq.read_table(path, columns=columns, filters=filters, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise RunFormatError(f"{path}: not a readable Parquet file: {error}") from None
    if not schema.equals(table.arrow):
        missing = [name for name in table.names if name not in schema.names]
        what = f"no column {', '.join(missing)}" if missing else "columns or types differ"
        raise RunFormatError(f"{path}: not the {table.name} of a schedscope run: {what}")
    return found.select(list(columns)) if columns is not None else found
