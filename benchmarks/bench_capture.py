"""What recording costs on the scheduler's thread, against SGLang's own scheduling pass in the same process.

    python benchmarks/bench_capture.py [--json FILE] [--passes N] [--waiting 40,128] [--levels decisions,passes]

See README.md in this folder for what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sglang_order
from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.recorder.companion import Companion
from schedscope.recorder.hello import LEVELS, Description, Detail, Level, Source
from schedscope.recorder.manifest import create_run
from schedscope.recorder.options import OPTIONS
from schedscope.recorder.run import Run
from schedscope.recorder.sink import CompanionSink, open_sink
from schedscope.recorder.tracer import RunTracer
from workloads import WORKLOADS, Arrival, Workload

TURNOVER = 8
"""Requests that are admitted by a pass and finish with their first token; as many arrive behind it."""
WARM_UP = 50

Json = dict[str, Any]


class TimedTracer(RunTracer):
    """Measures what it does on the scheduler's thread."""

    def __init__(self, sink: CompanionSink) -> None:
        super().__init__(sink)
        self.about_pass = 0
        """Nanoseconds spent on what a pass decided, all of it handed over, since the last `take`."""
        self.about_requests = 0
        """The same, on arrivals, outputs and ends of requests, and on the step's own row."""

    def arrived(self) -> None:
        """Hand over what arrived, as a server's loop that turns once more would."""
        start = time.perf_counter_ns()
        self._flush()
        self.about_requests += time.perf_counter_ns() - start

    def take(self) -> tuple[float, float]:
        """Seconds spent on the pass, and on everything."""
        spent = self.about_pass / 1e9, (self.about_pass + self.about_requests) / 1e9
        self.about_pass = self.about_requests = 0
        return spent


def _timed(name: str, counter: str) -> Callable[..., None]:
    recorded = getattr(RunTracer, name)

    def hook(self: TimedTracer, *arguments: Any) -> None:
        start = time.perf_counter_ns()
        recorded(self, *arguments)
        setattr(self, counter, getattr(self, counter) + time.perf_counter_ns() - start)

    return hook


for _hook in ("on_decide", "on_pass", "on_step"):
    setattr(TimedTracer, _hook, _timed(_hook, "about_pass"))
for _hook in ("on_event", "on_prompt", "on_outputs", "on_end", "on_committed"):
    setattr(TimedTracer, _hook, _timed(_hook, "about_requests"))


