"""How long the doctor takes on a long run.

    python benchmarks/bench_doctor.py [--passes N] [--run RUN] [--json FILE]

See README.md in this folder for what is measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import traffic
from schedscope.engine.scheduler import Scheduler
from schedscope.recorder.compact import tidy
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Detail
from schedscope.recorder.manifest import create_run
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer
from schedscope.replay.case import Case
from schedscope.replay.doctor import BUILT_IN, examine

POLICY = "lpm"
CHECKPOINT_EVERY = 1_000


def record(folder: Path, passes: int) -> Path:
    """A busy server that records everything, with checkpoints."""
    path = create_run(folder, "doctor")
    sink = DirectSink(path, 0, traffic.describe(POLICY), detail=Detail(level="full"))
    tracer = RunTracer(sink, checkpoint_every=CHECKPOINT_EVERY)
    scheduler = Scheduler(traffic.config(POLICY), tracer)
    tracer.attach(scheduler)
    for _ in traffic.drive(scheduler, passes):
        pass
    tracer.close()
    tidy(path / "rank=0", grace_s=0.0, final=True)
    return path


def main() -> None:
    """Measure and print."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="schedscope-bench-", dir=options.folder))
    try:
        run = Run.open(options.run or record(folder, options.passes))
        figures: dict[str, Any] = {"passes": run.passes(0).count}
        print(f"{figures['passes']:,} passes; seconds{'':17}{'wall':>9}{'CPU':>9}{'findings':>10}")
        case, figures["open"] = _timed(partial(Case.of_run, run))
        _show("open", figures["open"], "")
        for each in BUILT_IN:
            found, figures[each.name] = _timed(partial(examine, run, [each], case=case))
            _show(each.name, figures[each.name], str(len(found.findings)))
        total = {kind: sum(figures[name][kind] for name in figures if name != "passes") for kind in ("wall_s", "cpu_s")}
        _show("all", total, "")
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps({**figures, "all": total}, indent=2) + "\n")


def _show(name: str, figures: dict[str, float], findings: str) -> None:
    print(f"{name:35}{figures['wall_s']:9.2f}{figures['cpu_s']:9.2f}{findings:>10}")


def _timed(ask: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    found = ask()
    return found, {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - begin_cpu}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=20_000, help="to record first")
    parser.add_argument("--run", type=Path, help="a run that is there, instead of recording one")
    parser.add_argument("--folder", help="where to make the run, which is removed again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
