"""`schedscope load`: send a recorded workload to a server over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.progress import Progress
from schedscope.cli.options import Switch
from schedscope.cli.output import console, errors, write_json
from schedscope.engine.errors import UsageError

ALL_FAILED = 1


def load(
    trace: Path,
    /,
    *,
    url: str,
    requests: int | None = None,
    scale: float = 1.0,
    speed: float = 1.0,
    max_concurrency: int | None = None,
    json: Switch = False,
) -> int:
    """Send a workload in Mooncake's trace format and report TTFT, hit rate and errors.

    Parameters
    ----------
    trace
        JSONL (also .gz) with timestamp (ms), input_length, output_length, hash_ids and maybe priority per line.
    url
        Where the server listens, such as http://127.0.0.1:30000.
    requests
        Only the first so many rows.
    scale
        Multiplies prompt, block and output lengths: 0.05 fits the traces to the small built-in model.
    speed
        How many times faster than recorded; 0 sends everything at once.
    max_concurrency
        Requests in flight at most.
    json
        Print one JSON document instead of a table.
    """
    from schedscope.engine.load import run_load
    from schedscope.engine.trace import read_trace

    for name, value in (("--requests", requests), ("--max-concurrency", max_concurrency)):
        if value is not None and value <= 0:
            raise UsageError(f"{name} {value}: must be greater than 0")
    if scale <= 0 or speed < 0:
        raise UsageError("--scale must be greater than 0 and --speed not negative")
    rows = read_trace(trace)
    total = len(rows) if requests is None else min(requests, len(rows))
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("requests", total=total)
        report = asyncio.run(
            run_load(
                rows,
                url=url,
                speed=speed,
                requests=requests,
                scale=scale,
                max_concurrency=max_concurrency,
                on_outcome=lambda _: progress.advance(task),
            )
        )
    if json:
        write_json(report.to_json())
    else:
        console.print(report.render())
    return 0 if report.completed else ALL_FAILED
