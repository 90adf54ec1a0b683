"""Open files of a log, and what was read of them last: what is asked for again is at hand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
from schedscope.recorder.files import FileFacts, TableFile
from schedscope.recorder.schema import Table

_OPEN = 128
_DECODED_BYTES = 48 * 2**20
_VALUE_BYTES = 7
"""About what a decoded value takes; to count them costs more than to find a pass."""


class OpenFiles:
    """What was read last, so that looking there again is fast: files, still open, and row groups, decoded.

    Several readers of a run may share it, on any threads.

    Args:
        files: how many stay open.
        size: bytes of row groups of a table that stay in memory. Each table has its own: otherwise those of
            `decisions`, of which a look-up hardly ever finds the right one, would push out all others.
    """

    def __init__(self, files: int = _OPEN, size: int = _DECODED_BYTES) -> None:
        self._limit = files
        self._size_limit = size
        self._lock = threading.RLock()
        """Held while a row group is decoded, too: two threads that want the same one decode it once."""
        self._files: OrderedDict[Path, TableFile] = OrderedDict()
        self._groups: dict[str, _Recent] = {}

    def open(self, path: Path, table: Table, facts: FileFacts | None, schema: pa.Schema | None = None) -> TableFile:
        """An open file; arguments and errors as of `TableFile`."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
            file = self._files[path] = TableFile(path, table, facts, schema)
            while len(self._files) > self._limit:
                # Whoever still reads one holds it; it closes behind the last of them.
                self._files.popitem(last=False)
            return file

    def group(self, file: TableFile, number: int) -> pa.Table:
        """All columns of a row group; errors as of `TableFile.read`."""
        return self._recent(file, number, lambda: file.read(None, [number]))

    def read(self, file: TableFile, columns: Sequence[str] | None, groups: Sequence[int]) -> pa.Table:
        """Columns of row groups, as of `TableFile.read`; of those that are kept decoded, nothing is read again."""
        with self._lock:
            recent = self._groups.get(file.path.name)
            kept = {
                number: rows for number in groups if recent and (rows := recent.peek((file.path, number))) is not None
            }
        if not kept:
            return file.read(columns, groups)
        found = [kept[number] if number in kept else file.read(columns, [number]) for number in groups]
        return pa.concat_tables(found if columns is None else [rows.select(list(columns)) for rows in found])

    def other(self, file: TableFile, make: Callable[[], pa.Table]) -> pa.Table:
        """What `make` makes of the whole file."""
        return self._recent(file, None, make)

    def _recent(self, file: TableFile, part: int | None, make: Callable[[], pa.Table]) -> pa.Table:
        with self._lock:
            recent = self._groups.setdefault(file.path.name, _Recent(self._size_limit))
            return recent.get((file.path, part), make)


class _Recent:
    """The tables that were used last, up to a size in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[object, tuple[pa.Table, int]] = OrderedDict()
        self._size = 0

    def peek(self, key: object) -> pa.Table | None:
        """The table of that key if it is kept."""
        return self._kept[key][0] if key in self._kept else None

    def get(self, key: object, make: Callable[[], pa.Table]) -> pa.Table:
        """The table of that key, which `make` makes if it isn't kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        rows = make()
        size = rows.num_rows * rows.num_columns * _VALUE_BYTES
        self._kept[key] = (rows, size)
        self._size += size
        while self._size > self._limit:
            self._size -= self._kept.popitem(last=False)[1][1]
        return rows
