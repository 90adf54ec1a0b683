"""The journal: the frames of a rank that are not sealed yet, one file, only ever appended to.

It can be read while it is written and after its writer was killed, without any repair: what is whole counts. A
journal starts with a head frame, which says whose it is and which frame number comes next; so a missing frame is
noticed even at the very start. Files are numbered, and a segment has the number of the journal it was made of.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pyarrow as pa
from schedscope.engine.errors import RunFormatError
from schedscope.recorder.decisions import Decisions, append
from schedscope.recorder.frame import (
    HEADER_BYTES,
    MARK,
    SCHEMA_VERSION,
    Damage,
    Frame,
    Kind,
    MalformedRowsError,
    Rows,
    decode,
    pack,
    scan,
)
from schedscope.recorder.manifest import Gap, own_version
from schedscope.recorder.ring import LINK
from schedscope.recorder.rows import Row
from schedscope.recorder.schema import TABLES, to_arrow

SUFFIX = ".journal"
FORMAT = "schedscope.journal"

BY_PASS = ("passes", "decisions", "steps", "events")
"""Tables whose rows are looked up by pass. (A checkpoint's pass is one that hasn't been made.)"""

SORTED = ("passes", "decisions")
"""Those of them in which every row belongs to a pass, in ascending order."""

_PASS_POSITION = {name: [column.name for column in TABLES[name].row].index("pass") for name in BY_PASS}


_CHUNKS = 64
"""Of an Arrow column, before they are made one."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says about itself."""

    schema: str = FORMAT
    version: int = SCHEMA_VERSION
    schedscope: str = ""
    rank: int
    number: int
    first_frame: int
    """Number of the frame that comes next in the rank's stream."""


@dataclass(slots=True)
class Journal:
    """What a journal holds."""

    path: Path
    rank: int
    number: int
    first_frame: int
    next_frame: int
    """Number that the stream goes on with, in the next journal."""
    rows: Rows = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    """Without a torn tail, which may still be written."""
    torn: int = 0
    """Bytes of an unfinished frame at the end."""
    ended: bool = False
    """The rank's writer closed: nothing comes behind."""
    known: dict[str, pa.Table] = field(default_factory=dict, repr=False)
    """Rows that were made Arrow at an earlier look at the same journal; of this one as many as it has."""

    def table(self, name: str) -> pa.Table:
        """Rows of a table as Arrow, with their rank."""
        rows = self.rows.get(name, [])
        made = self.known.get(name, TABLES[name].arrow.empty_table())
        if made.num_rows < len(rows):
            new = rows.behind(made.num_rows) if isinstance(rows, Decisions) else rows[made.num_rows :]
            made = pa.concat_tables([made, to_arrow(TABLES[name], self.rank, new)])
            if made.column(0).num_chunks > _CHUNKS:
                made = made.combine_chunks()
            self.known[name] = made
        return made.slice(0, len(rows))

    @property
    def pass_range(self) -> tuple[int, int] | None:
        """First and last pass that any row belongs to; None: no pass."""
        passes: list[int] = []
        for table, position in _PASS_POSITION.items():
            rows = self.rows.get(table, ())
            if isinstance(rows, Decisions):
                passes += rows.pass_range() or ()
            else:
                passes += [row[position] for row in rows if row[position] is not None]
        return (min(passes), max(passes)) if passes else None

    def count(self, table: str) -> int:
        """Rows of a table."""
        return len(self.rows.get(table, ()))

    def of_pass(self, table: str, number: int) -> Sequence[Row]:
        """The rows of one of the tables `BY_PASS` that belong to a pass."""
        rows, position = self.rows.get(table, []), _PASS_POSITION[table]
        if isinstance(rows, Decisions):
            return list(rows.of_pass(number))
        if table not in SORTED:
            return [row for row in rows if row[position] == number]

        def by_pass(row: Row) -> int:
            found: int = row[position]
            return found

        found: list[Row] = rows[bisect_left(rows, number, key=by_pass) : bisect_right(rows, number, key=by_pass)]
        return found

    def torn_gap(self) -> Gap | None:
        """The torn tail, once it is known that no one writes it any more."""
        if not self.torn:
            return None
        detail = f"{self.torn} bytes of an unfinished frame at the end of {self.path.name}"
        return Gap(rank=self.rank, reason="torn", frame=self.next_frame, detail=detail)


