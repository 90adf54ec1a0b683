"""What a recording takes on disk, and how long it takes to find something in it.

    python benchmarks/bench_store.py

Prints tables; `--json FILE` writes the figures down. Sizes come from a run that the real scheduler makes
(`traffic.py`), times from one of made-up rows, which is faster to make and as big as one likes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import traffic
from schedscope.recorder import mentions
from schedscope.recorder.compact import MergeLimits, tidy
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES, to_arrow
from schedscope.recorder.segment import LEVEL, Index, make_segment

POLICIES = ("lpm", "hrrn", "fcfs", "dfs-weight")
QUEUE = 128
ADMITTED = 4
"""Requests that come and go in each made-up pass: each waits for QUEUE / ADMITTED passes."""
SHOWN_COLUMNS = 8
FILLING: dict[str, Any] = {"int32": 0, "int64": 0, "double": 0.0, "bool": False, "string": "", "list": []}


# ---- bytes -------------------------------------------------------------------------------------------------------


def sizes(folder: Path, policy: str, passes: int) -> dict[str, Any]:
    """Bytes per row of a recorded run, sealed and merged."""
    begin = time.perf_counter()
    path = traffic.record(folder, policy, passes)
    recorded_s = time.perf_counter() - begin
    before = _bytes(path)
    begin = time.perf_counter()
    tidy(path / "rank=0", grace_s=0.0, final=True)
    merged_s = time.perf_counter() - begin
    after = _bytes(path)
    rows = {name: Run.open(path).table(name, 0, [TABLES[name].names[1]]).num_rows for name in TABLES}
    columns: dict[str, float] = {}
    for segment in list_segments(path, 0):
        metadata = pq.read_metadata(segment.path / "decisions.parquet")
        for group in range(metadata.num_row_groups):
            for column in map(metadata.row_group(group).column, range(metadata.num_columns)):
                name = column.path_in_schema.partition(".")[0]
                columns[name] = columns.get(name, 0) + column.total_compressed_size / rows["decisions"]
    return {
        "policy": policy,
        "passes": passes,
        "decisions": rows["decisions"],
        "segments": len(list_segments(path, 0)),
        "sealed": before["decisions"] / rows["decisions"],
        "merged": after["decisions"] / rows["decisions"],
        "tables": {name: after[name] / rows["decisions"] for name in after},
        "columns": dict(sorted(columns.items(), key=lambda item: -item[1])),
        "record_s": recorded_s,
        "merge_s": merged_s,
    }


def _bytes(run: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for file in run.glob("rank=0/*.p*/*"):
        found[file.stem] = found.get(file.stem, 0) + file.stat().st_size
    return found


# ---- a made-up run -----------------------------------------------------------------------------------------------


def rid(number: int) -> str:
    """The name of a request: 32 hex digits, as SGLang makes them."""
    return blake2b(b"%d" % number, digest_size=16).hexdigest()


def made_up(folder: Path, passes: int, per_segment: int, limits: MergeLimits | None) -> Path:
    """A run with QUEUE decisions a pass; its segments are merged within limits, or stay, as a flight recorder's do."""
    path = create_run(folder, "made-up")
    directory = path / "rank=0"
    directory.mkdir()
    for number, first in enumerate(range(0, passes, per_segment)):
        _segment(directory, number, _rows(range(first, min(first + per_segment, passes))))
    if limits is None:
        mentions.update(directory)
    else:
        tidy(directory, limits, 0.0, final=True)
    return path


def _segment(directory: Path, number: int, rows: dict[str, list[tuple[Any, ...]]]) -> None:
    passes = [row[0] for row in rows.get("passes", ())]
    index = Index(
        rank=0,
        number=number,
        first_frame=number,
        next_frame=number + 1,
        first_pass=passes[0] if passes else None,
        last_pass=passes[-1] if passes else None,
        ended=False,
        rows={name: len(each) for name, each in rows.items()},
        passes=(passes[0], passes[-1]) if passes else None,
    )
    make_segment(directory, index, {name: [to_arrow(TABLES[name], 0, each)] for name, each in rows.items()}, LEVEL)


