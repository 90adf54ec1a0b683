"""How fast a recording is rebuilt and verified, against SGLang's own `calc_priority` over the same passes.

    python benchmarks/bench_replay.py [--passes N] [--at N] [--jobs N] [--keep FOLDER] [--json FILE]

See README.md in this folder for what is recorded and what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan
from schedscope.engine.live import Live
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.tracer import Event, Tracer
from schedscope.engine.view import View
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.frame import Rows
from schedscope.recorder.hello import Description, Source
from schedscope.recorder.journal import Journal
from schedscope.recorder.manifest import create_run
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.recorder.segment import Segment, write_segment
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.rebuild import Rebuild
from schedscope.replay.replayer import Replayer
from schedscope.replay.script import read_scripts
from schedscope.replay.shadow import Shadow
from schedscope.replay.verify import verify
from workloads import WORKLOADS, Arrival

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


def add_checkpoints(path: Path, config: SchedulerConfig = CONFIG) -> Json:
    """What the companion does while it seals. Returns what it cost."""
    shadow = Shadow(config)
    seconds = 0.0
    for segment in list_segments(path, 0):
        rows, index = rows_of(segment), segment.index
        start = time.perf_counter()
        made = shadow.advance(rows)
        seconds += time.perf_counter() - start
        for table, more in made.items():
            rows[table] = sorted(rows.get(table, []) + more)
        number, frames = segment.first_number, (index.first_frame, index.next_frame)
        journal = Journal(segment.path.parent / f"{number:08d}.journal", 0, number, *frames, rows)
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


# ---- random access -------------------------------------------------------------------------------------------


def access(path: Path, count: int) -> Json:
    """Rebuild the scheduler before random passes, each time with nothing opened yet; milliseconds."""
    chance = random.Random(2)
    passes = Run.open(path).passes(0).count
    taken = []
    for _ in range(count):
        number = chance.randrange(passes)
        start = time.perf_counter()
        moment = Replayer(Run.open(path), 0).at(number)
        taken.append((time.perf_counter() - start) * 1e3)
        assert moment.number == number
    taken.sort()
    quantiles = {f"p{q}_ms": round(taken[min(len(taken) - 1, len(taken) * q // 100)], 1) for q in (50, 90, 99)}
    return {"count": count, **quantiles, "max_ms": round(taken[-1], 1)}


# ---- verified replay against calc_priority -------------------------------------------------------------------


class Mirror(Tracer):
    """The same passes through SGLang: the same queues over a prefix cache with the same sequences.

    SGLang's cache keeps no locks here, so now and then it evicts another sequence than the recorded scheduler.
    """

    def __init__(self, path: Path) -> None:
        self.passes = 0
        self.same = 0
        """Passes that it sorts as recorded."""
        self.seconds = 0.0
        """CPU time of `calc_priority` alone."""
        self._lives: dict[str, Live] = {}
        self._requests: dict[str, Any] = {}
        self._side = sglang_order.SGLangQueue(CONFIG.schedule_policy)
        self._steps = self._run(Replayer(Run.open(path), 0))

    def _run(self, replayer: Replayer) -> Any:
        rebuild = Rebuild(Scheduler(CONFIG, self))
        for part in replayer.parts:
            for script in read_scripts(part):
                for turn in rebuild.turns(script):
                    rebuild.take(turn, script)
                    yield turn

    def advance(self, passes: int) -> None:
        """Go on until so many passes were made."""
        while self.passes < passes and next(self._steps, None) is not None:
            pass

    def on_prompt(self, live: Live) -> None:
        """A request for SGLang, too."""
        self._lives[live.rid] = live
        ids = array("q", array("i", live.request.prompt))
        self._side.arrive([Arrival(live.rid, ids, 0.0, 0)])
        self._requests[live.rid] = self._side.queue.pop()

    def on_event(self, event: Event) -> None:
        """Keep both caches alike."""
        if event.kind == "evict":
            self._side.evict(event.tokens or 0)
        elif event.kind in {"insert", "finish"} and event.rid is not None:
            live = self._lives[event.rid]
            kept = live.length - 1 if event.kind == "finish" else event.tokens
            self._side.finish(array("q", array("i", live.tokens)[:kept]), evict=False)
            if event.kind == "finish":
                del self._lives[event.rid], self._requests[event.rid]

    def on_pass(self, number: int, view: View, plan: Plan, random_state: RandomState | None) -> None:
        """Sort the same queue."""
        del number, random_state
        assert plan.ordering is not None
        self._side.queue = [self._requests[request.rid] for request in view.queue]
        start = time.process_time()
        self._side.sort()
        self.seconds += time.process_time() - start
        self.same += self._side.rids == [place.request.rid for place in plan.ordering.ranked]
        self.passes += 1


def race(path: Path, passes: int) -> Json:
    """Verify passes of the run, batch by batch in turn with SGLang's sorting of the same passes.

    Both in CPU time, which other programs on the machine disturb less.
    """
    mirror = Mirror(path) if sglang_order else None
    aside = 0.0

    def progress(done: int) -> None:
        nonlocal aside
        start = time.process_time()
        if mirror is not None:
            mirror.advance(done)
        aside += time.process_time() - start

    start = time.process_time()
    verdict = verify(Run.open(path), 0, stop_pass=passes - 1, progress=progress)
    seconds = time.process_time() - start - aside
    assert verdict.divergence is None, verdict.divergence
    result: Json = {"passes": verdict.passes, "steps": verdict.steps, "cpu_us_per_pass": _us(seconds, verdict.passes)}
    if mirror is not None:
        result["sglang_cpu_us_per_pass"] = _us(mirror.seconds, mirror.passes)
        result["sorted_alike"] = round(mirror.same / mirror.passes, 4)
        result["times_sglang"] = round(result["sglang_cpu_us_per_pass"] / result["cpu_us_per_pass"], 2)
    return result


def command(path: Path, jobs: int) -> Json:
    """`schedscope replay all`, from its start to its end; wall time."""
    words = [sys.executable, "-m", "schedscope.cli.main", "replay", "all", "--json", "--run", str(path)]
    passes = Run.open(path).passes(0).count
    result: Json = {}
    for count in sorted({1, jobs}):
        start = time.perf_counter()
        subprocess.run([*words, "--jobs", str(count)], check=True, stdout=subprocess.DEVNULL)
        result[f"{count}_jobs_us_per_pass"] = _us(time.perf_counter() - start, passes)
    return result


def rebuild_only(path: Path, passes: int) -> Json:
    """Re-run every step without recording or comparing anything."""
    replayer = Replayer(Run.open(path), 0)
    start = time.process_time()
    rebuild = Rebuild(Scheduler(CONFIG))
    for part in replayer.parts:
        for script in read_scripts(part):
            for turn in rebuild.turns(script):
                if rebuild.scheduler.passes >= passes:
                    return {"cpu_us_per_pass": _us(time.process_time() - start, passes)}
                rebuild.take(turn, script)
    return {"cpu_us_per_pass": _us(time.process_time() - start, rebuild.scheduler.passes)}


def _us(seconds: float, count: int) -> float:
    return round(seconds / count * 1e6, 1)


# ---- program -------------------------------------------------------------------------------------------------


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=10_000, help="length of the run")
    parser.add_argument("--at", type=int, default=100, help="random passes to rebuild")
    parser.add_argument("--race", type=int, default=2_000, help="passes to verify against SGLang")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="also verify with so many processes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run here, or use the one that is here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    if sglang_order is None:
        print(f"without SGLang, ours only: {WITHOUT_SGLANG}", file=sys.stderr)
    else:
        sglang_order.prepare()
    result: Json = {"python": platform.python_version()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        known = sorted(folder.glob("*-bench")) if folder.exists() else []
        if known:
            path = known[-1]
        else:
            path = record(folder, args.passes)
            result["run"] = add_checkpoints(path)
        result["access"] = access(path, args.at)
        result["rebuild"] = rebuild_only(path, args.race)
        result["verify"] = race(path, args.race)
        result["command"] = command(path, args.jobs)
    for name, figures in result.items():
        print(f"{name}: {json.dumps(figures)}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