class OurServer:
    """A scheduler whose every step admits `TURNOVER` requests, which finish with their first token."""

    def __init__(self, tracer: RunTracer | None) -> None:
        config = SchedulerConfig(
            schedule_policy="lpm",
            max_total_tokens=sglang_order.POOL_TOKENS,
            prefill_max_requests=TURNOVER,
            chunked_prefill_size=None,
            max_prefill_tokens=10**6,
        )
        self.scheduler = Scheduler(config, tracer)
        if tracer is not None:
            tracer.attach(self.scheduler)
        self.now = 0.0

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Requests join the tail."""
        for rid, ids, _, _ in arrivals:
            sampling = SamplingParams(max_new_tokens=1)
            self.scheduler.arrive(Request(rid=rid, prompt=tokens.encode(ids), sampling=sampling), self.now)

    def step(self) -> float:
        """A step of the loop; seconds."""
        self.now += 0.01
        start = time.perf_counter()
        step = self.scheduler.step(self.now)
        assert step.batch is not None
        members = step.batch.members
        finishes = {member.live.rid: Finish("length", 1) for member in members}
        self.scheduler.commit(step.batch, [7] * len(members), finishes, self.now)
        return time.perf_counter() - start


def measure(workload: Workload, level: Level, passes: int, folder: Path) -> Json:
    """Capture per pass as a share of SGLang's pass over as many waiting requests, and our step with and without."""
    # In a process of its own, as `schedscope record` is.
    with CompanionProcess(folder, level) as companion:
        sink = open_sink(0, Description(source=Source("benchmark", "1")), environ=companion.environment)
        assert isinstance(sink, CompanionSink)
        tracer = TimedTracer(sink)
        recorded, bare = OurServer(tracer), OurServer(None)
        sglang = sglang_order.SGLangQueue("lpm")
        finished = 0
        for _ in range(workload.cached):
            sglang.finish(workload.finished(finished), evict=False)
            finished += 1
        arrived = 0
        shares, shares_of_all, with_recorder, without, theirs, micros = [], [], [], [], [], []
        for number in range(WARM_UP + passes):
            fresh = workload.waiting if not number else TURNOVER
            arrivals = workload.arrivals(range(arrived, arrived + fresh))
            arrived += fresh
            for side in (recorded, bare, sglang):
                side.arrive(arrivals)
            tracer.arrived()
            sides = [recorded, bare] if number % 2 else [bare, recorded]
            times = {side: side.step() for side in sides}
            pass_s, all_s = tracer.take()
            sglang_s = sglang.sort()
            sglang.leave(TURNOVER)
            sglang.finish(workload.finished(finished), evict=True)
            finished += 1
            if number < WARM_UP:
                continue
            micros.append(pass_s)
            shares.append(pass_s / sglang_s)
            shares_of_all.append(all_s / sglang_s)
            theirs.append(sglang_s)
            with_recorder.append(times[recorded])
            without.append(times[bare])
        alone = []
        for _ in range(passes // 2):
            recorded.arrive(workload.arrivals(range(arrived, arrived + TURNOVER)))
            arrived += TURNOVER
            tracer.arrived()
            recorded.step()
            alone.append(tracer.take()[0])
            let_catch_up(sink)
        sink.close()
        dropped = sink.dropped
    run = Run.open(companion.run_dir)
    assert not dropped, f"{dropped} frames found no room"
    assert run.passes(0).count == WARM_UP + passes + passes // 2, "a pass is missing"
    assert not run.gaps
    return {
        "waiting": workload.waiting,
        "level": level,
        "alone_us": _us(statistics.median(alone)),
        "share_alone": _round(statistics.median(alone) / statistics.median(theirs)),
        "capture_us": _us(statistics.median(micros)),
        "sglang_us": _us(statistics.median(theirs)),
        "share": _round(statistics.median(shares)),
        "share_mean": _round(sum(micros) / sum(theirs)),
        "share_with_requests": _round(statistics.median(shares_of_all)),
        "pass_ratio": _round(1 + sum(micros) / sum(theirs)),
        "p999_ratio": _round(_p999([a + b for a, b in zip(theirs, micros, strict=True)]) / _p999(theirs)),
        "own_step_ratio": _round(statistics.mean(with_recorder) / statistics.mean(without)),
        "own_step_p999_ratio": _round(_p999(with_recorder) / _p999(without)),
    }


def let_catch_up(sink: CompanionSink) -> None:
    """Pass after pass without a model in between fills the buffer faster than anybody empties it."""
    ring = sink._ring
    while ring.written - ring.read > ring.capacity // 2:
        time.sleep(0.01)


class CompanionProcess:
    """A companion in a process of its own."""

    def __init__(self, folder: Path, level: Level) -> None:
        self.run_dir = create_run(folder, level)
        self._to_child, self._to_parent = os.pipe(), os.pipe()
        self._options = OPTIONS._replace(detail=Detail(level=level))
        self.environment: dict[str, str] = {}

    def __enter__(self) -> CompanionProcess:
        self._pid = os.fork()
        if not self._pid:
            os.close(self._to_child[1])
            with Companion.start(self.run_dir, self._options) as companion:
                os.write(self._to_parent[1], json.dumps(companion.environment()).encode())
                os.read(self._to_child[0], 1)
            os._exit(0)
        self.environment = json.loads(os.read(self._to_parent[0], 4096))
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._to_child[1], b"x")
        os.waitpid(self._pid, 0)


def _p999(times: Sequence[float]) -> float:
    return sorted(times)[int(len(times) * 0.999)]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _round(ratio: float) -> float:
    return round(ratio, 4)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--passes", type=int, default=3_000)
    parser.add_argument("--waiting", default="40,128")
    parser.add_argument("--levels", default=",".join(reversed(LEVELS)))
    args = parser.parse_args()
    sglang_order.prepare()
    print(f"{'waiting':>7} {'level':10} {'SGLang':>9} {'alone':>8} {'share':>7} {'mixed':>8} {'share':>7} ", end="")
    print(f"{'+ requests':>10} ", end="")
    print(f"{'pass':>7} {'p99.9':>7} {'own step':>9} {'p99.9':>7}")
    rows = []
    for waiting in map(int, args.waiting.split(",")):
        for level in args.levels.split(","):
            with tempfile.TemporaryDirectory() as folder:
                row = measure(replace(WORKLOADS[0], waiting=waiting), level, args.passes, Path(folder))
            rows.append(row)
            print(
                f"{waiting:>7} {level:10} {row['sglang_us']:>6} us {row['alone_us']:>5} us {row['share_alone']:>7.2%} "
                f"{row['capture_us']:>5} us {row['share']:>7.2%} "
                f"{row['share_with_requests']:>10.2%} {row['pass_ratio']:>7.4f} {row['p999_ratio']:>7.3f} "
                f"{row['own_step_ratio']:>9.3f} {row['own_step_p999_ratio']:>7.3f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
