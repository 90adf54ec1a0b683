"""A segment: rows of a rank as Parquet, a directory that never changes once it is there.

All tables of a segment appear at once, by the rename of the directory: a journal is either not sealed or sealed
whole. The directory's name gives the numbers of the journals that it was made of and its passes, so that looking up
a pass opens no other segment.
"""

from __future__ import annotations

import re
import shutil
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.files import (
    PASS,
    FileFacts,
    TableFile,
    Within,
    cut,
    dictionaries,
    needed,
    picked,
    plain,
    write_table,
)
from schedscope.recorder.frame import SCHEMA_VERSION
from schedscope.recorder.journal import SORTED, Journal
from schedscope.recorder.manifest import Gap, own_version, sync, write_file
from schedscope.recorder.migrate import schema_of, upgrade
from schedscope.recorder.mirror import INDEX as INDEX
from schedscope.recorder.mirror import bring
from schedscope.recorder.open_files import OpenFiles
from schedscope.recorder.rids import NAME as RIDS
from schedscope.recorder.rids import RID_TABLES, RidIndex, RidSpans
from schedscope.recorder.schema import TABLES, Table

LEVEL = 3
"""Of zstd, where time counts."""

_NAME = re.compile(r"(\d{8,})(?:-(\d{8,}))?\.p(?:(-?\d+)-(-?\d+))?")


