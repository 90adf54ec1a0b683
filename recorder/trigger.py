"""Triggers: a condition on what was just recorded, in SQL, that makes a flight recorder keep what lies around it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import duckdb
from schedscope.engine.errors import UsageError
from schedscope.recorder.frame import Rows
from schedscope.recorder.schema import TABLES, Table, to_arrow

_SOME: dict[str, Any] = {"int32": 1, "int64": 1, "double": 1.0, "bool": False, "string": "x"}
_SOME["list<element: string>"] = _SOME["list<item: string>"] = ["x"]
"""A value of each type."""

WATCHED = ("requests", "passes", "steps")

MEASURES = {
    "ttft_ms": "(first_token_ns - arrive_ns) / 1e6",
    "queue_ms": "(admit_ns - queue_ns) / 1e6",
    "e2e_ms": "(finish_ns - arrive_ns) / 1e6",
}
"""What a condition on a request may also name."""


class Watch(Protocol):
    """Looks at what was just recorded, and says what of it is to be kept."""

    text: str
    """As it was asked for."""

    def check(self, rows: Rows, rank: int, config: Mapping[str, Any]) -> str | None:
        """What made it go off, in words; None: nothing did.

        Args:
            rows: of a sealed journal, by table.
            config: of the rank's scheduler.
        """


class Trigger:
    """A condition such as `ttft_ms > 2000`, on requests as they end, or `passes: queue_len > 100`.

    Raises UsageError for one that DuckDB doesn't understand.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        table, colon, condition = text.partition(":")
        named = bool(colon) and table.strip() in TABLES
        if named and table.strip() not in WATCHED:
            raise UsageError(f"--keep-when {text!r}: conditions are on {', '.join(WATCHED)}")
        self.table: Table = TABLES[table.strip() if named else "requests"]
        measures = "".join(f", {sql} AS {name}" for name, sql in MEASURES.items())
        source = f"(SELECT *{measures if self.table.name == 'requests' else ''} FROM recorded)"
        self._query = f"SELECT * FROM {source} WHERE {condition if named else text} LIMIT 1"
        self._connection = duckdb.connect()
        self._connection.execute("SET threads = 1")
        self._connection.execute("SET enable_external_access = false")
        try:
            if len(duckdb.extract_statements(self._query)) != 1:
                raise UsageError(f"--keep-when {text!r}: one condition, not several statements")
            # Not only on no row: what fails on values is to fail now.
            self._ask({self.table.name: [tuple(_SOME[str(column.type)] for column in self.table.row)]})
        except duckdb.Error as error:
            raise UsageError(f"--keep-when {text!r}: {str(error).splitlines()[0]}") from None

    def check(self, rows: Rows, rank: int = 0, config: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        """See `Watch.check`."""
        del config
        found = self._ask(rows, rank)
        if found is None:
            return None
        what = found["rid"] if self.table.name == "requests" else found[self.table.row[0].name]
        return f"{self.text} ({self.table.name.removesuffix('es' if self.table.name == 'passes' else 's')} {what})"

    def _ask(self, rows: Rows, rank: int = 0) -> dict[str, object] | None:
        recorded = to_arrow(self.table, rank, rows.get(self.table.name, ()))
        self._connection.register("recorded", recorded)
        found = self._connection.sql(self._query).to_arrow_table().to_pylist()
        return found[0] if found else None
