"""`schedscope inspect`: what a run takes on disk, and in how many pieces it is."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text
from schedscope.cli.options import LogDir, RunName, Switch
from schedscope.cli.output import console, gap_words, print_json
from schedscope.engine.errors import UsageError
from schedscope.recorder.footprint import Footprint, TableSize, measure
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run
from schedscope.recorder.schema import TABLES
from schedscope.replay.describe import printable

LARGEST = 3
"""Columns that are named beside their table."""


def inspect(run: RunName = None, *, log: LogDir = None, table: str | None = None, json: Switch = False) -> int:
    """Show what a run takes on disk: rows and bytes by table and column, segments, journals and gaps.

    Parameters
    ----------
    table
        Show all columns of this table.
    json
        Print one JSON document instead of tables.
    """
    if table is not None and table not in TABLES:
        raise UsageError(f"--table {table}: no such table; there are: {', '.join(TABLES)}")
    recorded = Run.open(resolve_run(run, log))
    found = measure(recorded)
    if json:
        print_json("schedscope.inspect/1", _json(found))
        return 0
    console.print(Text(printable(found.where), style="bold"), soft_wrap=True)
    console.print(
        f"{found.status}; log version {found.version}, written by schedscope {found.schedscope}; "
        f"{_size(found.bytes)}, {found.bytes_per_decision:.1f} bytes a decision",
        markup=False,
        soft_wrap=True,
    )
    kept = recorded.manifest.kept
    if kept is not None:
        console.print(
            f"cut out of {printable(kept.run)}, from {kept.before_s:g} s before to {kept.after_s:g} s behind "
            f"{kept.at[:19].replace('T', ' ')} UTC: {printable(kept.reason)}",
            markup=False,
            soft_wrap=True,
        )
    if found.overhead is not None:
        console.print(
            f"recording took {found.overhead.per_step_us:.1f} µs a step on the schedulers' threads, "
            f"{found.overhead.share:.2%} of the time of all steps",
            markup=False,
            soft_wrap=True,
        )
    chosen = [each for each in found.tables if each.name == table]
    for part in (_ranks(found), _columns(chosen[0]) if chosen else _tables(found)):
        console.print()
        console.print(part)
    for gap in found.gaps:
        console.print(f"gap: {gap_words(gap)}", style="yellow", markup=False, soft_wrap=True)
    return 0


def _ranks(found: Footprint) -> Table:
    shown = _empty("rank", "passes", "merged segments", "others", "journals", "size")
    for rank in found.ranks:
        passes = f"{rank.passes:,}" if not rank.passes else f"{rank.passes:,} ({rank.first_pass} to {rank.last_pass})"
        shown.add_row(str(rank.rank), passes, str(rank.merged), str(rank.sealed), str(rank.journals), _size(rank.bytes))
    return shown


def _tables(found: Footprint) -> Table:
    shown = _empty("table", "rows", "size", "bytes/row", "bytes/decision")
    shown.add_column("largest columns (bytes/row)")
    for table in found.tables:
        largest = sorted(table.columns, key=lambda column: -column.bytes)[:LARGEST]
        shown.add_row(
            table.name,
            f"{table.rows:,}",
            _size(table.bytes),
            f"{table.bytes_per_row:.2f}",
            f"{table.bytes / found.decisions:.2f}" if found.decisions else "-",
            ", ".join(f"{column.name} {column.bytes / table.sealed_rows:.2f}" for column in largest if column.bytes),
        )
    return shown


def _columns(table: TableSize) -> Table:
    shown = _empty("column", "size", "bytes/row", "of its table", "compressed to")
    for column in sorted(table.columns, key=lambda column: -column.bytes):
        shown.add_row(
            column.name,
            _size(column.bytes),
            f"{column.bytes / table.sealed_rows:.3f}" if table.sealed_rows else "-",
            f"{100 * column.bytes / table.bytes:.1f} %" if table.bytes else "-",
            f"{100 * column.bytes / column.plain_bytes:.0f} %" if column.plain_bytes else "-",
        )
    return shown


def _empty(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _json(found: Footprint) -> dict[str, Any]:
    return {
        "run": found.where,
        "status": found.status,
        "version": found.version,
        "schedscope": found.schedscope,
        "bytes": found.bytes,
        "bytes_per_decision": found.bytes_per_decision,
        "overhead": None if found.overhead is None else found.overhead._asdict(),
        "tables": [
            {**table._asdict(), "columns": [column._asdict() for column in table.columns]} for table in found.tables
        ],
        "ranks": [rank._asdict() for rank in found.ranks],
        "gaps": [msgspec.to_builtins(gap) for gap in found.gaps],
    }