class JournalWriter:
    """Appends frames to a new journal. Raises OSError, and then has not appended; also if the file exists."""

    def __init__(self, directory: Path, rank: int, number: int, first_frame: int) -> None:
        self.path = directory / f"{number:08d}{SUFFIX}"
        self.number = number
        self.size = 0
        self._synced = 0
        self.passes = 0
        """Passes appended."""
        self.frames = 0
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        head = Head(schedscope=own_version(), rank=rank, number=number, first_frame=first_frame)
        try:
            self._write(pack(Kind.HEAD, msgspec.msgpack.encode(head)))
        except OSError:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    def append(self, frame: bytes, passes: int) -> None:
        """Add a whole, numbered frame. It can be read by others when this returns."""
        self._write(frame)
        self.frames += 1
        self.passes += passes

    def sync(self) -> None:
        """Make what was appended survive a loss of power. Raises OSError."""
        if self.size > self._synced:
            os.fdatasync(self._fd)
            self._synced = self.size

    def close(self) -> None:
        """Close the file; it stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)


def read_journal(path: Path) -> Journal:
    """Read all whole frames of a journal, whatever state it is in.

    Raises FileNotFoundError if it is gone (sealed meanwhile), RunFormatError for a file that is no journal or is
    of a newer version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunFormatError(f"{path}: can't be read: {error}") from None
    if not data.startswith(MARK[: len(data)]) and not any(isinstance(item, Frame) for item in scan(data)):
        raise RunFormatError(f"{path}: not a schedscope journal")
    items = iter(scan(data))
    head = next(items, None)
    rank, number = _named(path)
    if isinstance(head, Frame) and head.kind is Kind.HEAD:
        content = _read_head(path, head)
        journal = Journal(path, content.rank, content.number, content.first_frame, content.first_frame)
        return _collect(journal, items, content.version)
    journal = Journal(path, rank, number, 0, 0)
    if head is None:
        return journal
    if len(data) < HEADER_BYTES or (isinstance(head, Damage) and head.torn and head.ordinal is not None):
        journal.torn = len(data)
        return journal
    # The head is damaged. Go by the file's name and by the first frame behind it: if that isn't the one that the
    # part before ends with, `Parts.gaps` notices.
    rest = list(items)
    numbers = [item.ordinal for item in rest if item.ordinal is not None]
    if not numbers:
        journal.gaps.append(Gap(rank=rank, reason="corrupt", detail=f"nothing in {path.name} can be read"))
        return journal
    journal.first_frame = journal.next_frame = numbers[0]
    return _collect(journal, rest)


def read_ring(directory: Path, data: bytes, rank: int, number: int, next_frame: int) -> Journal:
    """What a rank's ring holds beyond its journals, as one more of them. `data` is from before they were read."""
    return _collect(Journal(directory / LINK, rank, number, next_frame, next_frame), scan(data))


