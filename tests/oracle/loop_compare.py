"""Run random workloads through SGLang's scheduler loop and through ours, and compare them step by step.

Usage, with our Python; PYTHONPATH is handed on to the oracle's::

    PYTHONPATH=stubs python loop_compare.py --oracle PYTHON --seed 1 --count 300 [--overlap] [--aborts] [--shrink]
    PYTHONPATH=stubs python loop_compare.py --oracle PYTHON --workloads FILE

PYTHON is that of an environment with ``sglang==0.5.23``; ``loop_sglang.py`` runs there and says what a workload and a
trace are.  The same seed always gives the same workloads.  Of each workload the first step that differs is printed,
field by field; with ``--shrink`` the workload is then reduced as long as it still differs, and printed as well.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import ConfigError
from schedscope.engine.live import Live
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import POOL_EXHAUSTED, Ended, Finish, Scheduler, Step
from schedscope.engine.tracer import Event, Tracer

Json = dict[str, Any]

EOS = 2
FIRST_WORD, LAST_WORD = 3, 40
STEP_S = 1.0
DECIDE_S = 1e-3
TICK_S = 1e-6
START_TIME = 1e6
TOLERANCE = 1e-9
EVICTION_POLICIES = ("lru", "lfu", "slru", "priority", "fifo", "filo", "mru")
POLICIES = ("fcfs", "lof", "random", "routing-key", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
WITH_PRIORITY = ("fcfs", "lof")


# -- workloads ------------------------------------------------------------------------------------------------


class Generator:
    """Makes one workload of a seed."""

    def __init__(self, seed: int, *, aborts: bool, overlap: bool | None = None) -> None:
        self.seed = seed
        self.overlap = overlap
        self.rng = random.Random(f"loop {seed}")
        self.aborts = aborts
        self.prompts: list[list[int]] = []
        self.pressed = self.rng.random() < 0.5
        """Admits more than it has memory for, so that decode retracts."""
        self.tide = 0
        """How much more each request is wanted than the one before: what makes it push others out."""

    def workload(self) -> Json:
        """The workload."""
        rng = self.rng
        config = self.config()
        if random.Random(f"overlap {self.seed}").random() < 0.5 if self.overlap is None else self.overlap:
            config["disable_overlap_schedule"] = False
        self.pool = config["max_total_tokens"] // config["page_size"] * config["page_size"]
        self.longest = max(min(self.pool // rng.choice([5, 8, 12] if self.pressed else [2, 3, 5, 8]), 200), 4)
        self.shared = [self.words(rng.randint(2, self.longest)) for _ in range(rng.randint(1, 4))]
        count = rng.randint(2, 40) if rng.random() < 0.95 else rng.randint(100, 250)
        pace = rng.choice([0.5, 2, 8])
        burst = 1 if self.tide and rng.random() < 0.7 else rng.choice([1, 3, 12] if count < 100 else [30, 200])
        events: list[Json] = []
        step, number = 0, 0
        while number < count:
            for _ in range(min(rng.randint(1, burst), count - number)):
                events.append({"step": step, "arrive": self.request(f"r{number:03d}", config)})
                number += 1
            step += int(rng.expovariate(1 / pace)) if rng.random() < 0.9 else rng.randint(20, 120)
        if self.aborts:
            often = rng.choice([0.1, 0.3, 0.9])
            for event in list(events):
                if rng.random() < often:
                    later = event["step"] + int(rng.expovariate(1 / rng.choice([1, 4, 15, 40])))
                    events.append({"step": later, "abort": event["arrive"]["rid"]})
        if rng.random() < 0.2:
            events += [{"step": rng.randint(0, 200), "flush": True} for _ in range(rng.randint(1, 8))]
        events.sort(key=lambda event: event["step"])
        steps = events[-1]["step"] + rng.choice([60, 200, 400])
        return {"id": f"w{self.seed}", "config": config, "steps": steps, "events": events}

    def config(self) -> Json:
        """A random configuration that both sides accept."""
        rng = self.rng
        page = rng.choice([1, 1, 1, 2, 4, 4, 16, 16])
        config: Json = {
            "page_size": page,
            "max_total_tokens": page * rng.randint(6, 60) if page > 1 else rng.choice([40, 90, 200, 500]),
            "max_running_requests": rng.choice([2, 3, 5, 8, 32]),
            "max_prefill_tokens": rng.choice([30, 120, 16384]),
            "radix_eviction_policy": rng.choice(EVICTION_POLICIES),
            "random_seed": rng.randrange(100),
            "init_new_token_ratio": rng.choice([0.01, 0.05, 0.2, 0.7]),
            "new_token_ratio_decay_steps": rng.choice([5, 50, 600]),
            "retract_decode_steps": rng.choice([0, 1, 5, 20]),
        }
        if rng.random() < 0.4:
            config["enable_priority_scheduling"] = True
            config["schedule_low_priority_values_first"] = rng.random() < 0.3
            config["schedule_policy"] = rng.choice(WITH_PRIORITY)
            config["priority_scheduling_preemption_threshold"] = rng.choice([0, 3, 10])
            config["disable_priority_preemption"] = rng.random() < 0.3
            config["retraction_policy"] = rng.choice(["length", "priority"])
            if rng.random() < 0.6:
                self.tide = rng.choice([0, 1, 4, 12])
                config["max_running_requests"] = rng.choice([1, 2, 2, 3, 5])
                config["disable_priority_preemption"] = False
        else:
            config["schedule_policy"] = rng.choice(POLICIES)
        if rng.random() < 0.6:
            config["chunked_prefill_size"] = page * rng.randint(1, 4) * (1 if page > 1 else rng.choice([4, 16]))
            config["enable_mixed_chunk"] = rng.random() < 0.5
            if rng.random() < 0.15:
                config["truncation_align_size"] = rng.choice([page, config["chunked_prefill_size"]])
        options: tuple[tuple[float, str, Callable[[], Any]], ...] = (
            (0.15, "disable_radix_cache", lambda: True),
            (0.3, "max_queued_requests", lambda: rng.randint(1, 6)),
            (0.1, "req_waiting_timeout", lambda: rng.choice([3.25, 12.25])),
            (0.05, "radix_force_miss", lambda: True),
            (0.05, "abort_on_priority_when_disabled", lambda: True),
            (0.15, "prefill_max_requests", lambda: rng.randint(1, 4)),
            (0.1, "min_free_slots_delay", lambda: rng.randint(1, 4)),
            (0.15, "enable_prefill_delayer", lambda: True),
            (0.2, "schedule_conservativeness", lambda: rng.choice([0.1, 0.3, 1.7])),
            (0.2, "min_new_token_ratio_factor", lambda: rng.choice([0.0, 0.5, 1.0])),
            (0.1, "clip_max_new_tokens", lambda: rng.choice([0, 4, 16])),
            (0.1, "in_batch_prefix_caching_check_threshold", lambda: rng.choice([-1, 4, 64])),
            (0.1, "in_batch_prefix_caching_deprioritize_threshold", lambda: rng.choice([1, 8])),
        )
        for chance, name, value in options:
            if rng.random() < chance:
                config[name] = value()
        if self.pressed:
            config["init_new_token_ratio"] = rng.choice([0.01, 0.05])
            config["clip_max_new_tokens"] = rng.choice([0, 2, 8, 4096])
            config["max_running_requests"] = rng.choice([3, 8, 32])
            config.pop("min_free_slots_delay", None)
        if config.get("disable_radix_cache") and config["schedule_policy"] == "shortest-prefill-first":
            config["schedule_policy"] = "lof"  # SGLang refuses that pair
        if config.get("enable_prefill_delayer"):
            config["prefill_delayer_max_delay_passes"] = rng.choice([1, 3, 30])
            config["prefill_delayer_token_usage_low_watermark"] = rng.choice([None, 0.3])
        return config

    def words(self, count: int) -> list[int]:
        """So many tokens."""
        return [self.rng.randint(FIRST_WORD, LAST_WORD) for _ in range(count)]

    def request(self, rid: str, config: Json) -> Json:
        """A request, with what the model will say to it."""
        rng = self.rng
        if self.prompts and rng.random() < 0.25:
            prompt = rng.choice(self.prompts) + self.words(rng.randint(0, 6))
        else:
            shared = rng.choice(self.shared)
            prompt = shared[: rng.randint(0, len(shared))] + self.words(rng.randint(1, max(self.longest // 3, 1)))
        prompt = prompt[: self.pool - 2 * config["page_size"] - 2] or self.words(1)
        room = self.pool - len(prompt) - config["page_size"]
        if rng.random() < 0.05:
            room += rng.randint(1, 40)  # SGLang shortens these on arrival, unless the loop is asked alone
        limits = [20, 40, 60, 90] if self.pressed else [0, 1, 3, 10, 30, 60, 60]
        limit = min(rng.choice(limits), max(room, 0))
        output = self.words(max(limit, 1))
        if len(output) > 1 and rng.random() < (0.2 if self.pressed else 0.5):
            output[rng.randrange(len(output))] = EOS
        self.prompts.append(prompt + output[: rng.randint(0, len(output))])
        given: Json = {"rid": rid, "prompt": prompt, "output": output, "max_new_tokens": limit}
        if rng.random() < 0.2:
            given["ignore_eos"] = True
        if self.tide:
            wanted = self.tide * int(rid[1:]) + rng.randint(-4, 4)
            given["priority"] = -wanted if config["schedule_low_priority_values_first"] else wanted
        elif rng.random() < 0.5:
            given["priority"] = rng.choice([0, 0, 5, 9, 20, -3] if self.pressed else range(-60, 60))
        if rng.random() < 0.5:
            given["routing_key"] = rng.choice(["a", "b", ""])
        if rng.random() < 0.1:
            given["extra_key"] = "lora"
        if rng.random() < 0.1:
            given["cache_salt"] = rng.choice(["", "s"])
        return given


def known() -> Iterator[Json]:
    """Workloads of differences that there once were, which chance seldom meets."""

    def arrive(step: int, rid: str, prompt: list[int], limit: int, priority: int | None = None) -> Json:
        output = [9] * max(limit, 1)
        given = {"rid": rid, "prompt": prompt, "output": output, "max_new_tokens": limit, "priority": priority}
        return {"step": step, "arrive": given}

    priority = {"enable_priority_scheduling": True}
    yield {
        "id": "a preempted request is one too many for the queue",
        "config": {**priority, "max_running_requests": 2, "max_total_tokens": 40, "max_queued_requests": 1},
        "steps": 8,
        "events": [
            arrive(0, "r0", [3] * 10, 9, 0),
            arrive(1, "r1", [4] * 10, 9, 0),
            arrive(3, "r2", [5] * 30, 5, 20),
        ],
    }
    yield {
        "id": "taken back while it decodes, then preempted, then in chunks",
        "config": {**priority, "max_running_requests": 1, "chunked_prefill_size": 4, "disable_radix_cache": True},
        "steps": 12,
        "events": [
            arrive(0, "r0", list(range(3, 13)), 9, 0),
            {"step": 4, "abort": "r0"},
            arrive(4, "r1", [30], 1, 20),
        ],
    }
    yield {
        "id": "there is no room to decode until the last token of another, in flight, gives its memory back",
        "config": {"max_total_tokens": 22, "clip_max_new_tokens": 0, "disable_overlap_schedule": False},
        "steps": 30,
        "events": [arrive(0, "r0", [3] * 8, 4), arrive(0, "r1", [4] * 8, 9)],
    }
    yield {
        "id": "prefilled, then decoded with a chunk of another before its first token is there",
        "config": {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "disable_overlap_schedule": False},
        "steps": 30,
        "events": [arrive(0, "r0", [3], 9), arrive(0, "r1", list(range(3, 40)), 9), arrive(1, "r2", [5], 0)],
    }


# -- our side -------------------------------------------------------------------------------------------------


class Watch(Tracer):
    """Notes who was preempted, who was retracted, and who finished how."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the step before."""
        self.preempted: list[str] = []
        self.retracted: list[str] = []
        self.finished: list[Json] = []

    def on_event(self, event: Event) -> None:
        if event.kind == "preempt" and event.rid is not None:
            self.preempted.append(event.rid)
        elif event.kind == "retract" and event.rid is not None:
            self.retracted.append(event.rid)
        elif event.kind == "finish" and event.detail is not None:
            self.finished.append({"rid": event.rid, "kind": event.detail["kind"], "tokens": event.tokens})