class Index(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A segment's index.json."""

    version: int = 1
    schedscope: str = ""
    """Version of the schedscope that wrote it."""
    rank: int
    number: int
    """Of the journal that it was made of; of a merged one the first."""
    last_number: int | None = None
    """Of a merged one the last; None: it wasn't merged."""
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
    starts: dict[str, list[int]] = {}
    """Of a merged one, per table: for each number the row at which its rows begin."""
    files: dict[str, FileFacts] = {}
    checksum: int = 0
    """CRC-32 of this document without it."""


class Segment:
    """A sealed segment. Reads its files when asked.

    Methods that read raise RunFormatError, naming the file, for one that can't be read, and FileNotFoundError if the
    segment is gone, merged into a bigger one.
    """

    def __init__(self, path: Path, numbers: tuple[int, int], passes: tuple[int, int] | None, files: OpenFiles) -> None:
        self.path = path
        self.first_number, self.last_number = numbers
        self.first_pass = None if passes is None else passes[0]
        self.last_pass = None if passes is None else passes[1]
        self._files = files

    @classmethod
    def named(cls, path: Path, files: OpenFiles | None = None) -> Segment | None:
        """The segment of that name, unopened; None if the name is not a segment's."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        number, last_number, first, last = match.groups()
        passes = None if first is None else (int(first), int(last))
        return cls(path, (int(number), int(last_number or number)), passes, files or OpenFiles(0, 0))

    def has_pass(self, number: int) -> bool:
        """Whether rows of that pass may be in here."""
        return (
            self.first_pass is not None and self.last_pass is not None and self.first_pass <= number <= self.last_pass
        )

    def check(self, table: Table) -> None:
        """Read a table's file whole, against its checksums."""
        file = self._open(table)
        if file is not None:
            file.check()

    @cached_property
    def index(self) -> Index:
        """What is in it."""
        path = self.path / INDEX
        bring(path)
        try:
            index = msgspec.json.decode(path.read_bytes(), type=Index)
        except FileNotFoundError:
            if self.path.is_dir():
                raise RunFormatError(f"{path}: not the index of a segment: there is no such file") from None
            raise
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RunFormatError(f"{path}: not the index of a segment: {error}") from None
        if index.version > SCHEMA_VERSION:
            raise RunFormatError(
                f"{path}: log version {index.version}, written by schedscope {index.schedscope}; this one, "
                f"{own_version()}, reads up to version {SCHEMA_VERSION}: upgrade to schedscope>={index.schedscope}"
            )
        if index.version > 1 and index.checksum != _checksum(index):
            raise RunFormatError(f"{path}: damaged: it doesn't match its checksum")
        return index

    @property
    def is_current(self) -> bool:
        """Whether its files are as this version writes them, so that others can read them too."""
        return not self._is_old

    def count(self, table: str) -> int:
        """Rows of a table."""
        return self.index.rows.get(table, 0)

    def rows_of(self, table: str, source: Segment) -> tuple[int, int]:
        """Where in this merged segment the rows of one of its sources are: from one row up to another."""
        starts = [*self.index.starts.get(table, ()), self.count(table)]
        if len(starts) == 1:
            return 0, 0
        return starts[source.first_number - self.first_number], starts[source.last_number + 1 - self.first_number]

    def file(self, table: Table) -> Path | None:
        """The file with the table's rows; None if there are none."""
        return self.path / f"{table.name}.parquet" if self.count(table.name) else None

    def read(
        self,
        table: Table,
        columns: Sequence[str] | None = None,
        *,
        within: Within | None = None,
        rows: tuple[int, int] | None = None,
    ) -> pa.Table:
        """Its rows of a table, in recorded order.

        Args:
            within: only such rows, for which no more row groups than needed are read.
            rows: only these, from one up to another.
        """
        schema = _schema(table, columns)
        file = self._open(table)
        if file is None:
            return schema.empty_table()
        if self._is_old:
            found = self._upgraded(table, file)
            return cut(found if rows is None else found.slice(rows[0], rows[1] - rows[0]), columns, within)
        groups = _groups(file, within)
        skipped = 0
        if rows is not None:
            groups, skipped = _overlapping([group.rows for group in file.groups], *rows)
        if not groups:
            return schema.empty_table()
        found = self._files.read(file, needed(columns, within), groups)
        if rows is not None:
            found = found.slice(rows[0] - skipped, rows[1] - rows[0])
        return plain(cut(found, columns, within), schema)

    def metadata(self, table: Table) -> pq.FileMetaData | None:
        """The Parquet footer of a table's file; None if there are no rows."""
        file = self._open(table)
        return None if file is None else file.metadata

    def chunks(
        self, table: Table, columns: Sequence[str] | None = None, within: Within | None = None
    ) -> Iterator[pa.Table]:
        """What `read` gives, a row group at a time."""
        file = self._open(table)
        if file is None:
            return
        if self._is_old:
            yield cut(self._upgraded(table, file), columns, within)
            return
        schema = _schema(table, columns)
        for number in _groups(file, within):
            yield plain(cut(file.read(needed(columns, within), [number]), columns, within), schema)

    def read_pass(self, table: Table, number: int) -> list[dict[str, Any]]:
        """The rows of one pass, as dictionaries."""
        file = self._open(table)
        if file is None:
            return []
        if self._is_old:
            return dictionaries(_of_pass(table, self._upgraded(table, file), number))
        found = []
        for group, facts in enumerate(file.groups):
            if facts.may_hold(Within(PASS, number, number)):
                found += dictionaries(_of_pass(table, self._files.group(file, group), number))
        return found

    def read_request(self, rid: str) -> dict[str, list[dict[str, Any]]]:
        """The rows of a request, as dictionaries, by table; only tables that have some."""
        found: dict[str, list[dict[str, Any]]] = {}
        wanted = pa.scalar(rid, pa.string())
        for name, rows in self._near_request(rid):
            if hits := dictionaries(rows.filter(pc.equal(rows["rid"], wanted))):
                found.setdefault(name, []).extend(hits)
        return found

    def _near_request(self, rid: str) -> Iterator[tuple[str, pa.Table]]:
        """Row groups that can hold rows of a request, by table."""
        try:
            spans = self._rids.find(rid)
        except FileNotFoundError:
            if not self._is_old and not self.path.is_dir():
                raise
            if not self._is_old:
                raise RunFormatError(f"{self.path / RIDS}: not readable: there is no such file") from None
            for name in RID_TABLES:
                if (file := self._open(TABLES[name])) is not None:
                    yield name, self._upgraded(TABLES[name], file)
            return
        for name, span in spans.items():
            file = self._open(TABLES[name])
            for group in range(span.first, span.last + 1) if file is not None else ():
                assert file is not None
                yield name, self._files.group(file, group)

    @cached_property
    def _rids(self) -> RidIndex:
        try:
            return RidIndex(f"{self.path}/{RIDS}")
        except FileNotFoundError:
            if self._is_old:
                raise
            bring(self.path / RIDS)
            return RidIndex(f"{self.path}/{RIDS}")

    @property
    def _is_old(self) -> bool:
        return self.index.version < SCHEMA_VERSION

    def _upgraded(self, table: Table, file: TableFile) -> pa.Table:
        """The whole table of a segment of an older version, as of this one."""
        return self._files.other(file, lambda: upgrade(self.index.version, table, file.read()))

    def _open(self, table: Table) -> TableFile | None:
        path = self.file(table)
        if path is None:
            return None
        schema = schema_of(self.index.version, table) if self._is_old else None
        try:
            return self._files.open(path, table, self.index.files.get(table.name), schema)
        except FileNotFoundError:
            if self.path.is_dir():
                raise RunFormatError(f"{path}: not a readable Parquet file: there is no such file") from None
            raise


def write_segment(journal: Journal) -> Segment:
    """Seal a journal that no one writes to: make its segment, durably, then remove the journal.

    Whenever this is interrupted, the rows are in the journal or in the segment, and readers take the segment first.
    Raises OSError, and then the journal is still there.
    """
    first, last = journal.pass_range or (None, None)
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
        rows={name: len(rows) for name, rows in journal.rows.items()},
        passes=(passes[0][0], passes[-1][0]) if passes else None,
        gaps=journal.gaps if torn is None else [*journal.gaps, torn],
    )
    tables = {name: [journal.table(name)] for name in journal.rows}
    segment = make_segment(journal.path.parent, index, tables, LEVEL)
    journal.path.unlink(missing_ok=True)
    return segment