class JournalTail:
    """A journal that is looked at again and again while it grows: each look decodes only what is new.

    That holds as long as the journal is undamaged. A damaged one is read from its start at every look, as
    `read_journal` does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, pa.Table] = {}
        self._grown: Journal | None = None
        """Everything up to `_whole`; None before the first look, and of a damaged journal."""
        self._whole = 0
        """Offset one past the last frame that was taken in."""
        self._seen: Journal | None = None
        self._size = 0

    def look(self) -> Journal:
        """The journal as it is now; what is returned doesn't grow. Errors as `read_journal`."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._seen is not None and not self._seen.torn and size == self._size:
                    return self._seen
                if size < self._whole:
                    self._grown, self._whole, self._known = None, 0, {}
                file.seek(self._whole)
                data = file.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RunFormatError(f"{self.path}: can't be read: {error}") from None
        self._size = self._whole + len(data)
        self._seen = self._take_in(data)
        if self._seen is None:
            self._grown, self._whole, self._known = None, 0, {}
            self._seen = read_journal(self.path)
        return self._seen

    def _take_in(self, data: bytes) -> Journal | None:
        """The journal with these bytes behind those before; None if something is wrong with them."""
        base, torn = self._whole, 0
        for item in scan(data):
            if isinstance(item, Damage):
                if not item.torn or self._grown is None:
                    return None
                torn = item.end - item.start
            elif self._grown is None:
                if item.kind is not Kind.HEAD:
                    return None
                head = _read_head(self.path, item)
                if head.version != SCHEMA_VERSION:
                    return None
                self._grown = Journal(self.path, head.rank, head.number, head.first_frame, head.first_frame)
            elif item.kind is Kind.END and item.ordinal == self._grown.next_frame:
                self._grown.ended = True
            elif item.kind is Kind.ROWS and item.ordinal == self._grown.next_frame:
                try:
                    rows = decode(item.payload)
                except MalformedRowsError:
                    return None
                append(self._grown.rows, rows)
                self._grown.next_frame += 1
            else:
                return None
            if not torn:
                self._whole = base + item.end
        if self._grown is None:
            return None
        rows = {table: values.copy() for table, values in self._grown.rows.items()}
        return replace(self._grown, rows=rows, torn=torn, known=self._known)


def _named(path: Path) -> tuple[int, int]:
    """Rank and number that a journal's path gives it."""
    rank = path.parent.name.removeprefix("rank=")
    number = path.name.removesuffix(SUFFIX)
    if not (rank.isdecimal() and number.isdecimal()):
        raise RunFormatError(f"{path}: not the name of a journal")
    return int(rank), int(number)


def _read_head(path: Path, frame: Frame) -> Head:
    try:
        head = msgspec.msgpack.decode(frame.payload, type=Head)
    except msgspec.DecodeError as error:
        raise RunFormatError(f"{path}: not a schedscope journal: {error}") from None
    if head.version > SCHEMA_VERSION:
        raise RunFormatError(
            f"{path}: log version {head.version}, written by schedscope {head.schedscope}; this one, {own_version()}, "
            f"reads up to version {SCHEMA_VERSION}: upgrade to schedscope>={head.schedscope}"
        )
    return head


def _decode(payload: bytes, version: int) -> Rows:
    if version < SCHEMA_VERSION:
        from schedscope.recorder.migrate import upgrade_frame

        payload = upgrade_frame(version, payload)
    return decode(payload)


def _collect(journal: Journal, items: Iterable[Frame | Damage], version: int = SCHEMA_VERSION) -> Journal:
    """Fold frames into rows, and numbers that are missing into gaps, with the passes around them."""
    damaged = False
    last_pass: int | None = None
    open_gaps: list[Gap] = []

    def lost(reason: str, frame: int | None, frames: int | None, detail: str | None = None) -> None:
        gap = Gap(rank=journal.rank, reason=reason, frame=frame, frames=frames, after_pass=last_pass, detail=detail)
        open_gaps.append(gap)

    for item in items:
        if isinstance(item, Damage) and item.torn:
            journal.torn = item.end - item.start
            continue
        if item.ordinal is None:
            damaged = True
            continue
        if item.ordinal < journal.next_frame:
            continue
        missing = item.ordinal - journal.next_frame
        if missing:
            lost("corrupt" if damaged else "lost", journal.next_frame, missing)
        damaged = False
        journal.next_frame = item.ordinal + 1
        if isinstance(item, Damage):
            lost("corrupt", item.ordinal, 1)
            continue
        if item.kind is Kind.END:
            journal.next_frame = item.ordinal
            journal.ended = True
            continue
        try:
            rows = _decode(item.payload, version)
        except MalformedRowsError as error:
            lost("malformed", item.ordinal, 1, str(error))
            continue
        append(journal.rows, rows)
        if passes := rows.get("passes"):
            first_pass = passes[0][0]
            journal.gaps += [msgspec.structs.replace(gap, before_pass=first_pass) for gap in open_gaps]
            open_gaps.clear()
            last_pass = passes[-1][0]
    if damaged:
        lost("corrupt", journal.next_frame, None)
    journal.gaps += open_gaps
    return journal
