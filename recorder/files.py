"""The Parquet files of a segment: how they are written, and read without believing a damaged byte.

Parquet's own checksums leave out what says how pages are to be read. So the segment's index holds one for each row
group and one for the rest, and nothing is decoded that doesn't match.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.manifest import sync
from schedscope.recorder.mirror import bring
from schedscope.recorder.schema import Table

PASS = "pass"

_ENCODINGS = {"delta": "DELTA_BINARY_PACKED", "split": "BYTE_STREAM_SPLIT", "length": "DELTA_LENGTH_BYTE_ARRAY"}
_ROW_GROUP_BYTES = 32 * 2**20
"""Rough size in memory at which a row group ends before it has its rows: token lists and states can be long."""
_PAGE_BYTES = 8 * 2**20
_DICTIONARY_BYTES = 32_768


class Within(NamedTuple):
    """Some rows of a table: those with a column from `first` to `last`, both included."""

    column: str
    first: int
    last: int

    def rows(self, table: pa.Table) -> pa.Table:
        """Those of a table that has the column."""
        value = table[self.column]
        return picked(table, pc.and_(pc.greater_equal(value, self.first), pc.less_equal(value, self.last)))


class RowGroup(msgspec.Struct, frozen=True, array_like=True):
    """Rows that are encoded together."""

    rows: int
    end: int
    """Offset one past its last byte; it begins where the one before ends, the first one at 0."""
    checksum: int
    """CRC-32 of its bytes."""
    first_pass: int | None
    """Smallest pass of its rows; None: no row belongs to a pass, or the table has none."""
    last_pass: int | None

    def may_hold(self, passes: Within) -> bool:
        """Whether rows of these passes may be in it."""
        first, last = self.first_pass, self.last_pass
        return first is not None and last is not None and first <= passes.last and passes.first <= last


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment's index knows about one of its files."""

    size: int
    """Bytes."""
    checksum: int
    """CRC-32 of what follows the last row group."""
    groups: list[RowGroup]


# ---- writing -----------------------------------------------------------------------------------------------------


def write_table(
    path: Path,
    table: Table,
    chunks: Iterable[pa.Table],
    level: int,
    note: Callable[[int, pa.Table], None] = lambda _number, _rows: None,
) -> FileFacts:
    """Write a table's rows to a new file, durably. A pass's rows share a row group where they fit.

    Args:
        level: of zstd; more takes longer to write, not to read.
        note: told of each row group, with its number.
    """
    passes: list[tuple[int, int | None, int | None]] = []
    with path.open("wb") as file, pq.ParquetWriter(file, table.arrow, **_options(table, level)) as writer:
        for rows in _row_groups(table, chunks):
            writer.write_table(rows, row_group_size=rows.num_rows)
            note(len(passes), rows)
            passes.append((rows.num_rows, *_pass_range(rows)))
    sync(path)
    data = path.read_bytes()
    starts = _group_starts(data)
    # What precedes the first row group, the file's mark, counts as its.
    bounds = [*([0] if starts else []), *starts[1:], len(data) - _footer_bytes(data)]
    groups = [
        RowGroup(rows, end, zlib.crc32(data[start:end]), first, last)
        for (rows, first, last), start, end in zip(passes, bounds[:-1], bounds[1:], strict=True)
    ]
    return FileFacts(size=len(data), checksum=zlib.crc32(data[bounds[-1] :]), groups=groups)


def _options(table: Table, level: int) -> dict[str, Any]:
    leaves = {c.name: f"{c.name}.list.element" if pa.types.is_list(c.type) else c.name for c in table.columns}
    written = {leaves[c.name]: c.written for c in table.columns}
    return {
        "compression": "zstd",
        "compression_level": level,
        "use_dictionary": [leaf for leaf, encoding in written.items() if encoding == "dictionary"],
        # Beyond it the values are hardly repeated, and a dictionary only takes room: keys under hrrn.
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        "column_encoding": {leaf: _ENCODINGS[e] for leaf, e in written.items() if e in _ENCODINGS},
        # Only what grows tells a reader which row groups to leave out.
        "write_statistics": [leaf for leaf, encoding in written.items() if encoding == "delta"],
        # As far back as zstd looks: prompts that begin alike then cost little more than one.
        "data_page_size": _PAGE_BYTES,
        "write_page_checksum": True,
    }


