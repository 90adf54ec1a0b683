"""`schedscope runs`: what was recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from schedscope.cli.options import LogDir, Switch
from schedscope.cli.output import console, print_json
from schedscope.engine.errors import RunNotFoundError
from schedscope.recorder.runs import RunInfo, default_log_dir, find_runs
from schedscope.recorder.store import is_url, shown_url
from schedscope.replay.describe import printable


def runs(*, log: LogDir = None, json: Switch = False) -> int:
    """List recorded runs, newest first.

    Parameters
    ----------
    json
        Print one JSON document instead of a table.
    """
    folder = log or default_log_dir()
    if log is not None and not is_url(log) and not Path(log).is_dir():
        raise RunNotFoundError(f"--log {log}: no such directory")
    found = find_runs(folder)
    shown = shown_url(str(folder))
    if json:
        print_json("schedscope.runs/1", {"log": shown, "runs": [_json(info) for info in found]})
        return 0
    if not found:
        console.print(f"No runs in {shown}. Record one: schedscope record -- serve", markup=False)
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "created (UTC)", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "passes", "requests", "size"):
        table.add_column(name, justify="right")
    for info in found:
        table.add_row(
            Text(printable(info.path.name)),
            info.created[:19].replace("T", " "),
            info.status,
            str(info.ranks),
            f"{info.passes:,}",
            f"{info.requests:,}",
            f"{info.bytes / 1e6:.1f} MB",
        )
    console.print(table)
    for info in found:
        if info.problem is not None:
            console.print(Text(printable(info.problem), style="yellow"), soft_wrap=True)
    return 0


def _json(info: RunInfo) -> dict[str, Any]:
    facts = dataclasses.asdict(info)
    return {**facts, "path": facts.pop("where")}
