"""Rows and frames for tests of the recorder: valid, and empty where nothing is said."""

from __future__ import annotations

from typing import Any

from schedscope.recorder.frame import Body, Kind, encode, pack
from schedscope.recorder.schema import TABLES

FILLING: dict[str, Any] = {"int32": 0, "int64": 0, "double": 0.0, "bool": False, "string": "", "list": []}
DECISIONS = 3
"""In a pass of `pass_frame`."""


def row(table: str, **given: Any) -> tuple[Any, ...]:
    """A row of a table, with the columns that are given."""
    columns = TABLES[table].row
    filled = {c.name: None if c.null else FILLING[str(c.type).partition("<")[0]] for c in columns}
    unknown = given.keys() - filled.keys()
    assert not unknown, f"no such column in {table}: {unknown}"
    return tuple((filled | given).values())


def pass_frame(number: int, padding: int = 0, **tables: list[tuple[Any, ...]]) -> Body:
    """What a frame holds: a pass, its decisions, and rows of other tables."""
    return encode(
        {
            "passes": [row("passes", stop="x" * padding, **{"pass": number})],
            "decisions": [row("decisions", rid=f"r{number}-{i}", **{"pass": number}) for i in range(DECISIONS)],
            **tables,
        }
    )


def stamp(body: Body, ordinal: int) -> bytes:
    """The frame with that number."""
    return pack(Kind.ROWS, body.payload, ordinal, body.passes)