def _row_groups(table: Table, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    waiting = table.arrow.empty_table()
    for chunk in chunks:
        waiting = pa.concat_tables([waiting, chunk])
        while waiting.num_rows > (limit := _limit(table, waiting)):
            cut = _cut(waiting, limit)
            yield waiting.slice(0, cut)
            waiting = waiting.slice(cut)
    if waiting.num_rows:
        yield waiting


def _limit(table: Table, rows: pa.Table) -> int:
    fitting = int(rows.num_rows * _ROW_GROUP_BYTES / max(rows.nbytes, 1))
    return max(1, min(table.row_group, fitting))


def _cut(rows: pa.Table, limit: int) -> int:
    """Where to end a row group of at most `limit` rows: before a pass that would be cut, unless it is all there is."""
    if PASS not in rows.column_names:
        return limit
    numbers = rows[PASS]
    behind = numbers[limit].as_py()
    if behind is None or numbers[limit - 1].as_py() != behind:
        return limit
    return int(pc.index(numbers, behind).as_py()) or limit


def _pass_range(rows: pa.Table) -> tuple[int | None, int | None]:
    if PASS not in rows.column_names:
        return None, None
    found = pc.min_max(rows[PASS]).as_py()
    return found["min"], found["max"]


def _footer_bytes(data: bytes) -> int:
    """Length of the part of a file that follows its row groups: metadata, its length, and a mark."""
    return int.from_bytes(data[-8:-4], "little") + 8


def _group_starts(data: bytes) -> list[int]:
    metadata = pq.read_metadata(pa.BufferReader(data))
    starts = []
    for number in range(metadata.num_row_groups):
        column = metadata.row_group(number).column(0)
        starts.append(min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset))
    return starts


# ---- reading -----------------------------------------------------------------------------------------------------