def make_segment(directory: Path, index: Index, tables: Mapping[str, Iterable[pa.Table]], level: int) -> Segment:
    """Make a segment, durably: it is there whole when this returns, and not at all before.

    Args:
        index: without what follows from the written files.
        tables: rows by table, in pieces; as many as the index says.
        level: of zstd.

    Raises OSError, RunFormatError for another number of rows.
    """
    numbers = f"{index.number:08d}" + ("" if index.last_number is None else f"-{index.last_number:08d}")
    passes = "" if index.first_pass is None else f"{index.first_pass}-{index.last_pass}"
    path = directory / f"{numbers}.p{passes}"
    temporary = directory / f".{numbers}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    files: dict[str, FileFacts] = {}
    rids = RidSpans()
    for name, chunks in tables.items():
        facts = write_table(temporary / f"{name}.parquet", TABLES[name], chunks, level, partial(rids.note, name))
        if facts.groups:
            files[name] = facts
        else:
            (temporary / f"{name}.parquet").unlink()
    rows = {name: sum(group.rows for group in facts.groups) for name, facts in files.items()}
    if rows != {name: count for name, count in index.rows.items() if count}:
        raise RunFormatError(f"{temporary}: it got {rows} rows instead of {index.rows}")
    index = msgspec.structs.replace(
        index, version=SCHEMA_VERSION, schedscope=own_version(), rows=rows, files=files, checksum=0
    )
    index = msgspec.structs.replace(index, checksum=_checksum(index))
    write_file(temporary / RIDS, rids.pack())
    write_file(temporary / INDEX, msgspec.json.encode(index))
    temporary.rename(path)
    sync(directory)
    segment = Segment.named(path)
    assert segment is not None
    return segment


def _checksum(index: Index) -> int:
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(index, checksum=0)))


def _overlapping(sizes: Sequence[int], start: int, stop: int) -> tuple[list[int], int]:
    """Row groups that hold rows from `start` to `stop`, and how many rows come before the first of them."""
    groups: list[int] = []
    skipped = position = 0
    for number, size in enumerate(sizes):
        if position < stop and start < position + size:
            if not groups:
                skipped = position
            groups.append(number)
        position += size
    return groups, skipped


def _schema(table: Table, columns: Sequence[str] | None) -> pa.Schema:
    return table.arrow if columns is None else pa.schema([table.arrow.field(name) for name in columns])


def _groups(file: TableFile, within: Within | None) -> list[int]:
    return list(range(len(file.groups))) if within is None else file.groups_with(within)


def _of_pass(table: Table, rows: pa.Table, number: int) -> pa.Table:
    """The rows of a pass."""
    numbers = rows["pass"]
    if table.name not in SORTED:
        return picked(rows, pc.equal(numbers, pa.scalar(number, pa.int64())))

    def at(place: int) -> int:
        found: int = numbers[place].as_py()
        return found

    start = bisect_left(range(len(numbers)), number, key=at)
    return rows.slice(start, bisect_right(range(len(numbers)), number, key=at) - start)