def _rows(passes: range) -> dict[str, list[tuple[Any, ...]]]:
    rows: dict[str, list[tuple[Any, ...]]] = {
        name: [] for name in ("passes", "steps", "decisions", "events", "requests")
    }
    for number in passes:
        rows["passes"].append(_row("passes", **{"pass": number, "step": 2 * number, "queue_len": QUEUE}))
        rows["steps"].append(_row("steps", **{"pass": number, "step": 2 * number}))
        rows["steps"].append(_row("steps", step=2 * number + 1))
        oldest = ADMITTED * (number + 1) - QUEUE
        for place in range(QUEUE):
            admitted = place < ADMITTED
            rows["decisions"].append(
                _row(
                    "decisions",
                    **{"pass": number, "rid": rid(oldest + place), "place_before": place, "place_after": place},
                    **{"key": f"[-{place * 7 % 900}]", "key_names": "negative_matched", "admitted": admitted},
                    **({"need": place + 0.5, "have": 1000.25 + number, "reason": "admitted"} if admitted else {}),
                )
            )
        for place in range(ADMITTED):
            name = rid(oldest + place)
            for kind in ("arrive", "queue", "admit", "first_token", "finish"):
                rows["events"].append(_row("events", rid=name, kind=kind, **{"pass": number, "step": 2 * number}))
            rows["requests"].append(_request(oldest + place, number))
    return rows


def _request(number: int, moment: int) -> tuple[Any, ...]:
    arrive = moment * 10_000_000 + number % 7_919
    return _row("requests", rid=rid(number), arrive_ns=arrive, first_token_ns=arrive + 10**7 + number % 10_007 * 10**5)


def _row(table: str, **given: Any) -> tuple[Any, ...]:
    if table not in _EMPTY:
        columns = TABLES[table].row
        _EMPTY[table] = {c.name: None if c.null else FILLING[str(c.type).partition("<")[0]] for c in columns}
    return tuple((_EMPTY[table] | given).values())


_EMPTY: dict[str, dict[str, Any]] = {}


# ---- times -------------------------------------------------------------------------------------------------------


def milliseconds(calls: Iterator[Callable[[], object]]) -> dict[str, float]:
    """Median and worst of some calls; and the median of the processor's time, which a busy machine hardly changes."""
    times, cpu = [], []
    for call in calls:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - begin_cpu) * 1e3)
    return {"median": statistics.median(times), "max": max(times), "cpu": statistics.median(cpu), "calls": len(times)}


