"""Make random scheduling scenarios, in the format of the conformance suite and without ``expect``.

Usage::

    python generate.py --seed 1 --count 300 > scenarios.jsonl
    python generate.py --seed 1 --count 300 --kind evict > scenarios.jsonl

The same arguments always give the same scenarios.  ``run_sglang.py --fill`` puts the expected outcomes in.

Not every random state can be built: its running requests may not fit the pool, for example.  With
``--oracle PYTHON`` (the Python of the SGLang environment; PYTHONPATH is handed on) each scenario is run at once,
those that SGLang cannot run are replaced, and the lines come with ``expect``.  Only then are there *edges* too:
pairs that differ by one in one setting, between which some decision flips, found by bisection.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

EVICTION_POLICIES = ("lru", "lfu", "slru", "priority", "fifo", "filo", "mru")
CACHE_AWARE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
CACHE_AGNOSTIC = ("fcfs", "lof", "random", "routing-key")
PAGE_SIZES = (1, 1, 1, 1, 1, 1, 2, 4, 8, 16, 16, 16, 32, 64, 128, 3, 5, 12)
NAMESPACES: tuple[Json, ...] = (
    {"extra_key": "a"},
    {"extra_key": "b"},
    {"cache_salt": "s"},
    {"cache_salt": "t"},
    {"cache_salt": ""},
    {"extra_key": "a", "cache_salt": "s"},
    {"extra_key": "s"},
)
EDGES: dict[str, tuple[int, int]] = {
    "max_total_tokens": (1, 1 << 16),
    "chunked_prefill_size": (1, 4096),
    "max_prefill_tokens": (1, 8192),
    "in_batch_prefix_caching_check_threshold": (-1, 2048),
    "in_batch_prefix_caching_deprioritize_threshold": (0, 2048),
    "max_running_requests": (1, 256),
    "priority_scheduling_preemption_threshold": (0, 40),
    "prefill_max_requests": (0, 64),
    "clip_max_new_tokens": (0, 8192),
    "min_free_slots_delay": (0, 64),
}
"""Settings of which an edge can be sought, and where."""
DECISIONS = (
    "active_policy",
    "order",
    "deprioritized",
    "chunk_limit",
    "admitted",
    "stop",
    "chunked_req",
    "preempted",
    "batch_is_full",
    "mixed_decoding",
    "running_after",
    "error",
)


@dataclass
class Prefixes:
    """A random tree of token sequences, whose paths are the shared prefixes of a scenario's requests."""

    rng: random.Random
    depth: int
    roots: int
    longest: int
    tail: int
    alphabet: int = 0
    """Above zero: some sequences are literal tokens out of so few ids."""
    segments: dict[str, int] = field(default_factory=dict)
    _paths: list[list[str]] = field(default_factory=list)
    _unique: int = 0
    _used: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(self.roots):
            self._paths.append([self._segment()])
        for _ in range(self.rng.randrange(4 * self.depth) if self.depth > 1 else 0):
            parent = self.rng.choice(self._paths)
            if len(parent) < self.depth:
                self._paths.append([*parent, self._segment()])

    def _segment(self) -> str:
        name = f"P{len(self.segments)}"
        self.segments[name] = spread(self.rng, 1, self.longest)
        return name

    def sequence(self) -> list[Any]:
        """A prompt: a path or part of one, mostly with tokens of its own behind it; or one seen before."""
        rng = self.rng
        draw = rng.random()
        if self._used and draw < 0.12:
            parts = list(rng.choice(self._used))
            return parts if rng.random() < 0.5 else [*parts, self._own()]
        if self.alphabet and draw < 0.7:
            parts = [{"tokens": [rng.randrange(self.alphabet) for _ in range(spread(rng, 1, 80))]}]
        elif draw < 0.85:
            path = rng.choice(self._paths)
            parts = list(path[: rng.randint(1, len(path))])
            if rng.random() < 0.4:
                last = parts[-1]
                parts[-1] = f"{last}:{rng.randint(1, self.segments[last])}"
            if rng.random() < 0.75:
                parts.append(self._own())
        else:
            parts = [self._own()]
        self._used.append(parts)
        return parts

    def _own(self) -> str:
        self._unique += 1
        return f"u{self._unique}:{spread(self.rng, 1, self.tail)}"

    def length(self, parts: list[Any]) -> int:
        """Number of tokens."""
        total = 0
        for part in parts:
            if isinstance(part, dict):
                total += len(part["tokens"])
            else:
                name, _, count = part.partition(":")
                total += int(count) if count else self.segments[name]
        return total


