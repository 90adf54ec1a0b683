"""Marks with notes, kept in a file beside the run's directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
from schedscope.engine.errors import RunFormatError, UsageError
from schedscope.tui.cursor import Cursor

FORMAT = "schedscope.marks/1"


class Mark(NamedTuple):
    """A place that somebody marked."""

    cursor: Cursor
    view: str
    note: str


class _Saved(msgspec.Struct, frozen=True):
    rank: int
    number: int = msgspec.field(name="pass")
    rid: str | None
    view: str
    note: str


class _File(msgspec.Struct, frozen=True):
    marks: list[_Saved]
    schema: str = FORMAT


def marks_file(run: Path) -> Path:
    """Where the marks of a run are."""
    return run.with_name(f"{run.name}.marks.json")


def read_marks(run: Path) -> tuple[Mark, ...]:
    """The marks of a run, in order; none where there is no file. Raises RunFormatError."""
    path = marks_file(run)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFormatError(f"{path}: marks can't be read: {error}") from None
    return tuple(Mark(Cursor(m.rank, m.number, m.rid), m.view, m.note) for m in found.marks)


def write_marks(run: Path, marks: tuple[Mark, ...]) -> None:
    """Keep marks; the file is replaced as a whole. Raises UsageError where it can't be written."""
    path = marks_file(run)
    saved = _File([_Saved(m.cursor.rank, m.cursor.number, m.cursor.rid, m.view, m.note) for m in marks])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: marks can't be written: {error.strerror}") from None


def with_mark(marks: tuple[Mark, ...], mark: Mark) -> tuple[Mark, ...]:
    """One more, by rank and pass; it replaces one of the same place."""
    kept = [each for each in marks if each.cursor != mark.cursor]
    return tuple(sorted([*kept, mark], key=lambda each: (each.cursor.rank, each.cursor.number, each.cursor.rid or "")))
