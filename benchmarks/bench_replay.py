"""How fast a recording is rebuilt and verified, against SGLang's own `calc_priority` over the same passes.

    python benchmarks/bench_replay.py [--passes N] [--at N] [--jobs N] [--run FOLDER] [--json FILE]

See README.md in this folder for what is recorded and what the figures mean.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.recorder.frame import Rows
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.journal import Journal
from schedscope.recorder.manifest import create_run
from schedscope.recorder.parts import list_segments
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import Segment, write_segment
from schedscope.recorder.sink import DirectSink
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.shadow import Shadow
from workloads import WORKLOADS

try:
    import sglang_order
except ImportError as error:
    sglang_order = None  # type: ignore[assignment]
    WITHOUT_SGLANG = str(error)

WAITING = 128
STEP_S = 0.01
CONFIG = SchedulerConfig(
    schedule_policy="lpm", max_total_tokens=200_000, max_running_requests=64, chunked_prefill_size=8192
)

Json = dict[str, Any]


# ---- a run to measure ----------------------------------------------------------------------------------------


def record(folder: Path, passes: int) -> Path:
    """Record a busy server: W1's requests, and always as many waiting."""
    path = create_run(folder, "bench")
    sink = DirectSink(path, 0, Description(source=Source("bench", "1"), config=CONFIG.to_dict()), Limits())
    tracer = RunTracer(sink, checkpoint_every=sys.maxsize)
    scheduler = Scheduler(CONFIG, tracer)
    tracer.attach(scheduler)
    chance = random.Random(1)
    workload = WORKLOADS[0]
    arrived = 0
    now = 0.0
    while scheduler.passes < passes:
        now += STEP_S
        missing = WAITING - len(scheduler.state.queue)
        for arrival in workload.arrivals(range(arrived, arrived + missing)):
            limit = chance.randint(16, 256)
            prompt = tokens.encode(arrival.ids)
            sampling = SamplingParams(max_new_tokens=limit)
            scheduler.arrive(Request(rid=arrival.rid, prompt=prompt, sampling=sampling), now)
        arrived += missing
        step = scheduler.step(now)
        if step.batch is None:
            continue
        sampled = [None if member.unfinished else chance.randrange(2**16) for member in step.batch.members]
        lives = [member.live for member in step.batch.members]
        finishes = {
            live.rid: Finish("length", live.output_len + 1)
            for live in lives
            if live.output_len + 1 >= live.request.sampling.max_new_tokens
        }
        scheduler.commit(step.batch, sampled, finishes, now)
    tracer.close()
    return path


def rows_of(segment: Segment) -> Rows:
    """All rows of a part, as its journal had them."""
    found: Rows = {}
    for table in TABLES.values():
        piece = segment.read(table, table.names[1:])
        if piece is not None:
            found[table.name] = list(zip(*(column.to_pylist() for column in piece.columns), strict=True))
    return found


def add_checkpoints(path: Path) -> Json:
    """What the companion does while it seals. Returns what it cost."""
    shadow = Shadow(CONFIG)
    seconds = 0.0
    for segment in list_segments(path, 0):
        rows, index = rows_of(segment), segment.index
        start = time.perf_counter()
        made = shadow.advance(rows)
        seconds += time.perf_counter() - start
        for table, more in made.items():
            rows[table] = sorted(rows.get(table, []) + more)
        frames = index.first_frame, index.next_frame
        journal = Journal(segment.path.parent / f"{segment.number:08d}.journal", 0, segment.number, *frames, rows)
        journal.ended = index.ended
        shutil.rmtree(segment.path)
        write_segment(journal)
    assert shadow.stopped is None, shadow.stopped
    run = Run.open(path)
    count = run.passes(0).count
    files = [file for segment in list_segments(path, 0) for file in segment.path.iterdir()]
    size = {table: sum(file.stat().st_size for file in files if file.stem == table) for table in TABLES}
    decisions = sum(part.table("decisions", ("pass",)).num_rows for part in run.parts(0))
    return {
        "parts": len(run.parts(0)),
        "passes": count,
        "decisions": decisions,
        "checkpoints": sum(part.table("checkpoints", ("seq",)).num_rows for part in run.parts(0)),
        "shadow_us_per_pass": round(seconds / count * 1e6, 1),
        "bytes": size,
        "checkpoint_bytes_per_decision": round(size["checkpoints"] / decisions, 3),
    }