class Ours:
    """Our scheduler, turned once per step: it steps while it is busy, and is told when it is idle."""

    def __init__(self, workload: Json) -> None:
        self.watch = Watch()
        self.scheduler = Scheduler(SchedulerConfig(**workload["config"]), self.watch)
        self.outputs: dict[str, list[int]] = {}

    def step(self, number: int, events: list[Json]) -> Json:
        """One turn, in the form of `loop_sglang`."""
        scheduler, watch = self.scheduler, self.watch
        watch.clear()
        now = START_TIME + number * STEP_S
        ended: list[Ended] = []
        flushed: list[bool] = []
        for event in events:
            now += TICK_S
            if "arrive" in event:
                self.outputs[event["arrive"]["rid"]] = event["arrive"]["output"]
                ended += scheduler.arrive(request(event["arrive"]), now)
            elif "abort" in event:
                ended += scheduler.abort(event["abort"], now)
            else:
                flushed.append(scheduler.flush(now))
        now = START_TIME + number * STEP_S + DECIDE_S
        step: Step | None = None
        if scheduler.busy:
            step = scheduler.step(now)
            ended += step.ended
            if any(one.finish.detail == POOL_EXHAUSTED for one in step.ended):
                return {"error": POOL_EXHAUSTED}
        batch = step.batch if step is not None else None
        due = step.due if step is not None else None
        seen = self.observe()
        seen |= {
            "kind": batch.kind if batch is not None else "none",
            "members": [[m.live.rid, m.start, m.end] for m in batch.members] if batch is not None else [],
            "ended": [one.live.rid for one in ended],
            "flushed": flushed,
            "finished": [],
        }
        if due is not None:
            sampled = [None if member.unfinished else self._token(member.live) for member in due.members]
            finishes = {}
            for member, token in zip(due.members, sampled, strict=True):
                finish = _finish(member.live, token)
                if finish is not None:
                    finishes[member.live.rid] = finish
            scheduler.commit(due, sampled, finishes, now)
            seen["finished"] = watch.finished
        elif batch is None and not scheduler.busy:
            scheduler.idle(now)
        state = scheduler.state
        return seen | {
            "processed_tokens": state.processed_tokens,
            "ratio_after": state.new_token_ratio,
            "pool_after": self._pool(),
        }

    def _token(self, live: Live) -> int:
        output = self.outputs[live.rid]
        return output[min(live.output_len, len(output) - 1)]

    def _pool(self) -> Json:
        state = self.scheduler.state
        return {
            "available": state.pool.available,
            "evictable": state.cache.evictable,
            "protected": state.cache.protected,
        }

    def observe(self) -> Json:
        """The state as the step left it, before the forward."""
        state = self.scheduler.state
        return {
            "queue": [live.rid for live in state.queue],
            "running": [live.rid for live in state.running],
            "chunked": state.chunked.rid if state.chunked is not None else None,
            "batch_is_full": state.batch_is_full,
            "ratio": state.new_token_ratio,
            "pool": self._pool(),
            "free_rows": self.scheduler.config.max_running_requests - state.rows,
            "retracted": self.watch.retracted,
            "preempted": self.watch.preempted,
        }


