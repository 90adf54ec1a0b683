"""Which of a rank's many small segments mention a request: one file about all, so that a look-up opens few of them.

It only saves time. A segment that it doesn't list is asked itself, one that is gone is not asked for, and a damaged
file counts as none. So nothing depends on when, or whether, it is brought up to date:

    header   mark, CRC-32 of what follows
    sizes    segments, bytes of their names
    counts   of each segment how many requests it mentions
    names    of the segments, one a line
    hashes   of each segment's requests
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from schedscope.recorder.listing import Directory
from schedscope.recorder.rids import HASH_BYTES, NAME, RidIndex, hash_of

_HEADER = struct.Struct("<8sI")
_SIZES = struct.Struct("<II")
_MARK = b"SSMENT1\n"
_FEW = 32
"""Segments that are asked one by one in less time than it takes to keep a file about them."""


class Mentions:
    """A rank's file, read again when it is another one."""

    def __init__(self, directory: Path) -> None:
        self._path = f"{directory}/{NAME}"
        self._read: tuple[int, int, int] | None = None
        """Which file that was: inode, bytes, time of its last change."""
        self._data = b""
        self._names: list[str] = []
        self._listed: frozenset[str] = frozenset()
        self._bounds: list[int] = [0]
        """Where the hashes of each segment begin, and where the last ones end."""

    def candidates(self, rid: str, names: Sequence[str]) -> Sequence[str]:
        """Of the segments of these names those that may mention a request."""
        self._refresh()
        if not self._listed:
            return names
        found = self._with(hash_of(rid))
        return [name for name in names if name not in self._listed or name in found]

    def hashes(self) -> Mapping[str, bytes]:
        """What it lists: by name of a segment, the hashes of its requests."""
        self._refresh()
        return {name: self._data[a:b] for name, (a, b) in zip(self._names, pairwise(self._bounds), strict=True)}

    def _refresh(self) -> None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._take(None, b"")
            return
        try:
            found = os.fstat(fd)
            read = found.st_ino, found.st_size, found.st_mtime_ns
            if read != self._read:
                self._take(read, os.pread(fd, found.st_size, 0))
        finally:
            os.close(fd)

    def _take(self, read: tuple[int, int, int] | None, data: bytes) -> None:
        self._read, self._data, self._names, self._bounds = read, data, [], [0]
        mark, checksum = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0)
        if mark == _MARK and zlib.crc32(memoryview(data)[_HEADER.size :]) == checksum:
            count, length = _SIZES.unpack_from(data, _HEADER.size)
            start = _HEADER.size + _SIZES.size
            counts = struct.unpack_from(f"<{count}I", data, start)
            start += 4 * count
            self._names = data[start : start + length].decode().splitlines()
            self._bounds = list(accumulate([n * HASH_BYTES for n in counts], initial=start + length))
        self._listed = frozenset(self._names)

    def _with(self, wanted: bytes) -> set[str]:
        """Names of the segments with that hash."""
        found: set[str] = set()
        start = self._data.find(wanted, self._bounds[0])
        while start >= 0:
            place = bisect_right(self._bounds, start) - 1
            if not (start - self._bounds[place]) % HASH_BYTES:
                found.add(self._names[place])
            start = self._data.find(wanted, start + 1)
        return found


def update(directory: Path) -> None:
    """Bring a rank's file up to date with its segments; where they are few, remove it. Not for two at a time.

    Raises OSError, RunFormatError for a segment that can't be read.
    """
    path = directory / NAME
    names = Directory(directory).look().segments
    if len(names) < _FEW:
        path.unlink(missing_ok=True)
        return
    known = Mentions(directory).hashes()
    hashes = [known[name] if name in known else RidIndex(f"{directory / name}/{NAME}").hashes() for name in names]
    counts = struct.pack(f"<{len(names)}I", *(len(each) // HASH_BYTES for each in hashes))
    listed = "\n".join(names).encode()
    body = b"".join((_SIZES.pack(len(names), len(listed)), counts, listed, *hashes))
    temporary = directory / f".{NAME}.tmp"
    temporary.write_bytes(_HEADER.pack(_MARK, zlib.crc32(body)) + body)
    temporary.rename(path)
