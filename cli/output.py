"""How commands print: people's output by rich, machines' output as one JSON document."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console

PIPED_WIDTH = 160
"""Columns where no terminal says how many it has."""


def _console(**options: Any) -> Console:
    made = Console(highlight=False, **options)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED_WIDTH
    return made


console = _console()
errors = _console(stderr=True)


def print_json(schema: str, body: dict[str, Any]) -> None:
    """One JSON document, with the name and version of its shape first."""
    sys.stdout.write(json.dumps({"schema": schema, **body}, indent=2, ensure_ascii=False) + "\n")