def spread(rng: random.Random, low: int, high: int) -> int:
    """A random number in which every order of magnitude is about equally likely."""
    low = max(low, 1)
    return min(high, int(low * (high / low + 1e-9) ** rng.random() + rng.random()))


def maybe(rng: random.Random, chance: float, make: Callable[[], Any], into: Json, key: str) -> None:
    """Set ``into[key]`` sometimes."""
    if rng.random() < chance:
        into[key] = make()


# -- kind: pass -------------------------------------------------------------------------------------------


class PassMaker:
    """Makes one ``pass`` scenario; the profile says what it is mainly about."""

    PROFILES = (
        "mixed",
        "mixed",
        "mixed",
        "tree",
        "tree",
        "pressure",
        "pressure",
        "chunk",
        "chunk",
        "preempt",
        "preempt",
        "preempt",
        "ignore_eos",
        "delayer",
        "long_queue",
        "long_prompts",
        "steps",
        "steps",
        "literal",
        "gates",
    )

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng = rng
        self.profile = rng.choice(self.PROFILES)
        self.config: Json = {}
        self.scenario: Json = {"version": 1, "id": name, "kind": "pass", "config": self.config}
        self.namespaced = rng.random() < 0.3
        self.brief = rng.random() < (0.85 if self.profile in ("pressure", "tree", "literal", "steps") else 0.5)
        self.page = rng.choice(PAGE_SIZES)
        longest, tail = (4000, 6000) if self.profile == "long_prompts" else (400, 300)
        deep = self.profile in ("tree", "pressure")
        self.prefixes = Prefixes(
            rng,
            depth=rng.randint(2, 9) if deep or rng.random() < 0.3 else rng.randint(1, 2),
            roots=rng.randint(1, 6),
            longest=max(60 if deep else longest, 3 * self.page),
            tail=rng.choice((8, 40, tail)),
            alphabet=rng.choice((2, 3, 5)) if self.profile == "literal" else 0,
        )

    def make(self) -> Json:
        """The scenario."""
        self._settings()
        scenario = self.scenario
        footprint = self._state_before()
        self._queue()
        if self.prefixes.segments:
            scenario["segments"] = self.prefixes.segments
        self._pool(footprint)
        if self.rng.random() < 0.85:
            seen = [*scenario.get("cache", []), *({"seq": r["input"]} for r in scenario["waiting_queue"][:4])]
            scenario["probe"] = [
                {key: entry[key] for key in ("seq", "extra_key", "cache_salt") if key in entry} for entry in seen[:12]
            ]
        return scenario

    def _settings(self) -> None:
        rng, config, profile = self.rng, self.config, self.profile
        aware = 0.85 if profile in ("tree", "literal") else 0.6
        policy = rng.choice(CACHE_AWARE if rng.random() < aware else CACHE_AGNOSTIC)
        if profile == "tree" and rng.random() < 0.5:
            policy = "dfs-weight"
        if profile == "chunk" and rng.random() < 0.4:
            policy = "shortest-prefill-first"
        self.priority = profile == "preempt" or (profile in ("mixed", "steps") and rng.random() < 0.15)
        if self.priority:
            policy = rng.choice(("fcfs", "fcfs", "lof"))
            config["enable_priority_scheduling"] = True
            maybe(rng, 0.4, lambda: True, config, "schedule_low_priority_values_first")
            threshold = lambda: rng.choice((0, 1, 2, 3, 5))  # noqa: E731
            maybe(rng, 0.85, threshold, config, "priority_scheduling_preemption_threshold")
            maybe(rng, 0.15, lambda: True, config, "disable_priority_preemption")
        config["schedule_policy"] = policy
        config["page_size"] = self.page
        self.radix_off = profile == "ignore_eos" or rng.random() < 0.04
        if self.radix_off:
            config["disable_radix_cache"] = True
        maybe(rng, 0.06, lambda: True, config, "radix_force_miss")
        chance = 0.95 if profile == "pressure" else 0.5
        maybe(rng, chance, lambda: rng.choice(EVICTION_POLICIES), config, "radix_eviction_policy")
        in_batch = (0, 1, 8, 16, 32, 64, 128, 5000)
        check = lambda: rng.choice((-1, *in_batch))  # noqa: E731
        maybe(rng, 0.45, check, config, "in_batch_prefix_caching_check_threshold")
        maybe(rng, 0.45, lambda: rng.choice(in_batch), config, "in_batch_prefix_caching_deprioritize_threshold")
        chunked = profile in ("chunk", "steps") or rng.random() < 0.5
        if chunked:
            round_sizes = (32, 64, 128, 256, 512, 2048)
            config["chunked_prefill_size"] = rng.choice((rng.choice(round_sizes), spread(rng, 8, 1500)))
            # In a mixed batch over several steps the format does not say what decoding requests do.
            if profile != "steps":
                maybe(rng, 0.3, lambda: True, config, "enable_mixed_chunk")
            align = [size for size in (16, 32, 64, 48) if size <= config["chunked_prefill_size"]]
            if align:
                maybe(rng, 0.1, lambda: rng.choice(align), config, "truncation_align_size")
        elif rng.random() < 0.2:
            config["chunked_prefill_size"] = rng.choice((-1, 0, None))
        self.chunked = chunked
        maybe(rng, 0.35, lambda: spread(rng, 100, 12000), config, "max_prefill_tokens")
        maybe(rng, 0.5, lambda: spread(rng, 2, 64), config, "max_running_requests")
        maybe(rng, 0.15, lambda: rng.choice((0, 1, 2, 4, 8)), config, "prefill_max_requests")
        maybe(rng, 0.7, lambda: rng.choice((0.0, 0.1, 0.3, 0.5, 0.84, 1.0)), config, "new_token_ratio")
        maybe(rng, 0.12, lambda: rng.choice((0, 8, 32, 100, 256)), config, "clip_max_new_tokens")
        maybe(
            rng,
            0.7 if profile == "gates" else 0.04,
            lambda: rng.choice((0, 1, 2, 4, 8, 300)),
            config,
            "min_free_slots_delay",
        )
        config["random_seed"] = rng.randrange(1 << rng.choice((8, 16, 40)))
        if profile == "delayer" or (profile == "steps" and rng.random() < 0.25):
            self._delayer()

    def _delayer(self) -> None:
        rng, config = self.rng, self.config
        config["enable_prefill_delayer"] = True
        maybe(rng, 0.85, lambda: rng.choice((1, 2, 3, 5)), config, "prefill_delayer_max_delay_passes")
        maybe(rng, 0.4, lambda: rng.choice((0.05, 0.3, 0.7)), config, "prefill_delayer_token_usage_low_watermark")
        maybe(rng, 0.5, lambda: rng.choice((0.1, 0.5, 2.0)), config, "prefill_delayer_queue_min_ratio")
        maybe(rng, 0.5, lambda: rng.choice((50.0, 200.0)), config, "prefill_delayer_max_delay_ms")
        state: Json = {"skip_first": rng.random() < 0.4, "max_prefill_bs": rng.choice((0, 1, 4, 16, 300))}
        if rng.random() < 0.5:
            state["delayed_count"] = rng.randint(1, 3)
            state["age_ms"] = rng.choice((0, 40, 60, 250, 6000))
        if rng.random() < 0.5:
            state["other_ranks"] = [self._other_rank() for _ in range(rng.randint(1, 4))]
        self.scenario["delayer"] = state

    def _other_rank(self) -> Json:
        rng = self.rng
        rank: Json = {"prefillable": rng.random() < 0.6, "running_batch": rng.randint(0, 20)}
        maybe(rng, 0.1, lambda: True, rank, "force_allow")
        maybe(rng, 0.1, lambda: True, rank, "queue_timeout_expired")
        if rank["prefillable"]:
            rank["max_prefill_bs"] = rng.randint(0, 10)
            rank["waiting_queue_len"] = rng.randint(1, 30)
        return rank

    def _namespace(self) -> Json:
        return dict(self.rng.choice(NAMESPACES)) if self.namespaced and self.rng.random() < 0.4 else {}

    def _state_before(self) -> int:
        """Cache, running requests and chunk; returns about how many tokens these lock."""
        rng, scenario, config = self.rng, self.scenario, self.config
        cache = []
        most = {"tree": 40, "pressure": 25, "literal": 30}.get(self.profile, 10)
        for _ in range(rng.randint(0, most) if rng.random() < 0.85 else 0):
            entry: Json = {"seq": self.prefixes.sequence(), **self._namespace()}
            if config.get("radix_eviction_policy") == "priority":
                maybe(rng, 0.8, lambda: rng.randint(-1, 4), entry, "priority")
            maybe(rng, 0.05, lambda: True, entry, "locked")
            cache.append(entry)
        self.cached = self._distinct(cache)
        footprint = sum(self._pages(self.prefixes.length(e["seq"])) for e in cache if e.get("locked"))
        if cache:
            scenario["cache"] = cache
        slots = config.get("max_running_requests", 256)
        chance = 0.95 if self.profile in ("preempt", "gates", "ignore_eos") else 0.6
        count = min(rng.randint(1, 14), slots) if rng.random() < chance else 0
        if self.profile in ("preempt", "gates") and rng.random() < 0.75:
            config["max_running_requests"] = slots = max(count, 1) + rng.choice((0, 0, 0, 1, 2))
        has_chunk = self.chunked and rng.random() < (0.6 if self.profile == "chunk" else 0.15)
        running = []
        for i in range(min(count, slots - has_chunk)):
            request = self._running(i)
            running.append(request)
            footprint += self._pages(self.prefixes.length(request["input"]) + request["output"]) + self.page
        if running:
            scenario["running"] = running
        if has_chunk:
            done, footprint = self._chunk(footprint)
            scenario["chunked_req"] = done
        maybe(rng, 0.05 if self.profile != "gates" else 0.3, lambda: True, scenario, "batch_is_full")
        maybe(rng, 0.6, lambda: rng.choice((0, 1000, 50000)), scenario, "processed_tokens")
        if self.profile == "steps":
            scenario["passes"] = rng.randint(2, 6)
        return footprint

    def _distinct(self, entries: list[Json]) -> int:
        """About how many tokens the entries put in the tree."""
        nodes: dict[str, int] = {}
        for entry in entries:
            for end in range(1, len(entry["seq"]) + 1):
                path = json.dumps([entry.get("extra_key"), entry.get("cache_salt"), entry["seq"][:end]])
                nodes[path] = self.prefixes.length(entry["seq"][end - 1 : end])
        return sum(nodes.values())

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _running(self, i: int) -> Json:
        rng = self.rng
        output = spread(rng, 1, 24)
        request: Json = {
            "rid": f"run{i}",
            "input": self.prefixes.sequence(),
            "max_new_tokens": output + rng.choice((1, 1, 2, 5, 20) if self.brief else (1, 1, 5, 40, 120, 500, 5000)),
            "output": output,
            "entry_time": round(rng.uniform(1, 50), 3),
            **self._namespace(),
        }
        self._options(request)
        if self.profile != "steps":
            maybe(rng, 0.05, lambda: True, request, "finished")
        return request

    def _options(self, request: Json) -> None:
        rng = self.rng
        maybe(rng, 0.9 if self.profile == "ignore_eos" else 0.2, lambda: True, request, "ignore_eos")
        if self.priority:
            maybe(rng, 0.92, lambda: rng.randint(0, 11), request, "priority")
        elif rng.random() < 0.05:
            request["priority"] = rng.randint(-3, 5)
        if self.config["schedule_policy"] == "routing-key":
            maybe(rng, 0.75, lambda: rng.choice(("k1", "k2", "k3", "ka", "kb", "K", "")), request, "routing_key")

    def _chunk(self, footprint: int) -> tuple[Json, int]:
        rng = self.rng
        length = spread(rng, self.page + 2, 6000 if self.profile == "long_prompts" else 3000)
        done = max(1, rng.randint(1, length - 1) // self.page) * self.page
        done = min(done, (length - 1) // self.page * self.page)
        chunk: Json = {
            "rid": "chunk",
            "input": [f"chunk:{length}"],
            "max_new_tokens": rng.choice((1, 8, 64, 400)),
            "entry_time": 50.5,
            "done": done,
        }
        if self.priority:
            chunk["priority"] = rng.randint(0, 11)
        return chunk, footprint + self._pages(length) + 2 * self.page

    def _queue(self) -> None:
        rng, scenario = self.rng, self.scenario
        if self.profile == "long_queue":
            count = rng.choice((127, 128, 129, 130, rng.randint(100, 400)))
        else:
            count = spread(rng, 1, 60) if rng.random() < 0.97 else 0
        clock = scenario.get("processed_tokens", 0)
        rids = list(range(count))
        if rng.random() < 0.5:
            rng.shuffle(rids)
        queue = []
        for place, number in enumerate(rids):
            request: Json = {
                "rid": f"r{number}",
                "input": self.prefixes.sequence(),
                "max_new_tokens": rng.choice((1, 2, 8, 32) if self.brief else (1, 8, 32, 128, 600, 5000)),
                "entry_time": 60 + place if rng.random() < 0.6 else round(rng.uniform(60, 70 + count), 3),
                **self._namespace(),
            }
            if rng.random() < 0.12:
                request["output"] = spread(rng, 1, 40)
                if self.profile == "steps":
                    request["max_new_tokens"] = request["output"] + rng.choice((1, 2, 30))
                maybe(rng, 0.15, lambda: False, request, "retracted")
            arrival = lambda: rng.choice((0, clock, max(0, clock - rng.randint(0, 2000)), clock + 50))  # noqa: E731
            maybe(rng, 0.3, arrival, request, "arrival_processed_tokens")
            if self.profile == "steps":
                request["max_new_tokens"] = rng.choice((1, 2, 3, request["max_new_tokens"]))
                request["max_new_tokens"] = max(request["max_new_tokens"], request.get("output", 0) + 1)
            self._options(request)
            queue.append(request)
        scenario["waiting_queue"] = queue
        if rng.random() < 0.06:
            scenario["waiting_queue_generate"] = [self._generated(g, len(queue)) for g in range(rng.randint(1, 2))]

    def _generated(self, number: int, length: int) -> Json:
        rng = self.rng
        tail = spread(rng, 1, 40)
        template: Json = {
            "rid": f"g{number}_{{i:03}}",
            "input": [*self.prefixes.sequence(), f"g{number}t{{i}}:{tail}"],
            "max_new_tokens": rng.choice((1, 32, 600)),
            "entry_time": 70,
            **self._namespace(),
        }
        rule: Json = {"count": spread(rng, 1, 150), "template": template}
        maybe(rng, 0.5, lambda: rng.randint(0, length), rule, "at")
        return rule

    def _pool(self, footprint: int) -> None:
        """A pool that holds what is locked, and with some pressure not everything else."""
        rng = self.rng
        queue = self.scenario["waiting_queue"][: rng.randint(1, 12)]
        prompts = sum(self._pages(self.prefixes.length(request["input"])) for request in queue)
        wanted = prompts + sum(request["max_new_tokens"] + self.page for request in queue)
        draw = rng.random()
        if "chunked_req" in self.scenario and rng.random() < 0.25:
            self.scenario["pool"] = {"free": spread(rng, 1, 3000)}
            return
        if draw < 0.08 and self.profile != "pressure":
            self.scenario["pool"] = {"free": rng.choice((0, self.page, prompts, wanted, spread(rng, 1, 4000)))}
            return
        if draw < 0.2 and self.profile not in ("pressure", "tree"):
            return
        if self.brief:
            share = (0.5, 1.0, 2.0, 4.0) if self.profile in ("steps", "preempt") else (0, 0, 0.05, 0.3)
            slack = rng.choice((0.5, 0.8, 1.0)) * self.cached + rng.choice(share) * prompts
        else:
            slack = rng.choice((0.2, 0.6, 1.0)) * self.cached + rng.choice((0.1, 0.5, 0.9, 1.0, 1.5)) * wanted
        entries = [*self.scenario.get("cache", []), *({"seq": r["input"]} for r in self.scenario.get("running", []))]
        longest = max([0, *(self._pages(self.prefixes.length(entry["seq"])) for entry in entries)])
        self.config["max_total_tokens"] = int(footprint + max(slack, longest) + rng.randint(1, 4) * self.page)


# -- kind: evict ------------------------------------------------------------------------------------------


def make_evict(rng: random.Random, name: str) -> Json:
    """Operations on an empty prefix tree."""
    page = rng.choice(PAGE_SIZES)
    config: Json = {"page_size": page, "radix_eviction_policy": rng.choice(EVICTION_POLICIES)}
    prefixes = Prefixes(
        rng,
        depth=rng.randint(1, 9),
        roots=rng.randint(1, 5),
        longest=rng.choice((20, 80, 300)),
        tail=rng.choice((5, 40, 120)),
        alphabet=rng.choice((0, 0, 0, 2, 3)),
    )
    namespaced = rng.random() < 0.5
    known: list[tuple[list[Any], Json]] = []
    ops: list[Json] = []
    weights = {"insert": 6, "touch": 2, "lock": rng.choice((0, 0.3)), "probe": 3, "evict": 3, "sizes": 2}
    total = 0
    for _ in range(rng.randint(10, 160)):
        op = rng.choices(list(weights), list(weights.values()))[0]
        if op == "sizes":
            ops.append({"sizes": True})
        elif op == "evict":
            ops.append({"evict": rng.choice((1, 1, page, spread(rng, 1, 60), spread(rng, 1, max(2, total))))})
        else:
            if (op == "insert" and rng.random() < 0.85) or not known:
                space = dict(rng.choice(NAMESPACES)) if namespaced and rng.random() < 0.4 else {}
                known.append((prefixes.sequence(), space))
                sequence, space = known[-1]
            else:
                sequence, space = rng.choice(known)
                if op != "insert" and rng.random() < 0.15:
                    sequence = prefixes.sequence()
            item: Json = {op: sequence, **space}
            if op == "insert":
                total += prefixes.length(sequence)
                maybe(rng, 0.5, lambda: rng.randint(-2, 4), item, "priority")
            ops.append(item)
    ops += [{"probe": sequence, **space} for sequence, space in known[:30]]
    ops.append({"sizes": True})
    if rng.random() < 0.25:
        longest = max(prefixes.length(sequence) for sequence, _ in known)
        config["max_total_tokens"] = 2 * longest + 3 * page + rng.randint(0, max(1, total // 2))
    scenario: Json = {"version": 1, "id": name, "kind": "evict", "config": config}
    if prefixes.segments:
        scenario["segments"] = prefixes.segments
    return scenario | {"ops": ops}


# -- kind: delayer ----------------------------------------------------------------------------------------


def make_delayer(rng: random.Random, name: str) -> Json:
    """Passes of one or several ranks."""
    config: Json = {}
    maybe(rng, 0.8, lambda: rng.choice((1, 2, 3, 6)), config, "prefill_delayer_max_delay_passes")
    maybe(rng, 0.45, lambda: rng.choice((0.1, 0.5)), config, "prefill_delayer_token_usage_low_watermark")
    maybe(rng, 0.6, lambda: rng.choice((0.1, 0.5, 1.0, 2.0)), config, "prefill_delayer_queue_min_ratio")
    maybe(rng, 0.7, lambda: rng.choice((0.0, 50.0, 200.0)), config, "prefill_delayer_max_delay_ms")
    maybe(rng, 0.4, lambda: rng.choice((1, 4)), config, "prefill_max_requests")
    maybe(rng, 0.5, lambda: rng.choice((1, 3)), config, "prefill_delayer_max_prefill_bs_window_size")
    slots = rng.choice((8, 16, 64, 256))
    config["max_running_requests"] = slots
    count = 1
    if rng.random() < 0.7:
        config["dp_size"] = rng.choice((2, 3, 4, 8))
        if rng.random() < 0.75:
            config["enable_dp_attention"] = True
            count = config["dp_size"]
    scenario: Json = {"version": 1, "id": name, "kind": "delayer", "config": config}
    clock = 0.0
    if rng.random() < 0.4:
        state: Json = {"skip_first": rng.random() < 0.5}
        if rng.random() < 0.6:
            state |= {"delayed_count": rng.randint(1, 3), "age_ms": rng.choice((0, 30, 60, 250, 6000))}
        scenario["delayer"] = state
    prefillable = rng.choice((0.5, 0.8, 0.95, 1.0))
    passes = []
    for _ in range(rng.randint(3, 40)):
        ranks = [_delayer_rank(rng, clock, slots, prefillable) for _ in range(count)]
        step: Json = {"now": round(clock, 4), "ranks": ranks}
        maybe(rng, 0.1, lambda: rng.randint(2, 5), step, "repeat")
        passes.append(step)
        clock += rng.choice((0.005, 0.02, 0.1, 0.3))
    return scenario | {"passes": passes}


def _delayer_rank(rng: random.Random, clock: float, slots: int, prefillable: float) -> Json:
    if rng.random() >= prefillable:
        return {"prefillable": False}
    rank: Json = {
        "prefillable": True,
        "token_usage": round(rng.random(), 3),
        "running_batch": rng.choice((0, rng.randint(0, slots), max(0, slots - rng.randint(0, 4)))),
        "waiting_queue_len": spread(rng, 1, 40),
        "actual_prefill_bs": rng.randint(0, 8),
    }
    maybe(rng, 0.4, lambda: rng.randint(2, 3), rank, "calls")
    maybe(rng, 0.2, lambda: rng.randint(0, 20), rank, "max_prefill_bs")
    maybe(rng, 0.05, lambda: rng.randint(1, slots), rank, "max_running_requests")
    maybe(rng, 0.15, lambda: round(clock + rng.uniform(-0.01, 0.1), 4), rank, "now")
    return rank


MAKERS: dict[str, Callable[[random.Random, str], Json]] = {
    "pass": lambda rng, name: PassMaker(rng, name).make(),
    "evict": make_evict,
    "delayer": make_delayer,
}


# -- with the oracle --------------------------------------------------------------------------------------


class Oracle:
    """``run_sglang.py`` as a process that answers one scenario after the other."""

    def __init__(self, python: str) -> None:
        program = Path(__file__).with_name("run_sglang.py")
        self._process = subprocess.Popen(
            [python, str(program), "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, scenario: Json) -> Json | None:
        """The outcome, or None where SGLang cannot run the scenario."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(scenario) + "\n")
        self._process.stdin.flush()
        expect: Json | None = json.loads(self._process.stdout.readline()).get("expect")
        return expect

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def decisions(outcome: Json | None) -> Any:
    """The part of an outcome that an edge must change."""
    if outcome is None:
        return None
    return [{key: each.get(key) for key in DECISIONS} for each in outcome.get("passes", [outcome])]


def edge(rng: random.Random, scenario: Json, oracle: Oracle) -> list[Json]:
    """Two scenarios that differ by one in one setting and decide differently; empty if none is found."""
    config = scenario["config"]
    candidates = [key for key in EDGES if key in config or key in ("max_prefill_tokens", "max_total_tokens")]
    if "pool" in scenario:
        candidates.remove("max_total_tokens")
    setting = rng.choice(candidates)
    low, high = EDGES[setting]
    if isinstance(value := config.get(setting), int) and value > 0:
        low, high = max(low, value // 4), value * 4
    if setting == "max_total_tokens":
        low, high = low // scenario["config"]["page_size"], high // scenario["config"]["page_size"]

    def at(number: int) -> tuple[Json, Json | None]:
        scale = config["page_size"] if setting == "max_total_tokens" else 1
        changed = scenario | {"title": f"edge of {setting}", "config": config | {setting: number * scale}}
        return changed, oracle.ask(changed)

    first, last = at(low), at(high)
    while last[1] is not None and high - low > 1:
        middle = (low + high) // 2
        probe = at(middle)
        if decisions(probe[1]) == decisions(last[1]):
            high, last = middle, probe
        else:
            low, first = middle, probe
    if first[1] is None or last[1] is None or decisions(first[1]) == decisions(last[1]):
        return []
    return [changed | {"expect": outcome} for changed, outcome in (first, last)]


def generate(kind: str, seed: int, count: int, prefix: str, oracle: Oracle | None, edges: float) -> Iterator[Json]:
    """``count`` scenarios of one kind."""
    made = attempt = 0
    while made < count:
        rng = random.Random(f"{kind}/{seed}/{attempt}")
        attempt += 1
        scenario = MAKERS[kind](rng, f"{prefix}{made + 1:04}")
        found = [scenario]
        if oracle is not None:
            outcome = oracle.ask(scenario)
            if outcome is None:
                continue
            found = [scenario | {"expect": outcome}]
            if kind == "pass" and rng.random() < edges:
                found = edge(rng, scenario, oracle) or found
        for each in found[: count - made]:
            made += 1
            yield each | {"id": f"{prefix}{made:04}"}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make random scheduling scenarios.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--kind", choices=sorted(MAKERS), default="pass")
    parser.add_argument("--prefix", help="of the ids; default: w, we or wd and the seed")
    parser.add_argument("--oracle", metavar="PYTHON", help="keep only what runs, and fill in expect")
    parser.add_argument("--edges", type=float, default=0.15, help="share of edge pairs, with --oracle (%(default)s)")
    args = parser.parse_args()
    letters = {"pass": "w", "evict": "we", "delayer": "wd"}[args.kind]
    prefix = args.prefix if args.prefix is not None else f"{letters}{args.seed}_"
    oracle = Oracle(args.oracle) if args.oracle else None
    try:
        for scenario in generate(args.kind, args.seed, args.count, prefix, oracle, args.edges):
            print(json.dumps(scenario, separators=(",", ":"), ensure_ascii=False), flush=True)
    finally:
        if oracle is not None:
            oracle.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
