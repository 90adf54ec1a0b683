"""The ring: memory through which a scheduler hands over its frames, and which outlives both ends.

A file in memory that the scheduler and the companion have mapped. To write is to copy a frame and then to store one
number, how far the ring is written: no system call, no lock, no thread, nothing kept. To consume is to store how far
it is read. Both numbers only grow; a frame is there from the moment the first one passes it, however the writer dies.

Anyone else may look: bytes that the companion has consumed are in the journal by then, so a look at the ring and then
at the journals misses nothing.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from schedscope.engine.errors import RunFormatError
from schedscope.recorder.frame import HEADER_BYTES, Header, parse_header
from schedscope.recorder.lock import hold, is_held

LINK = "ring"
"""In a rank's directory: leads to its ring while there may be something in it."""

MEMORY = Path("/dev/shm")
"""Where files live in memory on Linux."""

CAPACITY = 32 * 2**20
"""Bytes. Pages are taken when the ring is made: the scheduler never waits for one, and none can be missing later."""

_MARK = b"SSCRING1"
_DATA = 8192
"""Offset of the data, two pages behind the start."""
_CAPACITY_AT, _WRITTEN_AT, _READ_AT = 1, 8, 16
"""Places of 8-byte words. Those that change have a cache line each."""
_OWNER = slice(1024, _DATA)
"""Where the rank's directory is named."""
_PREFIX = "schedscope-"
_PATIENCE = 20
"""Calls for which a frame may not be whole."""


log = logging.getLogger("schedscope.recorder")


class _Ring:
    """A mapped ring. Raises OSError if it can't be opened, RunFormatError if it is something else."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        with path.open("r+b" if writable else "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _DATA or file.read(len(_MARK)) != _MARK:
                raise RunFormatError(f"{path}: not the ring of a scheduler that is recorded")
            # Populated: the first write to a page shall not be slower than the others.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(file.fileno(), size, flags, protection)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:_DATA].cast("Q")
        self.capacity = self._words[_CAPACITY_AT]
        if self.capacity != size - _DATA:
            raise RunFormatError(f"{path}: a ring of {size - _DATA} bytes that claims to have {self.capacity}")

    @property
    def owner(self) -> Path:
        """The rank's directory."""
        return Path(os.fsdecode(bytes(self._bytes[_OWNER]).rstrip(b"\0")))

    @property
    def written(self) -> int:
        """Bytes written since the beginning."""
        return self._words[_WRITTEN_AT]

    @property
    def read(self) -> int:
        """Bytes consumed since the beginning."""
        return self._words[_READ_AT]

    def close(self) -> None:
        """Let go of the memory. A second call does nothing."""
        self._words.release()
        self._bytes.release()
        self._map.close()

    def _copy(self, start: int, end: int) -> bytes:
        """Bytes from one position of the stream to another."""
        first = start % self.capacity
        last = first + end - start
        if last <= self.capacity:
            return bytes(self._bytes[_DATA + first : _DATA + last])
        head = self._bytes[_DATA + first : _DATA + self.capacity]
        return bytes(head) + bytes(self._bytes[_DATA : _DATA + last - self.capacity])


