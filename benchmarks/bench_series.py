"""How long the questions of a dashboard take on a long run.

    python benchmarks/bench_series.py [--passes N] [--folder FOLDER] [--json FILE]

See README.md in this folder for what is measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import LEVEL, Index, make_segment
from schedscope.replay.series import Timeline
from schedscope.replay.window import Window

WAITING = 40
"""Requests in each pass."""
COMING = 10
"""Of them new ones, of which as many are admitted and end."""
STEPS = 3
"""Per pass."""
STEP_NS = 12_000_000
PER_SEGMENT = 10_000
BUCKETS = 200
LAST_S = 60
TARGET_MS = 120


def made_up(folder: Path, passes: int) -> Path:
    """A run of so many passes, its columns filled by formulas; those not given are 0, empty or null."""
    path = create_run(folder, "series")
    directory = path / "rank=0"
    directory.mkdir()
    for number, first in enumerate(range(0, passes, PER_SEGMENT)):
        last = min(first + PER_SEGMENT, passes) - 1
        tables = {name: rows(name, first, last) for name in FORMULAS}
        index = Index(
            rank=0,
            number=number,
            first_frame=number,
            next_frame=number + 1,
            first_pass=first,
            last_pass=last,
            ended=last == passes - 1,
            rows={name: table.num_rows for name, table in tables.items()},
            passes=(first, last),
        )
        make_segment(directory, index, {name: [table] for name, table in tables.items()}, LEVEL)
    return path


FORMULAS: dict[str, tuple[str, dict[str, str]]] = {
    "steps": (
        f"range($first * {STEPS}, ($last + 1) * {STEPS}) AS made(n)",
        {
            "step": "n",
            "seq": "n * 100",
            "kind": f"CASE WHEN n % {STEPS} = 0 THEN 'prefill' ELSE 'decode' END",
            "gate": f"CASE WHEN n % {STEPS} = 0 THEN NULL WHEN n % 7 < 4 THEN 'batch_is_full' ELSE 'queue_empty' END",
            "pass": f"CASE WHEN n % {STEPS} = 0 THEN n // {STEPS} END",
            "count": "1",
            "start_ns": f"n * {STEP_NS}",
            "end_ns": f"n * {STEP_NS} + 11000000",
            "forward_ns": "10500000",
            "running": "20 + n % 17",
            "queue_len": f"{WAITING} + n % 11",
            "available": "20000 + n % 9000",
            "evictable": "200000 + n % 30000",
            "pool_size": "300000",
            "batch_tokens": "300 + n % 400",
            "retracted": "CASE WHEN n % 500 = 0 THEN ['x'] ELSE [] END",
        },
    ),
    "passes": (
        "range($first, $last + 1) AS made(n)",
        {
            "pass": "n",
            "step": f"n * {STEPS}",
            "seq": f"n * {STEPS} * 100",
            "configured_policy": "'lpm'",
            "active_policy": "CASE WHEN n % 300 < 40 THEN 'fcfs' ELSE 'lpm' END",
            "fallback": "CASE WHEN n % 300 < 40 THEN 'queue_too_long' END",
            "queue_len": f"{WAITING} + n % 100",
            "running": "20 + n % 17",
            "stop": "CASE WHEN n % 3 = 0 THEN 'NO_TOKEN' WHEN n % 3 = 1 THEN 'budget' ELSE 'queue_end' END",
            "admitted": f"{COMING}",
            "decide_ns": "400000",
        },
    ),
    "decisions": (
        f"range($first * {WAITING}, ($last + 1) * {WAITING}) AS made(n)",
        {
            "pass": f"n // {WAITING}",
            "rid": f"md5((n // {WAITING} * {COMING} + n % {WAITING})::VARCHAR)",
            "place_before": f"n % {WAITING}",
            "place_after": f"n % {WAITING}",
            "key": "'[-' || n % 900 || ']'",
            "key_names": "'negative_matched'",
            # One request of twenty loses 100 tokens before its turn.
            "prefix_len": f"(n // {WAITING} * {COMING} + n % {WAITING}) % 500 + "
            f"CASE WHEN (n // {WAITING} * {COMING} + n % {WAITING}) % 20 = 0 THEN 100 ELSE 0 END",
            "result": f"CASE WHEN n % {WAITING} < {COMING} THEN 'CONTINUE' WHEN n % {WAITING} = {COMING} "
            "THEN 'NO_TOKEN' END",
            "reason": f"CASE WHEN n % {WAITING} < {COMING} THEN 'admitted' WHEN n % {WAITING} = {COMING} "
            "THEN 'memory' END",
            "admitted": f"n % {WAITING} < {COMING}",
            "admit_prefix_len": f"CASE WHEN n % {WAITING} <= {COMING} THEN n % 500 END",
            "extend_len": f"CASE WHEN n % {WAITING} < {COMING} THEN 600 END",
        },
    ),
    "requests": (
        f"range($first * {COMING}, ($last + 1) * {COMING}) AS made(n)",
        {
            "rid": "md5(n::VARCHAR)",
            "prompt_tokens": "500 + n % 1000",
            "output_tokens": "20",
            "cached_tokens": "n % 500",
            "max_new_tokens": "20",
            "arrive_ns": f"n // {COMING} * {STEPS * STEP_NS} - n * 7919 % 4000000000",
            "queue_ns": f"n // {COMING} * {STEPS * STEP_NS} - n * 7919 % 4000000000 + 1000",
            "admit_ns": f"n // {COMING} * {STEPS * STEP_NS} + 300000",
            "first_token_ns": f"n // {COMING} * {STEPS * STEP_NS} + 10900000",
            "finish_ns": f"n // {COMING} * {STEPS * STEP_NS} + {20 * STEP_NS}",
            "end_reason": "'length'",
        },
    ),
    "events": (
        f"range($first * {COMING} * 6, ($last + 1) * {COMING} * 6) AS made(n)",
        {
            "seq": "n",
            "step": f"n // {COMING * 6} * {STEPS}",
            "pass": f"n // {COMING * 6}",
            "kind": "['arrive', 'queue', 'admit', 'first_token', 'finish', 'evict'][n % 6 + 1]",
            "rid": "CASE WHEN n % 6 < 5 THEN md5((n // 6)::VARCHAR) END",
            "tokens": "CASE WHEN n % 6 IN (0, 2, 4, 5) THEN n % 700 END",
            "node": "CASE WHEN n % 6 = 5 THEN n END",
        },
    ),
}
FILLING = {"int32": "0", "int64": "0", "double": "0.0", "bool": "false", "string": "''", "list": "[]"}


def rows(name: str, first: int, last: int) -> pa.Table:
    """A table's rows of these passes."""
    source, given = FORMULAS[name]
    table = TABLES[name]
    columns = {c.name: "NULL" if c.null else FILLING[str(c.type).partition("<")[0]] for c in table.columns} | given
    selected = ", ".join(f'{sql} AS "{column}"' for column, sql in columns.items())
    connection = duckdb.connect()
    made = connection.sql(f"SELECT {selected} FROM {source}", params={"first": first, "last": last}).to_arrow_table()
    return made.cast(pa.schema([pa.field(c.name, c.type) for c in table.columns])).cast(table.arrow)


