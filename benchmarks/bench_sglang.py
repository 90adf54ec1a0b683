"""What recording costs a real SGLang server, measured inside of it: on the scheduler's thread, all hooks included.

    PYTHONPATH=tests python benchmarks/bench_sglang.py

Starts SGLang on a CPU with a tiny model (see tests/sglang_server.py), keeps 128 requests of 2,000 tokens waiting that
share ten prefixes of 1,500, and reads the times that the recording notes of itself. With a model so small a decode step
takes three milliseconds; on a GPU with a real one it takes tens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import httpx
from schedscope.recorder.run import Run
from schedscope.recorder.runs import find_runs
from sglang_server import serving, settle

WAITING, RUNNING = 128, 8

_STEPS = """
SELECT count(*), median(record_ns) / 1e3, quantile_cont(record_ns, 0.99) / 1e3, median((end_ns - start_ns)) / 1e3,
    100.0 * sum(record_ns) / sum(end_ns - start_ns), median(queue_len)
FROM steps WHERE kind <> 'idle' AND queue_len BETWEEN 100 AND 129 AND (pass IS NOT NULL) = ?
"""
_IDLE = "SELECT sum(count), sum(record_ns) / sum(count) FROM steps WHERE kind = 'idle'"
_PASSES = "SELECT median(decide_ns) / 1e3 FROM passes WHERE queue_len BETWEEN 100 AND 129"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["lpm", "fcfs", "dfs-weight"])
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    print(f"{'policy':<12} {'':<14} {'steps':>6} {'us':>7} {'p99 us':>8} {'step us':>8} {'share':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for policy in options.policies:
            show(policy, measure(Path(folder) / policy, policy, options.requests))


def measure(folder: Path, policy: str, count: int) -> Run:
    """Record a server that always has as many requests waiting."""
    arguments = (
        f"--schedule-policy {policy} --max-total-tokens 40000 --max-running-requests {RUNNING} "
        "--chunked-prefill-size 2048"
    )
    with serving(folder, *arguments.split()) as server:
        settle(server.url)
        asyncio.run(_load(server.url, count))
        settle(server.url)
        server.stop()
    (info,) = find_runs(folder)
    return Run.open(info.path)


def show(policy: str, run: Run) -> None:
    """A line for steps with a pass and one for those without."""
    connection = run.connect(["steps", "passes"])
    for made, what in ((True, "with a pass"), (False, "without"), (None, "idle")):
        if made is None:
            turns, idle_ns = connection.execute(_IDLE).fetchall()[0]
            print(f"{policy:<12} {what:<14} {turns:>6} {idle_ns / 1e3:>7.2f}")
            continue
        steps, us, p99, step_us, share, _ = connection.execute(_STEPS, [made]).fetchall()[0]
        print(f"{policy:<12} {what:<14} {steps:>6} {us:>7.1f} {p99:>8.1f} {step_us:>8.0f} {share:>6.2f}%")
    ((decide_us,),) = connection.execute(_PASSES).fetchall()
    print(f"{policy:<12} SGLang takes {decide_us:,.0f} us to decide such a pass, with the hooks in it")


async def _load(url: str, count: int) -> None:
    words = random.Random(3)
    systems = [[words.randint(3, 999) for _ in range(1_500)] for _ in range(10)]

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore) -> None:
        sampling: dict[str, Any] = {"max_new_tokens": words.randint(8, 24), "ignore_eos": True}
        prompt = words.choice(systems) + [words.randint(3, 999) for _ in range(500)]
        async with gate:
            answer = await client.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling})
            answer.raise_for_status()

    gate = asyncio.Semaphore(WAITING + RUNNING)
    limits = httpx.Limits(max_connections=WAITING + RUNNING)
    async with httpx.AsyncClient(limits=limits, timeout=600.0) as client:
        await asyncio.gather(*(one(client, gate) for _ in range(count)))


if __name__ == "__main__":
    main()