class RingWriter(_Ring):
    """The scheduler's end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, writable=True)
        self._position = self.written
        """Nobody else moves it."""
        self._limit = self.read + self.capacity
        """Up to where there is room for sure: to look how far the companion is takes memory from its processor."""
        # Until this process ends, whether it is killed or not, nobody takes the ring for left over.
        self._lock = hold(path)

    def close(self) -> None:
        """Let go of the memory. A second call does nothing."""
        super().close()
        if self._lock is not None:
            self._lock.release()

    def write(self, frame: bytes | bytearray) -> bool:
        """Add a frame, if there is room for it."""
        end = self._position + len(frame)
        if end > self._limit:
            self._limit = self.read + self.capacity
            if end > self._limit:
                return False
        first = _DATA + self._position % self.capacity
        over = first + len(frame) - _DATA - self.capacity
        if over <= 0:
            self._bytes[first : first + len(frame)] = frame
        else:
            self._bytes[first:] = frame[:-over]
            self._bytes[_DATA : _DATA + over] = frame[-over:]
        self._words[_WRITTEN_AT] = self._position = end
        return True


class RingReader(_Ring):
    """The companion's end; only one may consume."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, writable=True)
        self._patience = _PATIENCE

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """What is there. A frame is consumed when the next one is asked for.

        Some processors may show the number that tells of a frame before its last bytes. Then its checksum doesn't hold
        yet, and it is left for a later call; one that never comes right is given as it is.

        Raises ValueError if something has overwritten the ring.
        """
        for header, frame in self.look():
            if zlib.crc32(memoryview(frame)[HEADER_BYTES:]) != header.checksum and self._patience > 0:
                self._patience -= 1
                return
            self._patience = _PATIENCE
            yield header, frame
            self._words[_READ_AT] = self.read + len(frame)

    def look(self) -> Iterator[tuple[Header, bytes]]:
        """What is there, without consuming it. Raises ValueError if something has overwritten the ring."""
        position, written = self.read, self.written
        while position < written:
            header = parse_header(self._copy(position, position + HEADER_BYTES))
            end = position + HEADER_BYTES + header.length
            if end > written:
                raise ValueError(f"{self.path}: a frame goes on behind the end")
            yield header, self._copy(position, end)
            position = end


def create_ring(directory: Path, capacity: int = CAPACITY) -> Path:
    """Make a ring for the rank with that directory, in memory if there is room, and a link that leads to it.

    The capacity, bytes, is rounded up to whole pages. Raises OSError if neither memory nor disk has room.
    """
    directory = directory.absolute()
    name = f"{_PREFIX}{directory.parent.name[:60]}-{directory.name}-{secrets.token_hex(4)}"
    try:
        path = _allocate(MEMORY / name, capacity, directory)
    except OSError as error:
        log.warning(
            "%s: the buffer is on disk, which may slow the scheduler: %s: %s", directory, MEMORY, error.strerror
        )
        return _allocate(directory / LINK, capacity, directory)
    try:
        (directory / LINK).symlink_to(path)
    except OSError:
        path.unlink()
        raise
    return path


def remove_ring(directory: Path) -> None:
    """Remove a rank's ring and the link to it."""
    link = directory / LINK
    if link.is_symlink():
        link.readlink().unlink(missing_ok=True)
    link.unlink(missing_ok=True)


def peek(directory: Path) -> bytes:
    """Frames that a rank's scheduler has handed over and its companion may not have taken; changes nothing.

    Empty if there is no ring. To be read before the journals.
    """
    try:
        ring = _Ring(directory / LINK, writable=False)
    except (OSError, RunFormatError):
        return b""
    try:
        start, end = ring.read, ring.written
        data = ring._copy(start, end)
        # What was consumed during the copy may have been overwritten.
        return data[ring.read - start :]
    finally:
        ring.close()


def left_over() -> Iterator[RingReader]:
    """Rings in memory that no scheduler writes to any more. Whether a companion still reads them is not known here."""
    for path in sorted(MEMORY.glob(f"{_PREFIX}*")):
        try:
            if not is_held(path):
                yield RingReader(path)
        except (OSError, RunFormatError):
            continue  # someone else's


def _allocate(path: Path, capacity: int, owner: Path) -> Path:
    """A ring whose memory is all there: a page that is missing when it is written to would kill the writer."""
    capacity = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _DATA + capacity)
        with mmap.mmap(fd, _DATA + capacity) as memory:
            memory[8 * _CAPACITY_AT : 8 * _CAPACITY_AT + 8] = capacity.to_bytes(8, sys.byteorder)
            name = os.fsencode(owner)
            memory[_OWNER.start : _OWNER.start + len(name)] = name
            memory[: len(_MARK)] = _MARK
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)
    return path
