"""What older versions of the log wrote, as this version would have: applied where a file or journal of one is read.

For each version there is a note of what it added or changed. A new one gets an entry in `_ADDED` or `_CHANGED`, and a
recorded run of the version before it in `tests/data`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from schedscope.recorder.frame import SCHEMA_VERSION, Rows
from schedscope.recorder.rows import Row, telling
from schedscope.recorder.schema import TABLES, Table

Columns = Mapping[str, Sequence[Any]]


def schema_of(version: int, table: Table) -> pa.Schema:
    """The columns that files of a version have."""
    added = {name for later in _later(version) for name in _ADDED.get(later, {}).get(table.name, {})}
    return pa.schema([field for field in table.arrow if field.name not in added])


def upgrade(version: int, table: Table, found: pa.Table) -> pa.Table:
    """A table of an older version as of this one."""
    columns = dict(zip(found.column_names, (column.to_pylist() for column in found.columns), strict=True))
    upgraded = _upgrade(version, table, columns)
    if upgraded is None:
        return table.arrow.empty_table()
    return pa.table([pa.array(upgraded[c.name], c.type) for c in table.columns], schema=table.arrow)


def upgrade_frame(version: int, payload: bytes) -> bytes:
    """A frame's payload of an older version as of this one. What isn't rows is given back as it is."""
    try:
        frame: Rows = msgspec.msgpack.decode(payload)
        return msgspec.msgpack.encode({name: _upgrade_rows(version, TABLES[name], frame[name]) for name in frame})
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return payload  # whoever decodes it says what is wrong with it


def _upgrade_rows(version: int, table: Table, rows: Sequence[Row]) -> list[Row]:
    names = [name for name in schema_of(version, table).names if name != table.names[0]]
    upgraded = _upgrade(version, table, dict(zip(names, zip(*rows, strict=True), strict=True)))
    return [] if upgraded is None else list(zip(*(upgraded[column.name] for column in table.row), strict=True))


def _upgrade(version: int, table: Table, columns: Columns) -> Columns | None:
    """Columns as of this version; None: such rows can't be read any more."""
    count = len(next(iter(columns.values())))
    for later in _later(version):
        if table.name in _RENEWED.get(later, ()):
            return None
        added = _ADDED.get(later, {}).get(table.name, {})
        columns = {**columns, **{name: [value] * count for name, value in added.items()}}
        if (change := _CHANGED.get(later, {}).get(table.name)) is not None:
            columns = {**columns, **change(columns)}
    return columns


def _later(version: int) -> range:
    return range(version + 1, SCHEMA_VERSION + 1)


# ---- version 2 ---------------------------------------------------------------------------------------------------
# Keys don't repeat what the row says elsewhere. A decision is hashed as it is packed. Checkpoints have another form.
# Steps say whose tokens they took in: before, it was always their own batch's. No pass has set a mark that is not set.


def _shorter_keys(columns: Columns) -> Columns:
    keys, names = list(columns["key"]), list(columns["key_names"])
    for place, (key, of) in enumerate(zip(keys, names, strict=True)):
        if key is not None:
            kept = telling(tuple(of.split(",")))
            keys[place] = json.dumps(json.loads(key)[: len(kept)], separators=(",", ":"))
            names[place] = ",".join(kept)
    return {"key": keys, "key_names": names}


def _clearer_steps(columns: Columns) -> Columns:
    ran = [kind not in {"idle", "none"} for kind in columns["kind"]]
    marks = zip(columns["batch_is_full_pass"], columns["batch_is_full"], strict=True)
    return {
        "committed": [step if own else None for step, own in zip(columns["step"], ran, strict=True)],
        "batch_is_full_pass": [number if is_full else None for number, is_full in marks],
    }


def _without_hash(columns: Columns) -> Columns:
    return {"decision_hash": [None] * len(columns["pass"])}


_ADDED: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "checkpoints": {"since": 0, "carried": []},
        "steps": {"record_ns": None, "committed": None, "given": None},
        "passes": {"divergence": None},
    },
}
"""Version to table to new columns, with the value that rows of older versions get."""

_CHANGED: dict[int, dict[str, Callable[[Columns], Columns]]] = {
    2: {"decisions": _shorter_keys, "passes": _without_hash, "steps": _clearer_steps},
}
"""Version to table to what makes its changed columns from the older ones."""

_RENEWED: dict[int, frozenset[str]] = {2: frozenset({"checkpoints"})}
"""Version to tables whose older rows can't be read any more, and can be done without."""