class TableFile:
    """An open file. Every read of it raises RunFormatError, naming it, for bytes that were not written so.

    Args:
        facts: None for files of a version that had none: Parquet's own checks have to do.
        schema: the columns that it has to have; None: those of the table.

    Raises FileNotFoundError if it is gone, RunFormatError if it can't be read.
    """

    def __init__(self, path: Path, table: Table, facts: FileFacts | None, schema: pa.Schema | None = None) -> None:
        self.path = path
        self._facts = facts
        self._checked = False
        self._reading = threading.Lock()
        self._fd = -1
        bring(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if facts is not None:
                self._check_rest(facts)
            texts = _texts(table) if schema is None else None
            # Our own checksums cover more than those of pages.
            self._file = pq.ParquetFile(path, read_dictionary=texts, page_checksum_verification=facts is None)
            self._check_schema(table.name, schema or table.arrow)
        except (OSError, pa.ArrowException, KeyError) as error:  # KeyError: a column is missing
            self.close()
            raise self._unreadable(error) from None
        except RunFormatError:
            self.close()
            raise

    @property
    def groups(self) -> Sequence[RowGroup]:
        """Its row groups; of a file without facts, without passes."""
        if self._facts is not None:
            return self._facts.groups
        metadata = self._file.metadata
        return [RowGroup(metadata.row_group(i).num_rows, 0, 0, None, None) for i in range(metadata.num_row_groups)]

    def groups_with(self, within: Within) -> list[int]:
        """Row groups that can hold such rows."""
        numbers = range(self._file.metadata.num_row_groups)
        if within.column == PASS:
            return list(numbers) if self._facts is None else [i for i in numbers if self.groups[i].may_hold(within)]
        place = self._file.schema_arrow.names.index(within.column)  # no column before it has more than one leaf
        known = [self._file.metadata.row_group(i).column(place).statistics for i in numbers]
        return [
            i
            for i, range_ in zip(numbers, known, strict=True)
            if range_ is None or not range_.has_min_max or (range_.min <= within.last and within.first <= range_.max)
        ]

    @property
    def metadata(self) -> pq.FileMetaData:
        """Its footer."""
        return self._file.metadata

    def read(self, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> pa.Table:
        """Rows of some row groups, by default of all; texts may come dictionary-encoded, see `plain`."""
        chosen = list(range(self._file.metadata.num_row_groups)) if groups is None else list(groups)
        wanted = None if columns is None else list(columns)
        try:
            for number in chosen:
                self._check_group(number)
            with self._reading:
                found = self._file.read_row_groups(chosen, columns=wanted, use_threads=len(chosen) > 1)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from None
        return found if wanted is None else found.select(wanted)

    def check(self) -> None:
        """Raise RunFormatError unless every byte is as it was written: for readers that don't check it themselves."""
        if not self._checked and self._facts is not None:
            for number in range(len(self._facts.groups)):
                self._check_group(number)
            self._checked = True

    def close(self) -> None:
        """Close it. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if hasattr(self, "_file"):
            self._file.close()

    def __del__(self) -> None:
        self.close()

    def _check_rest(self, facts: FileFacts) -> None:
        size = os.fstat(self._fd).st_size
        if size != facts.size:
            raise RunFormatError(f"{self.path}: damaged: it has {size} bytes and was written with {facts.size}")
        start = facts.groups[-1].end if facts.groups else 0
        if zlib.crc32(self._bytes(start, size)) != facts.checksum:
            raise RunFormatError(f"{self.path}: damaged: its footer doesn't match its checksum")

    def _check_group(self, number: int) -> None:
        if self._facts is None:
            return
        groups = self._facts.groups
        start = groups[number - 1].end if number else 0
        if zlib.crc32(self._bytes(start, groups[number].end)) != groups[number].checksum:
            raise RunFormatError(f"{self.path}: damaged: row group {number} doesn't match its checksum")

    def _bytes(self, start: int, end: int) -> bytes:
        return os.pread(self._fd, end - start, start)

    def _check_schema(self, table: str, schema: pa.Schema) -> None:
        found = {field.name: _plain_type(field.type) for field in self._file.schema_arrow}
        wanted = {field.name: field.type for field in schema}
        if list(found) != list(wanted) or any(found[name] != wanted[name] for name in wanted):
            missing = [name for name in wanted if name not in found]
            what = f"no column {', '.join(missing)}" if missing else "columns or types differ"
            raise RunFormatError(f"{self.path}: not the {table} of a schedscope run: {what}")

    def _unreadable(self, error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError):
            return error
        return RunFormatError(f"{self.path}: not a readable Parquet file: {error}")


def dictionaries(rows: pa.Table) -> list[dict[str, Any]]:
    """Rows as `to_pylist` gives them, several times as fast; also dictionary-encoded ones."""
    names = rows.column_names
    return [
        dict(zip(names, values, strict=True))
        for batch in rows.to_batches()
        for values in zip(*map(_values, batch.columns), strict=True)
    ]


def _values(column: pa.Array) -> list[Any]:
    if column.null_count == len(column):
        return [None] * len(column)
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    values: list[Any] = column.to_pylist()
    return values


def needed(columns: Sequence[str] | None, within: Within | None) -> Sequence[str] | None:
    """The columns to read: that by which rows are chosen is one."""
    return columns if columns is None or within is None else list(dict.fromkeys((*columns, within.column)))


def cut(rows: pa.Table, columns: Sequence[str] | None, within: Within | None) -> pa.Table:
    """Of rows that were read, what was asked for."""
    kept = rows if within is None else within.rows(rows)
    return kept if columns is None else kept.select(list(columns))


def picked(rows: pa.Table, hits: pa.ChunkedArray) -> pa.Table:
    """The rows of a mask. Where they stand together, as they mostly do, a slice: it costs nothing."""
    count = pc.sum(hits).as_py() or 0
    start = max(pc.index(hits, True).as_py(), 0)
    together = not count or pc.sum(hits.slice(start, count)).as_py() == count
    return rows.slice(start, count) if together else rows.filter(hits)


def plain(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows with the types of the schema."""
    if rows.schema.equals(schema):
        return rows
    return rows.cast(pa.schema([schema.field(name) for name in rows.column_names]))


def _texts(table: Table) -> list[str]:
    """Columns of few texts: they stay dictionary-encoded until someone looks at them."""
    return [c.name for c in table.columns if pa.types.is_string(c.type) and c.written == "dictionary"]


def _plain_type(found: pa.DataType) -> pa.DataType:
    return found.value_type if pa.types.is_dictionary(found) else found
