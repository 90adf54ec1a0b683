"""How long it takes to sort the waiting queue, against SGLang's own scheduler in the same process.

    python benchmarks/bench_order.py [--json FILE] [--repeat N] [--workloads W1,W2] [--policies lpm,hrrn]

See README.md in this folder for what the workloads, situations and columns mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import decide
from schedscope.engine.live import Live
from schedscope.engine.ordering import POLICIES, order, resolve_policy
from schedscope.engine.radix import RadixCache
from schedscope.engine.request import Request
from schedscope.engine.state import SchedulerState
from schedscope.engine.view import Waiting
from workloads import PROCESSED_TOKENS, WORKLOADS, Arrival, Workload

try:
    import sglang_order
except ImportError as error:
    sglang_order = None  # type: ignore[assignment]
    WITHOUT_SGLANG = str(error)

CACHE_AWARE = [name for name, policy in POLICIES.items() if policy.cache_aware and not policy.extension]
TURNOVER = 8
"""Requests that leave and arrive between two passes."""

Json = dict[str, Any]


class OurQueue:
    """A waiting queue and its cache, for `order` alone."""

    def __init__(self, policy: str) -> None:
        self.config = SchedulerConfig(schedule_policy=policy)
        self.policy = resolve_policy(self.config)
        self.cache = RadixCache()
        self.queue: list[Waiting] = []

    @property
    def rids(self) -> list[str]:
        """The queue as it is."""
        return [request.rid for request in self.queue]

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self.cache.evictable

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Requests join the tail."""
        self.queue += [
            Waiting(
                rid=rid,
                tokens=tokens.encode(ids),
                prompt_len=len(ids),
                output_len=0,
                max_new_tokens=128,
                ignore_eos=False,
                priority=0,
                routing_key=None,
                space=b"",
                entry_time=entry_time,
                arrival_processed_tokens=processed,
                retracted=False,
            )
            for rid, ids, entry_time, processed in arrivals
        ]

    def leave(self, count: int) -> None:
        """The head of the queue is admitted."""
        del self.queue[:count]

    def finish(self, ids: array[int], evict: bool) -> None:
        """A sequence enters the cache, at the expense of as many tokens of others if `evict`."""
        existing = self.cache.insert(tokens.encode(ids), b"", array("i", range(len(ids)))).existing
        if evict:
            self.cache.evict(len(ids) - existing)

    def sort(self) -> tuple[float, float, float]:
        """One `order`; the same with what it touches made recent; and with every place and key made, too; seconds."""
        start = time.perf_counter()
        ordering = order(self.queue, self.cache, self.config, processed_tokens=PROCESSED_TOKENS, policy=self.policy)
        ordered = time.perf_counter()
        self.cache.touch_many(ordering.touches)
        touched = time.perf_counter()
        tuple(ordering.ranked)
        end = time.perf_counter()
        self.queue = list(ordering.ranked.requests)
        return ordered - start, touched - start, end - start


# ---- against SGLang ------------------------------------------------------------------------------------------


class Race:
    """Both queues through the same life, one pass of each in turn."""

    def __init__(self, workload: Workload, policy: str) -> None:
        self.workload = workload
        self.ours = OurQueue(policy)
        self.theirs = sglang_order.SGLangQueue(policy) if sglang_order else None
        self.sides = [self.ours] + ([self.theirs] if self.theirs else [])
        self.passes = 0
        self.arrived = 0
        self.finished = 0
        for _ in range(workload.cached):
            self.finish(evict=False)
        self.arrive(workload.waiting)

    def arrive(self, count: int) -> None:
        """New requests for both."""
        arrivals = self.workload.arrivals(range(self.arrived, self.arrived + count))
        self.arrived += count
        for side in self.sides:
            side.arrive(arrivals)

    def finish(self, evict: bool) -> None:
        """A finished sequence for both caches."""
        ids = self.workload.finished(self.finished)
        self.finished += 1
        for side in self.sides:
            side.finish(ids, evict)

    def turn_over(self) -> None:
        """What happens between two passes of a busy server."""
        for side in self.sides:
            side.leave(TURNOVER)
        self.arrive(TURNOVER)
        self.finish(evict=True)

    def start_anew(self) -> None:
        """All requests leave, and as many arrive that nobody has seen."""
        for side in self.sides:
            side.leave(self.workload.waiting)
        self.arrive(self.workload.waiting)

    def sort(self) -> tuple[float, float, float, float | None]:
        """Seconds of `order`, with its touches, with all places; and of SGLang. The orders must agree."""
        theirs = None
        first = self.passes % 2
        if self.theirs and first:
            theirs = self.theirs.sort()
        ours, touched, explained = self.ours.sort()
        if self.theirs:
            if not first:
                theirs = self.theirs.sort()
            assert self.ours.rids == self.theirs.rids, f"{self.workload.name}: the orders differ"
            assert self.ours.cached == self.theirs.cached, f"{self.workload.name}: the caches differ"
        self.passes += 1
        return ours, touched, explained, theirs


def between(race: Race, situation: str) -> None:
    """What changes before the next pass."""
    if situation == "turnover":
        race.turn_over()
    elif situation == "first":
        race.start_anew()


SITUATIONS = ("same", "turnover", "first")