def questions(timeline: Timeline) -> dict[str, Callable[[Window], object]]:
    """What a screen asks about a window."""
    return {
        "load": timeline.load,
        "latency": timeline.latency,
        "refused": lambda window: timeline.shares("refused", window),
        "gates": lambda window: timeline.shares("gate", window),
        "policies": lambda window: timeline.shares("policy", window),
        "stretches of policies": lambda window: timeline.stretches("policy", window),
        "stretches of gates": lambda window: timeline.stretches("gate", window),
        "heat map": timeline.heat_map,
        "ranks": timeline.ranks,
        "evicted, then needed": timeline.forgone,
        "a request by prefix": lambda _: timeline.find("abc12"),
    }


def main() -> None:
    """Measure and print."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="schedscope-bench-", dir=options.folder))
    try:
        run = Run.open(made_up(folder, options.passes))
        begin = time.perf_counter()
        timeline = Timeline.open(run)
        opened = time.perf_counter() - begin
        begin = time.perf_counter()
        Timeline.open(run, last_s=LAST_S)
        opened_end = time.perf_counter() - begin
        whole = timeline.window(buckets=BUCKETS)
        middle = (whole.begin_ns + whole.end_ns) // 2
        part = timeline.window(middle, middle + (whole.end_ns - whole.begin_ns) // 50, buckets=BUCKETS)
        figures: dict[str, Any] = {"open_s": opened, "open_end_s": opened_end, "whole_ms": {}, "part_ms": {}}
        print(
            f"{options.passes:,} passes, {options.passes * WAITING:,} decisions, {options.passes * COMING:,} requests, "
            f"opened in {opened:.2f} s, its last {LAST_S} s in {opened_end:.2f} s; milliseconds, target {TARGET_MS}"
        )
        print(f"{'':24}{'whole run':>12}{'a 50th':>12}")
        for name, ask in questions(timeline).items():
            figures["whole_ms"][name], figures["part_ms"][name] = (
                _median_ms(ask, window, options.repeat) for window in (whole, part)
            )
            print(f"{name:24}{figures['whole_ms'][name]:12.1f}{figures['part_ms'][name]:12.1f}")
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _median_ms(ask: Callable[[Window], object], window: Window, repeat: int) -> float:
    ask(window)
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        ask(window)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=9, help="times that each question is asked")
    parser.add_argument("--folder", help="where to make the run, which is removed again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
