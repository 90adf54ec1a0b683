"""`schedscope query 'SQL'`: a run's tables as views, in DuckDB's SQL."""

from __future__ import annotations

import json as json_module
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from rich.table import Table
from rich.text import Text
from schedscope.cli.options import LogDir, RunName
from schedscope.cli.output import console, print_json
from schedscope.engine.errors import UsageError
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run
from schedscope.replay.describe import printable
from schedscope.replay.measures import connect_for

Format = Literal["table", "csv", "json", "parquet"]


def query(
    sql: str,
    /,
    *,
    run: RunName = None,
    log: LogDir = None,
    format: Format = "table",
    output: Path | None = None,
) -> int:
    """Ask a run anything: its tables (see docs/schema.md) are views, and so are `measured`, `turns` and `again`.

    Parameters
    ----------
    sql
        A query, such as "select rid, reason, need, have from decisions where pass = 7 order by place_after".
    format
        How to print the answer.
    output
        A file to write to instead of standard output; parquet needs one.
    """
    recorded = Run.open(resolve_run(run, log))
    if format == "parquet" and output is None:
        raise UsageError("query: --format parquet needs --output FILE")
    connection = connect_for(recorded, sql)
    try:
        relation = connection.sql(sql)
        if relation is None:
            raise UsageError("query: this statement gives no rows")
        answer = relation.to_arrow_table()
    except duckdb.Error as error:
        raise UsageError(f"query: {error}") from None
    if output is not None:
        _write(answer, format, output)
    elif format == "csv":
        pa.csv.write_csv(_plain(answer), sys.stdout.buffer)
    elif format == "json":
        print_json("schedscope.query/1", {"run": recorded.where, "rows": _rows(answer)})
    else:
        console.print(_table(answer))
    return 0


def _write(answer: pa.Table, format: Format, path: Path) -> None:
    try:
        if format == "parquet":
            pa.parquet.write_table(answer, path)
        elif format == "csv":
            pa.csv.write_csv(_plain(answer), path)
        elif format == "json":
            path.write_text(json_module.dumps(_rows(answer), indent=2, ensure_ascii=False))
        else:
            raise UsageError("query: --output needs --format csv, json or parquet")
    except OSError as error:
        raise UsageError(f"query: can't write {path}: {error}") from None


def _rows(answer: pa.Table) -> list[dict[str, object]]:
    """Rows as JSON values."""
    return [{name: _json_value(value) for name, value in row.items()} for row in answer.to_pylist()]


def _json_value(value: Any) -> Any:
    """Bytes as hex digits, and what JSON lacks as a number or text."""
    match value:
        case bytes():
            return value.hex()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case list():
            return [_json_value(item) for item in value]
        case dict():
            return {str(key): _json_value(item) for key, item in value.items()}
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def _plain(answer: pa.Table) -> pa.Table:
    """The table with nested columns as JSON text, which is all that CSV can hold."""
    for place, field in enumerate(answer.schema):
        if pa.types.is_nested(field.type):
            texts = [None if value is None else json_module.dumps(value) for value in answer.column(place).to_pylist()]
            answer = answer.set_column(place, field.name, pa.array(texts, pa.string()))
    return answer


def _table(answer: pa.Table) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for field in answer.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(Text(field.name), justify="right" if numeric else "left", overflow="fold")
    for row in answer.to_pylist():
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row.values()))
    return table
