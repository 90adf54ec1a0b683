"""How commands print: people's output by rich, machines' output as one JSON document."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text
from schedscope.engine.decision import Plan
from schedscope.recorder.manifest import Gap
from schedscope.recorder.rows import finite
from schedscope.replay.describe import heading, pass_table

PIPED_WIDTH = 160
"""Columns where no terminal says how many it has."""


def _console(**options: Any) -> Console:
    columns = os.environ.get("COLUMNS", "")
    if not (columns.isdecimal() and int(columns) > 0):
        os.environ.pop("COLUMNS", None)
    made = Console(highlight=False, **options)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED_WIDTH
    return made


console = _console()
errors = _console(stderr=True)


def say(label: str, words: str, style: str = "bold") -> None:
    """A labelled line; its words are shown as they are, whatever a request is called."""
    console.print(Text.assemble((label, style), f": {words}"), soft_wrap=True)


def show_pass(title: str, plan: Plan, compared: Plan | None = None) -> None:
    """A pass with its policy, budgets and queue; `compared` tells where requests stood in another plan for it."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(heading(plan)), soft_wrap=True)
    console.print(pass_table(plan, compared))


def print_json(schema: str, body: dict[str, Any]) -> None:
    """One JSON document, with the name and version of its shape first."""
    write_json({"schema": schema, **body})


def write_json(document: Mapping[str, Any]) -> None:
    """A document that has its schema already."""
    sys.stdout.write(json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def gap_words(gap: Gap) -> str:
    """What a recording is missing, in a line."""
    what = "records" if gap.frames is None else f"{gap.frames:,} records"
    after = "the start" if gap.after_pass is None else f"pass {gap.after_pass}"
    before = "the end" if gap.before_pass is None else f"pass {gap.before_pass}"
    detail = f" ({gap.detail})" if gap.detail else ""
    return f"rank {gap.rank}: {what} between {after} and {before}: {gap.reason}{detail}"