def look_ups(path: Path, passes: int, count: int, seed: int = 3) -> dict[str, dict[str, float]]:
    """Times of finding passes and requests, with a fresh `Run` each and with one that has looked before."""
    chance = random.Random(seed)
    numbers = [chance.randrange(passes) for _ in range(count)]
    rids = [rid(ADMITTED * chance.randrange(100, passes - 100)) for _ in range(count)]
    run = Run.open(path)
    for number in range(0, passes, max(passes // 40, 1)):
        run.pass_rows(0, number)
    for name in rids[:3]:
        run.request_rows(name)
    step = numbers[0] // 2
    return {
        "pass, cold": milliseconds((lambda n=n: Run.open(path).pass_rows(0, n)) for n in numbers),
        "pass, warm": milliseconds((lambda n=n: run.pass_rows(0, n)) for n in numbers),
        "pass, the next": milliseconds((lambda n=n: run.pass_rows(0, n)) for n in range(step, step + count)),
        "request, cold": milliseconds((lambda r=r: Run.open(path).request_rows(r)) for r in rids),
        "request, warm": milliseconds((lambda r=r: run.request_rows(r)) for r in rids),
    }


TTFT = """
SELECT arrive_ns // 1000000000 AS second, quantile_cont((first_token_ns - arrive_ns) / 1e9, 0.99) AS p99
FROM requests WHERE first_token_ns IS NOT NULL GROUP BY second ORDER BY second
"""


def ttft(folder: Path, requests: int, per_segment: int, count: int) -> dict[str, float]:
    """Times of a percentile per second over all requests of a run."""
    path = create_run(folder, "requests")
    directory = path / "rank=0"
    directory.mkdir()
    for number, first in enumerate(range(0, requests, per_segment)):
        _segment(directory, number, {"requests": [_request(i, i) for i in range(first, first + per_segment)]})
    connection = Run.open(path).connect()

    def ask() -> None:
        answer = connection.execute(TTFT).fetchall()
        assert len(answer) > requests // 200

    return milliseconds(ask for _ in range(count))


# ---- the whole ---------------------------------------------------------------------------------------------------

TARGETS_MS = {"pass, cold": 10, "pass, warm": 2, "request, cold": 10, "request, warm": 10, "TTFT p99 per second": 120}


def main() -> None:
    """Measure and print."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="schedscope-bench-", dir=options.folder))
    figures: dict[str, Any] = {"sizes": [], "times_ms": {}}
    try:
        for policy in options.policies:
            figures["sizes"].append(sizes(folder, policy, options.passes))
            _show_sizes(figures["sizes"][-1])
        if options.decisions:
            _measure_times(folder, options, figures)
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measure_times(folder: Path, options: argparse.Namespace, figures: dict[str, Any]) -> None:
    passes = options.decisions // QUEUE
    path = made_up(folder, passes, 1_000, MergeLimits())
    print(f"\n{passes * QUEUE:,} decisions, {QUEUE} a pass, in {len(list_segments(path, 0))} segments; milliseconds")
    times = look_ups(path, passes, options.repeat)
    times["TTFT p99 per second"] = ttft(folder, options.requests, 20_000, max(options.repeat // 10, 5))
    figures["times_ms"] = times
    print(f"{'':22}{'median':>9}{'max':>9}{'CPU':>9}{'target':>9}")
    for name, found in times.items():
        target = TARGETS_MS.get(name)
        print(
            f"{name:22}{found['median']:9.2f}{found['max']:9.2f}{found['cpu']:9.2f}{f'{target:9}' if target else '':>9}"
        )
    few, many = (
        look_ups(made_up(folder, segments * 20, 20, None), segments * 20, options.repeat) for segments in (100, 1_000)
    )
    figures["ratio_1000_to_100_segments"] = {name: many[name]["cpu"] / few[name]["cpu"] for name in few}
    print("\n1,000 segments of 20 passes against 100 of them: ratio of CPU medians")
    for name, ratio in figures["ratio_1000_to_100_segments"].items():
        print(f"{name:22}{ratio:9.2f}   ({few[name]['cpu']:.2f} and {many[name]['cpu']:.2f} ms)")


def _show_sizes(found: dict[str, Any]) -> None:
    print(
        f"\n{found['policy']}: {found['passes']:,} passes, {found['decisions']:,} decisions, "
        f"{found['segments']} segments (recorded in {found['record_s']:.0f} s, merged in {found['merge_s']:.1f} s)"
    )
    print(f"  decisions, bytes a row     {found['merged']:.2f} merged, {found['sealed']:.2f} as sealed")
    tables = ", ".join(f"{name} {size:.2f}" for name, size in sorted(found["tables"].items(), key=lambda i: -i[1]))
    print(f"  all files, bytes a decision {tables}")
    columns = list(found["columns"].items())[:SHOWN_COLUMNS]
    print("  columns                    " + ", ".join(f"{name} {size:.2f}" for name, size in columns))
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--passes", type=int, default=20_000, help="recorded passes per policy")
    parser.add_argument("--decisions", type=int, default=4_000_000, help="made-up decisions to look into; 0: don't")
    parser.add_argument("--requests", type=int, default=1_000_000, help="made-up requests for the percentile")
    parser.add_argument("--repeat", type=int, default=100, help="look-ups of each kind")
    parser.add_argument("--folder", help="where to make the runs, which are removed again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
