"""What older versions of the log wrote, as this version would have: applied where a file or journal of one is read.

For each version there is a note of what it added or changed. A new one gets an entry in `_ADDED` or `_CHANGED`, and a
recorded run of the version before it in `tests/data`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from schedscope.recorder.frame import SCHEMA_VERSION, Row, Rows
from schedscope.recorder.rows import decision_hash, telling
from schedscope.recorder.schema import TABLES, Table

Columns = Mapping[str, Sequence[Any]]
Others = Callable[[str], Sequence[Row]]
"""The rows of another table from the same frames, upgraded already."""


def schema_of(version: int, table: Table) -> pa.Schema:
    """The columns that files of a version have."""
    added = {
        name for later in range(version + 1, SCHEMA_VERSION + 1) for name in _ADDED.get(later, {}).get(table.name, {})
    }
    return pa.schema([field for field in table.arrow if field.name not in added])


def upgrade(version: int, table: Table, found: pa.Table, others: Callable[[str], pa.Table]) -> pa.Table:
    """A table of an older version as of this one.

    Args:
        others: other tables from the same file set, upgraded.
    """
    columns: dict[str, Any] = dict(zip(found.column_names, found.columns, strict=True))
    for later in range(version + 1, SCHEMA_VERSION + 1):
        for name, value in _ADDED.get(later, {}).get(table.name, {}).items():
            columns[name] = pa.array([value] * found.num_rows, table.arrow.field(name).type)
        change = _CHANGED.get(later, {}).get(table.name)
        if change is not None:
            plain = {
                name: column if isinstance(column, list) else column.to_pylist() for name, column in columns.items()
            }
            made = change(plain, lambda name: _rows(others(name)))
            columns |= {name: pa.array(values, table.arrow.field(name).type) for name, values in made.items()}
    return pa.table([columns[name] for name in table.names], schema=table.arrow)


def upgrade_frame(version: int, payload: bytes) -> bytes:
    """A frame's payload of an older version as of this one. What isn't rows is given back as it is."""
    try:
        frame: Rows = msgspec.msgpack.decode(payload)
        upgraded: Rows = {}
        for name in sorted(frame, key=_CHANGED_LAST.__contains__):
            upgraded[name] = _upgrade_rows(version, TABLES[name], frame[name], upgraded)
        return msgspec.msgpack.encode({name: upgraded[name] for name in frame})
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return payload  # whoever decodes it says what is wrong with it


def _upgrade_rows(version: int, table: Table, rows: Sequence[Row], others: Rows) -> list[Row]:
    names = [name for name in schema_of(version, table).names if name != table.names[0]]
    columns: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
    for later in range(version + 1, SCHEMA_VERSION + 1):
        for name, value in _ADDED.get(later, {}).get(table.name, {}).items():
            columns[name] = [value] * len(rows)
        change = _CHANGED.get(later, {}).get(table.name)
        if change is not None:
            columns |= change(columns, lambda name: others.get(name, []))
    return list(zip(*(columns[column.name] for column in table.row), strict=True))


def _rows(table: pa.Table) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in table.columns[1:]), strict=True))


# ---- version 2: keys don't repeat what the row says elsewhere, and the hash of a decision is that of such rows -----


def _shorter_keys(columns: Columns, others: Others) -> Columns:
    del others
    keys, names = list(columns["key"]), list(columns["key_names"])
    for place, (key, of) in enumerate(zip(keys, names, strict=True)):
        if key is not None:
            kept = telling(tuple(of.split(",")))
            keys[place] = json.dumps(json.loads(key)[: len(kept)], separators=(",", ":"))
            names[place] = ",".join(kept)
    return {"key": keys, "key_names": names}


def _new_hashes(columns: Columns, others: Others) -> Columns:
    decisions: defaultdict[int, list[Row]] = defaultdict(list)
    for row in others("decisions"):
        decisions[row[0]].append(row)
    return {"decision_hash": [decision_hash(decisions[number]) for number in columns["pass"]]}


_ADDED: dict[int, dict[str, dict[str, Any]]] = {}
"""Version to table to new columns, with the value that rows of older versions get."""

_CHANGED: dict[int, dict[str, Callable[[Columns, Others], Columns]]] = {
    2: {"decisions": _shorter_keys, "passes": _new_hashes},
}
"""Version to table to what makes its changed columns from the older ones."""

_CHANGED_LAST = {"passes"}
"""Tables whose changes look at other tables."""
