"""The schema: complete, and documented as generated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from schedscope.recorder.journal import BY_PASS
from schedscope.recorder.schema import RANK, SCHEMA_VERSION, TABLES, Table, to_markdown
from schedscope.recorder.source_tracer import StepRow

DOCS = Path(__file__).parent.parent / "docs" / "schema.md"


def test_the_documentation_is_up_to_date() -> None:
    assert DOCS.read_text() == to_markdown(), "python -m schedscope.recorder.schema > docs/schema.md"


def test_it_prints_the_documentation() -> None:
    command = [sys.executable, "-m", "schedscope.recorder.schema"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == to_markdown()


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_table_is_described(table: Table) -> None:
    assert table.names[0] == RANK
    assert len(set(table.names)) == len(table.names)
    assert table.doc.endswith(".")
    for column in table.columns:
        assert column.doc.endswith("."), column.name
        assert column.unit != "", column.name
        assert column.null is None or column.null, column.name
        assert table.arrow.field(column.name).nullable == (column.null is not None)


def test_passes_are_found_where_they_are_looked_for() -> None:
    assert {name for name, table in TABLES.items() if "pass" in table.names} == {*BY_PASS, "checkpoints", "views"}
    assert SCHEMA_VERSION == 2


def test_a_step_of_a_watched_server_has_the_columns_in_their_order() -> None:
    assert [name.rstrip("_") for name in StepRow.__struct_fields__] == [c.name for c in TABLES["steps"].row]


def test_a_writer_needs_no_arrow() -> None:
    """A scheduler process that has a companion is not made to load Arrow."""
    code = "import sys, schedscope.recorder.sink; print(sorted({'pyarrow', 'duckdb', 'torch'} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