def request(given: Json) -> Request:
    """A workload's request."""
    return Request(
        rid=given["rid"],
        prompt=tokens.encode(given["prompt"]),
        sampling=SamplingParams(max_new_tokens=given["max_new_tokens"], ignore_eos=given.get("ignore_eos", False)),
        **{key: given.get(key) for key in ("priority", "extra_key", "routing_key", "cache_salt")},
    )


def _finish(live: Live, token: int | None) -> Finish | None:
    sampling = live.request.sampling
    if token is None:
        return None
    if token == EOS and not sampling.ignore_eos:
        return Finish("stop", token)
    if live.output_len + 1 >= sampling.max_new_tokens:
        return Finish("length", sampling.max_new_tokens)
    return None


# -- comparison -----------------------------------------------------------------------------------------------


class Oracle:
    """A process with SGLang in it."""

    def __init__(self, python: str, watch: str | None) -> None:
        script = Path(__file__).with_name("loop_sglang.py")
        self._process = subprocess.Popen(
            [python, str(script), *(("--watch", watch) if watch is not None else ())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def trace(self, workload: Json) -> Json:
        """What SGLang does with a workload."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(workload) + "\n")
        self._process.stdin.flush()
        line: Json = json.loads(self._process.stdout.readline())
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def differences(expected: Json, got: Json) -> Iterator[str]:
    """The fields of a step that differ."""
    if "error" in expected or "error" in got:
        if ("error" in expected) != ("error" in got):
            yield f"error: SGLang {expected.get('error')!r}, ours {got.get('error')!r}"
        return
    for name, value in expected.items():
        mine = got[name]
        if name == "ended":
            value, mine = sorted(value), sorted(mine)
        same = abs(value - mine) <= TOLERANCE if isinstance(value, float) else value == mine
        if not same:
            yield f"{name}: SGLang {value!r}, ours {mine!r}"


def compare(workload: Json, trace: Json, counts: Counter[str]) -> tuple[int, list[str]] | None:
    """The first step that differs, and how; None if none does."""
    ours = Ours(workload)
    for number, expected in enumerate(trace["steps"]):
        events = [event for event in workload["events"] if event["step"] == number]
        try:
            got = ours.step(number, events)
        except Exception as error:
            return number, [f"ours raises {type(error).__name__}: {error}"]
        found = list(differences(expected, got))
        if found:
            return number, found
        _count(expected, counts)
    return None


def _count(step: Json, counts: Counter[str]) -> None:
    counts["steps"] += 1
    if "error" in step:
        counts["ended by an allocation failure"] += 1
        return
    counts[f"{step['kind']} steps"] += 1
    counts["steps with a chunk under way"] += step["chunked"] is not None
    counts["steps with batch_is_full"] += step["batch_is_full"]
    for name in ("retracted", "preempted", "finished", "ended"):
        counts[name] += len(step[name])
    counts["flushed"] += sum(step["flushed"])


def shrink(workload: Json, differs: Callable[[Json], bool]) -> Json:
    """A smaller workload that still differs: fewer events, fewer settings, shorter prompts."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(workload):
            if differs(smaller):
                workload, progress = smaller, True
                break
    return workload


def _smaller(workload: Json) -> Iterator[Json]:
    events = workload["events"]
    size = len(events) // 2
    while size:
        for start in range(0, len(events), size):
            yield workload | {"events": events[:start] + events[start + size :]}
        size //= 2
    for name in workload["config"]:
        yield workload | {"config": {key: value for key, value in workload["config"].items() if key != name}}
    for index, event in enumerate(events):
        for change in _simpler(event):
            yield workload | {"events": [*events[:index], change, *events[index + 1 :]]}


def _simpler(event: Json) -> Iterator[Json]:
    given = event.get("arrive")
    if given is None:
        return
    for name in given.keys() - {"rid", "prompt", "output", "max_new_tokens"}:
        yield event | {"arrive": {key: value for key, value in given.items() if key != name}}
    if len(given["prompt"]) > 1:
        yield event | {"arrive": given | {"prompt": given["prompt"][: len(given["prompt"]) // 2]}}


def read_or_make(args: argparse.Namespace) -> Iterator[Json]:
    """The workloads to compare."""
    if args.workloads is not None:
        with Path(args.workloads).open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())
        return
    for workload in known():
        mode = {} if args.overlap is None else {"disable_overlap_schedule": not args.overlap}
        yield workload | {"config": workload["config"] | mode}
    for seed in range(args.seed, args.seed + args.count):
        yield Generator(seed, aborts=args.aborts, overlap=args.overlap).workload()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare our scheduler loop with SGLang's, step by step.")
    parser.add_argument("--oracle", metavar="PYTHON", required=True, help="Python of an environment with sglang 0.5.23")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--aborts", action="store_true", help="clients take requests back, too")
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="all workloads with overlap, or none; otherwise chance says",
    )
    parser.add_argument("--workloads", metavar="FILE", help="compare these, JSON lines")
    parser.add_argument(
        "--watch", metavar="FOLDER", help="SGLang is recorded by schedscope's plugin, into runs in here"
    )
    parser.add_argument("--shrink", action="store_true", help="print the smallest workload that still differs")
    args = parser.parse_args()
    oracle = Oracle(args.oracle, args.watch)
    counts: Counter[str] = Counter()

    def check(workload: Json, counts: Counter[str]) -> tuple[int, list[str]] | None:
        trace = oracle.trace(workload)
        if "unsupported" in trace:
            return -1, [f"unsupported: {trace['unsupported']}"]
        return compare(workload, trace, counts)

    def differs(workload: Json) -> bool:
        try:
            found = check(workload, Counter())
        except ConfigError:
            return False
        return found is not None and found[0] >= 0

    for workload in read_or_make(args):
        found = check(workload, counts)
        counts["workloads"] += 1
        if found is None:
            continue
        counts["unsupported" if found[0] < 0 else "DIFFERENT"] += 1
        print(f"{workload['id']}: step {found[0]}")
        for text in found[1]:
            print(f"    {text}")
        if args.shrink and found[0] >= 0:
            small = shrink(workload, differs)
            step, texts = check(small, Counter()) or (0, [])
            small["steps"] = step + 1
            print(f"  smallest, step {step}: {json.dumps(small)}")
            for text in texts:
                print(f"    {text}")
        sys.stdout.flush()
    oracle.close()
    for name, count in sorted(counts.items()):
        print(f"{count:8d} {name}")
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
