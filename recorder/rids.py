"""Where a segment has the rows of a request: a small index of its own, from a rid's hash to row groups.

A look-up reads a few hundred bytes and one block, and says for sure that a request isn't there. Sixteen bytes a
request, in blocks that each have a checksum:

    header   mark, records, blocks, CRC-32 of the header without this field
    blocks   per block the hash that it begins with, and its CRC-32
    records  in ascending order of their hash: the hash, and per table the first and last row group
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from schedscope.engine.errors import RunFormatError

NAME = "rids.index"
RID_TABLES = ("decisions", "events", "requests")
"""Tables whose rows are looked up by request."""

HASH_BYTES = 4

_MARK = b"SSRIDS1\n"
_HEADER = struct.Struct("<8sIII")
_BLOCK = struct.Struct("<4sI")
_RECORD = struct.Struct(f"<4s{2 * len(RID_TABLES)}H")
_PER_BLOCK = 256
_NONE = 0xFFFF
_NOTHING = (b"", 0, 0, 0)
_SMALL = 16_384
"""Bytes up to which an index is read at once and kept."""


class Span(NamedTuple):
    """Row groups of a table that can hold rows of a request, both included."""

    first: int
    last: int


class RidSpans:
    """Collects, while a segment's tables are written, which row groups mention a request."""

    def __init__(self) -> None:
        self._spans: dict[str, list[int]] = {}

    def note(self, table: str, group: int, rows: pa.Table) -> None:
        """Take in a row group."""
        if table not in RID_TABLES:
            return
        place = 2 * RID_TABLES.index(table)
        for rid in pc.unique(rows["rid"]).to_pylist():
            if rid is None:
                continue
            span = self._spans.setdefault(rid, [_NONE] * (2 * len(RID_TABLES)))
            if span[place] == _NONE:
                span[place] = group
            span[place + 1] = group

    def pack(self) -> bytes:
        """The index's file."""
        records = [_RECORD.pack(*record) for record in sorted((hash_of(rid), *s) for rid, s in self._spans.items())]
        blocks = [b"".join(records[i : i + _PER_BLOCK]) for i in range(0, len(records), _PER_BLOCK)]
        listed = b"".join(_BLOCK.pack(block[:4], zlib.crc32(block)) for block in blocks)
        checksum = zlib.crc32(_HEADER.pack(_MARK, len(records), len(blocks), 0) + listed)
        return b"".join((_HEADER.pack(_MARK, len(records), len(blocks), checksum), listed, *blocks))


class RidIndex:
    """A segment's index of requests, read block by block.

    Raises FileNotFoundError if there is none, RunFormatError, naming the file, for a damaged one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with _opened(path) as fd:
            self._size = os.fstat(fd).st_size
            head = os.pread(fd, _SMALL, 0)
            mark, records, blocks, checksum = _HEADER.unpack_from(head) if len(head) >= _HEADER.size else _NOTHING
            self._start = _HEADER.size + blocks * _BLOCK.size
            if self._start + records * _RECORD.size != self._size:
                raise self._damaged()
            if self._start > len(head):
                head = os.pread(fd, self._start, 0)
        self._whole = head if len(head) == self._size else None
        listed = head[_HEADER.size : self._start]
        if mark != _MARK or zlib.crc32(_HEADER.pack(mark, records, blocks, 0) + listed) != checksum:
            raise self._damaged()
        self._firsts: list[bytes] = []
        self._checksums: list[int] = []
        for first, block_checksum in _BLOCK.iter_unpack(listed):
            self._firsts.append(first)
            self._checksums.append(block_checksum)

    def find(self, rid: str) -> dict[str, Span]:
        """Per table the row groups that may hold rows of a request; only tables that have some."""
        wanted = hash_of(rid)
        # A block may begin with the hash that the one before ends with.
        place = max(bisect_left(self._firsts, wanted) - 1, 0)
        spans: dict[str, Span] = {}
        while place < len(self._firsts) and self._firsts[place] <= wanted:
            block = self._block(place)
            start = block.find(wanted)
            while start >= 0:
                if start % _RECORD.size == 0:
                    _widen(spans, _RECORD.unpack_from(block, start)[1:])
                start = block.find(wanted, start + 1)
            place += 1
        return spans

    def hashes(self) -> bytes:
        """The hashes of all its requests, one behind the other."""
        blocks = map(self._block, range(len(self._firsts)))
        return b"".join(record[0] for block in blocks for record in _RECORD.iter_unpack(block))

    def _block(self, number: int) -> bytes:
        start = self._start + number * _PER_BLOCK * _RECORD.size
        size = min(_PER_BLOCK * _RECORD.size, self._size - start)
        if self._whole is not None:
            block = self._whole[start : start + size]
        else:
            with _opened(self.path) as fd:
                block = os.pread(fd, size, start)
        if zlib.crc32(block) != self._checksums[number]:
            raise self._damaged()
        return block

    def _damaged(self) -> RunFormatError:
        return RunFormatError(f"{self.path}: damaged: it is not the index that was written")


@contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _widen(spans: dict[str, Span], bounds: Sequence[int]) -> None:
    """Add what a record says. Two requests may share a hash: then the row groups of both are looked at."""
    for table, first, last in zip(RID_TABLES, bounds[::2], bounds[1::2], strict=True):
        if first != _NONE:
            known = spans.get(table, Span(first, last))
            spans[table] = Span(min(known.first, first), max(known.last, last))


def hash_of(rid: str) -> bytes:
    """What stands for a request in an index. Two may share it."""
    return blake2b(rid.encode(), digest_size=HASH_BYTES).digest()