def measure(workload: Workload, policy: str, situation: str, repeat: int) -> Json:
    """Medians of one workload, policy and situation."""
    race = Race(workload, policy)
    race.sort()
    race.sort()
    ours, touched, explained, theirs = [], [], [], []
    gc.disable()
    try:
        for _ in range(repeat):
            between(race, situation)
            order_s, touched_s, explained_s, sglang_s = race.sort()
            ours.append(order_s)
            touched.append(touched_s)
            explained.append(explained_s)
            if sglang_s is not None:
                theirs.append(sglang_s)
    finally:
        gc.enable()
    row: Json = {
        "workload": workload.name,
        "situation": situation,
        "policy": policy,
        "order_us": _us(ours),
        "order_touch_us": _us(touched),
        "explained_us": _us(explained),
    }
    if theirs:
        row["sglang_us"] = _us(theirs)
        row["order_ratio"] = _ratio(ours, theirs)
        row["order_touch_ratio"] = _ratio(touched, theirs)
        row["explained_ratio"] = _ratio(explained, theirs)
    return row


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the passes: what disturbs one side then disturbs the other side of the same ratio, too."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


def _us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


# ---- the whole step ------------------------------------------------------------------------------------------


def measure_step(workload: Workload, repeat: int) -> Json:
    """Medians of freezing a view and of a whole decision, which admits what the budgets allow."""
    config = SchedulerConfig(schedule_policy="lpm", chunked_prefill_size=8192)
    state = SchedulerState(config)
    for number in range(workload.cached):
        packed = tokens.encode(workload.finished(number))
        slots = array("i")
        state.pool.extend(slots, tokens.length(packed))
        inserted = state.cache.insert(packed, b"", slots)
        state.pool.free(slots[: inserted.existing])
    for rid, ids, entry_time, _ in workload.arrivals(range(workload.waiting)):
        state.admit_to_queue(Live(Request(rid=rid, prompt=tokens.encode(ids)), 0), entry_time)
    for _ in range(2):
        ordering = order(state.view().queue, state.cache, config, policy=state.policy)
        state.cache.touch_many(ordering.touches)
        for live, place in zip(state.queue, sorted(ordering.ranked, key=lambda place: place.position), strict=True):
            live.prefix_len, live.matched = place.request.prefix_len, place.request.matched
    view = state.view()
    admitted = decide(view, config, policy=state.policy).admission

    def sort() -> None:
        order(view.queue, view.cache, config, policy=state.policy)

    return {
        "workload": workload.name,
        "waiting": len(view.queue),
        "admitted": 0 if admitted is None else len(admitted.admitted),
        "view_us": _time(state.view, repeat),
        "order_us": _time(sort, repeat),
        "decide_us": _time(lambda: decide(view, config, policy=state.policy), repeat),
    }


def _time(call: Callable[[], object], repeat: int) -> float:
    times = []
    gc.disable()
    try:
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return _us(times)


# ---- program -------------------------------------------------------------------------------------------------


RACE_HEAD = (
    f"{'':4} {'situation':9} {'policy':23} {'SGLang':>9} {'order':>9} {'+ touch':>9} {'+ keys':>9}   ours/SGLang"
)


def race_line(row: Json) -> str:
    """A row of the comparison, as text."""
    sglang = row.get("sglang_us", "-")
    line = f"{row['workload']:4} {row['situation']:9} {row['policy']:23} "
    line += f"{sglang:>9} {row['order_us']:>9} {row['order_touch_us']:>9} {row['explained_us']:>9}"
    if "sglang_us" in row:
        ratio = row["order_touch_ratio"]
        line += f"   {row['order_ratio']:.3f}, with touch {ratio:.3f}: {1 / ratio:.1f} x faster"
        line += f", with keys {row['explained_ratio']:.3f}"
    return line


def print_steps(rows: Sequence[Json]) -> None:
    """The whole step as a table."""
    print(f"\n{'':4} {'waiting':>7} {'admitted':>8} {'view':>9} {'order':>9} {'decide':>9}   lpm, chunks of 8192")
    for row in rows:
        print(
            f"{row['workload']:4} {row['waiting']:>7} {row['admitted']:>8} "
            f"{row['view_us']:>9} {row['order_us']:>9} {row['decide_us']:>9}"
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--repeat", type=int, default=51, help="passes per median")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    parser.add_argument("--policies", nargs="+", default=list(CACHE_AWARE), choices=CACHE_AWARE)
    parser.add_argument("--situations", nargs="+", default=list(SITUATIONS), choices=SITUATIONS)
    args = parser.parse_args()
    if sglang_order is None:
        print(f"without SGLang, ours only: {WITHOUT_SGLANG}", file=sys.stderr)
    else:
        sglang_order.prepare()
    chosen = [workload for workload in WORKLOADS if workload.name in args.workloads]
    print("microseconds, median of", args.repeat)
    print(RACE_HEAD)
    races = []
    for workload in chosen:
        for situation in args.situations:
            for policy in args.policies:
                races.append(measure(workload, policy, situation, args.repeat))
                print(race_line(races[-1]), flush=True)
    steps = [measure_step(workload, args.repeat) for workload in chosen]
    print_steps(steps)
    if args.json:
        result = {"python": platform.python_version(), "repeat": args.repeat, "order": races, "step": steps}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
