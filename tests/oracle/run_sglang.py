"""Run scheduling scenarios through the real SGLang 0.5.23 scheduler classes, on a CPU.

This is a test oracle.  It reads scenarios (the format is described in FORMAT.md of the conformance suite),
puts the described state in place with SGLang's own allocators, request pool and prefix tree, calls the real
``Scheduler.get_new_batch_prefill`` and reports what it did.  No decision is computed here: everything in the
outcome was either returned by SGLang or seen by a wrapper around one of its methods.

Usage, with the Python of an environment that has ``sglang==0.5.23`` and a CPU build of torch::

    PYTHONPATH=stubs python run_sglang.py FILE... > outcomes.jsonl

``stubs`` is the folder of the ``sitecustomize.py`` that lets the unmodified wheel be imported without CUDA.
FILE is ``.jsonl``, ``.yaml`` or ``.yml`` (one or more documents), each optionally with ``.gz``, or ``-`` for
JSON lines on standard input.  Every scenario of kind ``pass``, ``delayer`` or ``evict`` gives one line
``{"id": ..., "expect": {...}}``; other kinds are skipped.  A scenario that the format does not cover (its state
cannot be built, or SGLang fails in an undocumented way) gives ``{"id": ..., "unsupported": "why"}``.

With ``--fill`` the whole scenario is written back, ``expect`` replaced by the outcome, and unsupported ones are
left out.

How it works:

* ``Clock`` replaces ``time.perf_counter`` before SGLang is imported, so that its clock is an input.
* One dummy ``ServerArgs`` is published per process; each scenario overrides leaves of the resolved configuration.
* ``Engine`` is a bare ``Scheduler`` (``Scheduler.__new__``) whose state is set by its own ``init_*`` methods where
  these need no model, and directly otherwise.
* ``PassTrace`` and the ``PrefillAdder`` subclass made by ``tracing_adder`` record a pass from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import logging
import os
import random
import re
import sys
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO


class Clock:
    """Stands in for ``time.perf_counter``: a fixed time while a scenario runs, the real one otherwise."""

    def __init__(self) -> None:
        self.now: float | None = None
        self._real = time.perf_counter

    def __call__(self) -> float:
        return self._real() if self.now is None else self.now


CLOCK = Clock()
time.perf_counter = CLOCK  # before SGLang binds the original, e.g. as a dataclass default
warnings.simplefilter("ignore")

import torch  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.managers import prefill_delayer as delayer_module  # noqa: E402
from sglang.srt.managers import schedule_policy as policy_module  # noqa: E402
from sglang.srt.managers import scheduler as scheduler_module  # noqa: E402
from sglang.srt.managers.min_free_slots_delayer import (  # noqa: E402
    MinFreeSlotsDelayer,
    resolve_min_free_slots,
)
from sglang.srt.managers.prefill_delayer import (  # noqa: E402
    PrefillDelayer,
    PrefillDelayerSinglePassExecutor,
    RecentPrefillBatchSizeTracker,
)
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

Json = dict[str, Any]

KINDS = ("pass", "delayer", "evict")
FIRST_SEGMENT_ID = 1 << 30  # literal ids are below
DEVICE = "cpu"
VOCAB_SIZE = 1 << 40
START_TIME = 1e6  # later than any entry_time of a scenario

CONFIG_DEFAULTS: Json = {
    "schedule_policy": "fcfs",
    "page_size": 1,
    "max_total_tokens": 1048576,
    "max_running_requests": 256,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": None,
    "prefill_max_requests": None,
    "radix_eviction_policy": "lru",
    "in_batch_prefix_caching_check_threshold": 32,
    "in_batch_prefix_caching_deprioritize_threshold": 32,
    "enable_prefill_delayer": False,
    "prefill_delayer_max_delay_passes": 30,
    "prefill_delayer_token_usage_low_watermark": None,
    "prefill_delayer_queue_min_ratio": None,
    "prefill_delayer_max_delay_ms": None,
    "prefill_delayer_max_prefill_bs_window_size": 16,
    "dp_size": 1,
    "enable_dp_attention": False,
    "enable_priority_scheduling": False,
    "schedule_low_priority_values_first": False,
    "priority_scheduling_preemption_threshold": 10,
    "disable_priority_preemption": False,
    "enable_mixed_chunk": False,
    "min_free_slots_delay": None,
    "disable_radix_cache": False,
    "radix_force_miss": False,
    "new_token_ratio": 0.7,
    "clip_max_new_tokens": 4096,
    "truncation_align_size": None,
    "random_seed": 0,
}
"""Every config key of the format with its default."""

SERVER_ARGS = (
    "schedule_policy",
    "page_size",
    "max_total_tokens",
    "max_running_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "prefill_max_requests",
    "radix_eviction_policy",
    "enable_prefill_delayer",
    "prefill_delayer_max_delay_passes",
    "prefill_delayer_token_usage_low_watermark",
    "prefill_delayer_queue_min_ratio",
    "prefill_delayer_max_delay_ms",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "disable_priority_preemption",
    "enable_mixed_chunk",
    "min_free_slots_delay",
    "disable_radix_cache",
)
"""The config keys that are leaves of SGLang's own configuration."""

TOP_KEYS = {"version", "id", "kind", "title", "reason", "source", "verified", "config", "segments", "expect"}
KIND_KEYS = {
    "pass": {
        "cache",
        "running",
        "chunked_req",
        "pool",
        "waiting_queue",
        "waiting_queue_generate",
        "processed_tokens",
        "batch_is_full",
        "passes",
        "probe",
        "delayer",
    },
    "delayer": {"passes", "delayer"},
    "evict": {"ops"},
}
REQUEST_KEYS = {
    "rid",
    "input",
    "output",
    "max_new_tokens",
    "ignore_eos",
    "priority",
    "routing_key",
    "extra_key",
    "cache_salt",
    "entry_time",
    "arrival_processed_tokens",
    "retracted",
    "finished",
    "done",
}
RANK_FIELDS = (
    "prefillable",
    "force_allow",
    "running_batch",
    "max_prefill_bs",
    "waiting_queue_len",
    "queue_timeout_expired",
)
"""A data-parallel rank's row in the delayer's gather, in SGLang's order."""


class UnsupportedError(Exception):
    """The scenario cannot be run, or its outcome has no place in the format."""


def check_keys(given: Json, allowed: Iterable[str], where: str) -> None:
    """Refuse keys that the format does not know."""
    if unknown := set(given) - set(allowed):
        raise UnsupportedError(f"unknown key in {where}: {', '.join(sorted(unknown))}")


class Tokens:
    """Gives token ids to a scenario's segments; all ids differ, within a segment and between segments."""

    def __init__(self, scenario: Json, queue: Iterable[Json] = ()) -> None:
        self._lengths: dict[str, int] = dict(scenario.get("segments", {}))
        self._declared = set(self._lengths)
        self._ids: dict[str, array[int]] = {}
        self._next = FIRST_SEGMENT_ID
        ignored = ("expect", "segments", "source", "waiting_queue", "waiting_queue_generate")
        body = {key: scenario[key] for key in scenario if key not in ignored}
        for part in _string_parts([body, list(queue)]):
            name, _, count = part.partition(":")
            if count and name not in self._declared:
                self._lengths[name] = max(self._lengths.get(name, 0), int(count))

    def fresh(self, count: int) -> array[int]:
        """``count`` ids that nothing else has."""
        ids = array("q", range(self._next, self._next + count))
        self._next += count
        return ids

    def sequence(self, parts: list[str | Json]) -> array[int]:
        """The ids of a token sequence."""
        ids = array("q")
        for part in parts:
            if isinstance(part, dict):
                check_keys(part, ("tokens",), "token sequence")
                ids.extend(part["tokens"])
                continue
            name, colon, count = part.partition(":")
            segment = self._segment(name)
            length = int(count) if colon else len(segment)
            if length > len(segment):
                raise UnsupportedError(f"segment {name} has {len(segment)} tokens, {length} used")
            ids.extend(segment[:length])
        return ids

    def output(self, output: int | list[str | Json]) -> array[int]:
        """Generated ids: a sequence, or a number of ids used nowhere else."""
        return self.fresh(output) if isinstance(output, int) else self.sequence(output)

    def _segment(self, name: str) -> array[int]:
        if name not in self._ids:
            if name not in self._lengths:
                raise UnsupportedError(f"unknown segment {name}")
            self._ids[name] = self.fresh(self._lengths[name])
        return self._ids[name]


def _string_parts(node: Any) -> Iterator[str]:
    """The strings inside a scenario that can be ``name:n`` (any other string is harmless here)."""
    if isinstance(node, dict):
        for value in node.values():
            yield from _string_parts(value)
    elif isinstance(node, list):
        for value in node:
            if isinstance(value, str):
                name, colon, count = value.partition(":")
                if name and colon and count.isdigit():
                    yield value
            else:
                yield from _string_parts(value)


def expand_queue(scenario: Json) -> list[Json]:
    """``waiting_queue`` with the requests of ``waiting_queue_generate`` put in."""
    queue = list(scenario.get("waiting_queue") or [])
    for rule in scenario.get("waiting_queue_generate") or []:
        check_keys(rule, ("count", "at", "template"), "waiting_queue_generate")
        copies = [_format(rule["template"], i) for i in range(rule["count"])]
        at = rule.get("at", len(queue))
        queue[at:at] = copies
    return queue


def _format(node: Any, i: int) -> Any:
    if isinstance(node, str):
        return node.format(i=i)
    if isinstance(node, list):
        return [_format(value, i) for value in node]
    if isinstance(node, dict):
        return {key: _format(value, i) for key, value in node.items()}
    return node


@contextlib.contextmanager
def configured(config: Json) -> Iterator[None]:
    """Make ``config`` (complete) SGLang's configuration: its own leaves, module constants and environment."""
    get_context().override(
        "scenario",
        **{name: config[name] for name in SERVER_ARGS},
        pp_max_micro_batch_size=max(config["max_running_requests"], 1),
    )
    policy_module.CLIP_MAX_NEW_TOKENS = config["clip_max_new_tokens"]
    policy_module.IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD = config["in_batch_prefix_caching_check_threshold"]
    policy_module.IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD = config[
        "in_batch_prefix_caching_deprioritize_threshold"
    ]
    window = config["prefill_delayer_max_prefill_bs_window_size"]
    with (
        envs.SGLANG_RADIX_FORCE_MISS.override(bool(config["radix_force_miss"])),
        envs.SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE.override(window),
    ):
        yield


def data_parallel(ranks: int, *, attention: bool) -> contextlib.AbstractContextManager[Any]:
    """Say that the deployment has so many data-parallel ranks; this process is rank 0."""
    width = ranks if attention else 1
    group = SimpleNamespace(cpu_group=None, device_group=None, device=DEVICE)
    context: contextlib.AbstractContextManager[Any] = get_parallel().override(
        num_dp_ranks=ranks,
        attn_dp_enabled=attention,
        attn_dp_size=width,
        tp_size=width,
        attn_tp_size=1,
        attn_cp_size=1,
        attn_tp_rank=0,
        moe_tp_size=width,
        tp_group=group,
    )
    return context


class Gather:
    """Replaces the delayer's all-gather: this rank's row first, then rows given from outside."""

    def __init__(self, others: list[list[int]]) -> None:
        self.others = others

    def __call__(self, output: torch.Tensor, local: torch.Tensor, group: Any = None) -> None:
        del group
        rows = [local.tolist(), *self.others]
        output.copy_(torch.tensor(rows, dtype=torch.int64).flatten())


class _Gathered(Exception):
    """Raised by ``Capture`` to stop a rank at the gather."""

    def __init__(self, row: list[int]) -> None:
        super().__init__()
        self.row = row


class Capture:
    """An all-gather that only reports what this rank would have sent."""

    def __call__(self, output: torch.Tensor, local: torch.Tensor, group: Any = None) -> None:
        del output, group
        raise _Gathered(local.tolist())


@contextlib.contextmanager
def gathering(gather: Callable[..., None]) -> Iterator[None]:
    """Use ``gather`` as the delayer's collective."""
    original = delayer_module.all_gather_single
    delayer_module.all_gather_single = gather
    try:
        yield
    finally:
        delayer_module.all_gather_single = original


@dataclass
class PassTrace:
    """What one pass did, recorded while it happened."""

    order: list[str] | None = None
    active_policy: str | None = None
    matches: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per rid: prefix length and matched length, of the matches made while sorting."""
    deprioritized: list[str] = field(default_factory=list)
    adder: PrefillAdder | None = None
    budget: Json | None = None
    chunk_limit: int | None = None
    admission: list[Json] = field(default_factory=list)
    stop: str | None = None
    looking_at: bool = False
    """A request is next, and neither admission nor preemption has been tried for it."""
    allocatable_asked: bool = False
    slots_delayed: bool = False
    evicted: int = 0
    pool_before: Json | None = None
    delayer_pass: PrefillDelayerSinglePassExecutor | None = None
    observed_bs: int | None = None


def budgets(adder: PrefillAdder) -> Json:
    """The four budgets as they stand."""
    return {
        "rem_total_tokens": rounded(adder.rem_total_tokens),
        "cur_rem_tokens": rounded(adder.cur_rem_tokens),
        "rem_input_tokens": adder.rem_input_tokens,
        "rem_chunk_tokens": adder.rem_chunk_tokens,
    }


def rounded(value: float) -> float:
    """A number without the noise of floating point."""
    return round(value, 9)


def tracing_adder(trace: PassTrace) -> type[PrefillAdder]:
    """A ``PrefillAdder`` that does nothing else than the real one, and writes down each call in ``trace``."""

    class TracingAdder(PrefillAdder):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._inside = False
            super().__init__(*args, **kwargs)
            trace.adder = self
            trace.budget = budgets(self)

        def add_chunked_req(self, req: Req) -> Req | None:
            trace.chunk_limit = self.chunked_req_limit
            prefix_len = req.prefix_len
            self._inside = True
            unfinished = super().add_chunked_req(req)
            self._inside = False
            self._note(req, "CHUNK", prefix_len, chunked=unfinished is not None)
            return unfinished

        def budget_state(self) -> AddReqResult:
            state = super().budget_state()
            if not self._inside:
                trace.looking_at = state is not AddReqResult.OTHER
                trace.stop = "budget" if state is AddReqResult.OTHER else None
            return state

        def preempt_to_schedule(self, req: Req) -> bool:
            trace.looking_at = False
            before = len(self.preempt_list)
            done = bool(super().preempt_to_schedule(req))
            if not done:
                trace.stop = "preempt_failed"
            self._preempted = [r.rid for r in self.preempt_list[before:]]
            return done

        def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
            trace.looking_at = False
            self._inside = True
            result = super().add_one_req(req, *args, **kwargs)
            self._inside = False
            self._note(req, result.name, req.prefix_len, chunked=self.new_chunked_req is req)
            trace.stop = None if result is AddReqResult.CONTINUE else result.name
            return result

        def _note(self, req: Req, result: str, prefix_len: int, *, chunked: bool) -> None:
            admitted = bool(self.can_run_list) and self.can_run_list[-1] is req
            item = {
                "rid": req.rid,
                "result": result,
                "chunked": chunked,
                "prefix_len": prefix_len,
                "extend_len": req.extend_len if admitted else None,
                **budgets(self),
            }
            if preempted := getattr(self, "_preempted", None):
                item["preempted"] = sorted(preempted)
            self._preempted = []
            trace.admission.append(item)

    return TracingAdder


class Engine:
    """Pools, prefix tree and a bare scheduler for one scenario."""

    def __init__(self, config: Json, tokens: Tokens, longest: int) -> None:
        self.config = config
        self.tokens = tokens
        self.trace = PassTrace()
        page_size = config["page_size"]
        size = config["max_total_tokens"] // page_size * page_size
        self.req_to_token_pool = ReqToTokenPool(
            size=config["max_running_requests"],
            max_context_len=longest,
            device=DEVICE,
            enable_memory_saver=False,
        )
        kv = {"dtype": torch.float16, "device": DEVICE, "kvcache": None, "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(size, **kv) if page_size == 1 else PagedTokenToKVPoolAllocator(size, page_size, **kv)
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=config["disable_radix_cache"],
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                eviction_policy=config["radix_eviction_policy"],
                tree_components=(ComponentType.FULL,),
            )
        )
        if self.tree._tree_core_backend != "rust":
            raise RuntimeError("SGLang did not select its Rust tree core")
        evict = self.tree._evict

        def traced_evict(*args: Any, **kwargs: Any) -> Any:
            result = evict(*args, **kwargs)
            self.trace.evicted += result.num_tokens_evicted
            return result

        self.tree._evict = traced_evict

    # -- requests and the state before -----------------------------------------------------------------

    def request(self, given: Json) -> Req:
        """A request that has been received, with its generated tokens and queue data."""
        check_keys(given, REQUEST_KEYS, "request")
        sampling = SamplingParams(
            max_new_tokens=given.get("max_new_tokens", 128), ignore_eos=bool(given.get("ignore_eos", False))
        )
        sampling.normalize(None)
        req = Req(
            rid=given["rid"],
            origin_input_text="",
            origin_input_ids=self.tokens.sequence(given["input"]),
            sampling_params=sampling,
            vocab_size=VOCAB_SIZE,
            priority=given.get("priority"),
            extra_key=given.get("extra_key"),
            routing_key=given.get("routing_key"),
            cache_salt=given.get("cache_salt"),
        )
        req.time_stats.wait_queue_entry_time = float(given.get("entry_time", 0))
        req.arrival_processed_tokens = given.get("arrival_processed_tokens", 0)
        return req

    def prefill(self, req: Req, *, end: int | None = None) -> ScheduleBatch:
        """Admit and compute ``req`` alone, up to ``end`` tokens, with no budget in the way."""
        req.init_next_round_input(self.tree)
        req.extend_end = len(req.full_untruncated_fill_ids) if end is None else end
        if req.extend_end <= req.prefix_len:
            raise UnsupportedError(f"{req.rid}: the first {end} tokens are all cached")
        req.lock = self.tree.lock(req.last_node)
        batch = self.batch([req])
        batch.prepare_for_extend()
        return batch

    def batch(self, reqs: list[Req]) -> ScheduleBatch:
        """A new batch of ``reqs``."""
        return ScheduleBatch.init_new(
            reqs,
            self.req_to_token_pool,
            self.allocator,
            self.tree,
            self.scheduler.model_config,
            self.scheduler.enable_overlap,
            self.scheduler.spec_algorithm,
        )

    def insert(self, entry: Json) -> None:
        """A ``cache`` entry: a request that ran alone and finished with its first output token."""
        check_keys(entry, ("seq", "extra_key", "cache_salt", "priority", "locked"), "cache")
        given: Json = {key: entry[key] for key in ("extra_key", "cache_salt", "priority") if key in entry}
        req = self.request({"rid": "cache", "input": entry["seq"], "max_new_tokens": 1, **given})
        self.scheduler._set_or_validate_priority(req)
        self.prefill(req)
        self.commit_token(req)
        if entry.get("locked"):
            self.tree.lock(self.match(entry).last_device_node)

    def commit_token(self, req: Req) -> None:
        """One output token after a prefill: finish, or publish what was computed."""
        req.output_ids.extend(self.tokens.fresh(1))
        req.update_finish_state()
        if req.finished():
            release_kv_cache(req, self.tree, checkpoint=True)
        else:
            checkpoint_kv_cache(req, self.tree)

    def start(self, given: Json) -> ScheduleBatch:
        """A ``running`` request: prefilled, and decoded once per output token after the first."""
        req = self.request(given)
        self.scheduler._set_or_validate_priority(req)
        output = self.tokens.output(given.get("output", 1)) or self.tokens.fresh(1)
        batch = self.prefill(req)
        req.output_ids.append(output[0])
        checkpoint_kv_cache(req, self.tree)
        for token in output[1:]:
            batch.prepare_for_decode()
            req.output_ids.append(token)
        if given.get("finished"):
            req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
            req.finished_len = len(req.output_ids)
            release_kv_cache(req, self.tree, checkpoint=True)
        return batch

    def start_chunk(self, given: Json) -> None:
        """The ``chunked_req``: its first ``done`` tokens are computed and stored."""
        req = self.request(given)
        self.scheduler._set_or_validate_priority(req)
        self.prefill(req, end=given["done"])
        checkpoint_kv_cache(req, self.tree)
        self.scheduler.chunked_req = req

    def waiting(self, given: Json) -> Req:
        """A request of the waiting queue."""
        req = self.request(given)
        self.scheduler._set_or_validate_priority(req)
        if given.get("output"):
            req.output_ids.extend(self.tokens.output(given["output"]))
        req.is_retracted = req.retracted_stain = bool(given.get("retracted", given.get("output")))
        return req

    def match(self, entry: Json) -> Any:
        """Match a sequence against the tree."""
        key = RadixKey(
            self.tokens.sequence(entry["seq"]),
            extra_key=entry.get("extra_key"),
            cache_salt=entry.get("cache_salt"),
        )
        return self.tree.match_prefix(MatchPrefixParams(key=key))

    def pool(self) -> Json:
        """Tokens that are free, in the tree and unlocked, in the tree and locked."""
        return {
            "available": self.allocator.available_size(),
            "evictable": self.tree.evictable_size(),
            "protected": self.tree.protected_size(),
        }

    def leave_free(self, count: int) -> None:
        """Shrink the pool until exactly ``count`` tokens, whole pages, are free."""
        pages = count // self.config["page_size"]
        if pages > len(self.allocator.free_pages):
            raise UnsupportedError("the pool cannot grow that far")
        removed = self.allocator.available_size() - pages * self.config["page_size"]
        self.allocator.free_pages = self.allocator.free_pages[:pages]
        self.allocator.size -= removed

    # -- the scheduler ---------------------------------------------------------------------------------

    def build_scheduler(self) -> None:
        """Make a scheduler that has just started. Raises what SGLang raises for an impossible config."""
        config = self.config
        scheduler = Scheduler.__new__(Scheduler)
        self.scheduler = scheduler
        nothing = SimpleNamespace
        for name, value in {
            "schedule_policy": config["schedule_policy"],
            "enable_priority_scheduling": config["enable_priority_scheduling"],
            "schedule_low_priority_values_first": config["schedule_low_priority_values_first"],
            "abort_on_priority_when_disabled": False,
            "priority_scheduling_preemption_threshold": config["priority_scheduling_preemption_threshold"],
            "page_size": config["page_size"],
            "max_prefill_tokens": config["max_prefill_tokens"],
            "max_running_requests": config["max_running_requests"],
            "max_queued_requests": None,
            "truncation_align_size": config["truncation_align_size"],
            "processed_tokens_counter": 0,
            "enable_overlap": True,
            "enable_lora": False,
            "lora_drainer": None,
            "enable_hierarchical_cache": False,
            "enable_hicache_storage": False,
            "enable_lmcache": False,
            "enable_unified_cache_external_linker": False,
            "enable_hisparse": False,
            "hisparse_coordinator": None,
            "decode_offload_manager": None,
            "is_hybrid_swa": False,
            "is_hybrid_ssm": False,
            "full_tokens_per_layer": None,
            "swa_tokens_per_layer": None,
            "kv_shard_widening": 1,
            "dllm_config": None,
            "dynamic_chunk_sizer": None,
            "disaggregation_mode": DisaggregationMode.NULL,
            "spec_algorithm": SpeculativeAlgorithm.from_string(None),
            "require_mlp_sync": False,
            "scheduler_stage_metrics": None,
            "metrics_collector": None,
            "device": DEVICE,
            "model_config": nothing(
                vocab_size=VOCAB_SIZE,
                is_encoder_decoder=False,
                is_multimodal=False,
                _resolved_model_impl=None,
                _resolved_model_arch="LlamaForCausalLM",
            ),
            "tp_worker": nothing(model_runner=nothing(attn_backend=None, prefill_aware_swa=False)),
            "metrics_reporter": nothing(enable_metrics=False),
            "grammar_manager": nothing(has_waiting_grammars=lambda: False),
            "beam_coordinator": nothing(pending_member_rows=lambda _: 0),
            "load_inquirer": nothing(_get_num_pending_tokens=lambda **_: 0),
            "ngram_embedding_manager": nothing(prepare_for_forward=lambda batch, **_: batch),
            "dp_attn_adapter": nothing(
                maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
                maybe_convert_decode_to_extend=lambda batch: batch,
            ),
            "tree_cache": self.tree,
            "req_to_token_pool": self.req_to_token_pool,
            "token_to_kv_pool_allocator": self.allocator,
        }.items():
            setattr(scheduler, name, value)
        threshold = resolve_min_free_slots(config["min_free_slots_delay"], config["max_running_requests"])
        scheduler.min_free_slots_delayer = None if threshold is None else MinFreeSlotsDelayer(min_free_slots=threshold)
        scheduler.init_running_status()
        scheduler.init_chunked_prefill()
        scheduler.init_schedule_policy()
        scheduler.check_truncation_align_fits_chunk()
        scheduler.new_token_ratio_tracker.current = config["new_token_ratio"]
        self._wrap()

    def _wrap(self) -> None:
        """Put recorders around the calls of a pass whose arguments or results are wanted."""
        scheduler = self.scheduler
        policy = scheduler.policy
        run_pass: Callable[..., Any] = scheduler.get_new_batch_prefill
        calc_priority: Callable[..., None] = policy.calc_priority
        determine_policy: Callable[..., Any] = policy._determine_active_policy
        prefix_matches: Callable[..., set[str]] = policy._compute_prefix_matches
        allocatable: Callable[..., int] = scheduler.get_num_allocatable_reqs

        def traced_pass(running_batch: ScheduleBatch) -> Any:
            self.trace.pool_before = self.pool()
            self.trace.evicted = 0
            random.seed(self.config["random_seed"])
            return run_pass(running_batch)

        def traced_calc_priority(waiting_queue: list[Req], *args: Any, **kwargs: Any) -> None:
            self.trace.matches = {req.rid: (0, 0) for req in waiting_queue}
            with self._recording_matches():
                calc_priority(waiting_queue, *args, **kwargs)
            self.trace.order = [req.rid for req in waiting_queue]

        def traced_determine_policy(waiting_queue: list[Req]) -> Any:
            active = determine_policy(waiting_queue)
            self.trace.active_policy = active.value
            return active

        def traced_prefix_matches(*args: Any) -> set[str]:
            held_back = prefix_matches(*args)
            self.trace.deprioritized = sorted(held_back)
            return held_back

        def traced_allocatable(*args: Any, **kwargs: Any) -> int:
            self.trace.allocatable_asked = True
            return allocatable(*args, **kwargs)

        scheduler.get_new_batch_prefill = traced_pass
        policy.calc_priority = traced_calc_priority
        policy._determine_active_policy = traced_determine_policy
        policy._compute_prefix_matches = traced_prefix_matches
        scheduler.get_num_allocatable_reqs = traced_allocatable
        scheduler.get_prefill_adder_class = lambda: tracing_adder(self.trace)
        # Decode stands still between the passes of a scenario.
        scheduler.update_running_batch = lambda _: None
        if scheduler.min_free_slots_delayer is not None:
            self._wrap_min_free_slots(scheduler.min_free_slots_delayer)
        if scheduler.prefill_delayer is not None:
            self._wrap_delayer()

    def _wrap_min_free_slots(self, delayer: MinFreeSlotsDelayer) -> None:
        should_delay: Callable[..., bool] = delayer.should_delay

        def traced_should_delay(**kwargs: Any) -> bool:
            self.trace.slots_delayed = should_delay(**kwargs)
            return self.trace.slots_delayed

        delayer.should_delay = traced_should_delay

    def _wrap_delayer(self) -> None:
        engine = self

        class TracingExecutor(PrefillDelayerSinglePassExecutor):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                engine.trace.delayer_pass = self

            def finalize(self, **kwargs: Any) -> int:
                engine.trace.observed_bs = super().finalize(**kwargs)
                return engine.trace.observed_bs

        scheduler_module.PrefillDelayerSinglePassExecutor = TracingExecutor

    @contextlib.contextmanager
    def _recording_matches(self) -> Iterator[None]:
        match_kv_cache = policy_module.match_kv_cache

        def traced_match(req: Req, *args: Any, **kwargs: Any) -> Any:
            result = match_kv_cache(req, *args, **kwargs)
            self.trace.matches[req.rid] = (req.prefix_len, req.num_matched_prefix_tokens)
            return result

        policy_module.match_kv_cache = traced_match
        try:
            yield
        finally:
            policy_module.match_kv_cache = match_kv_cache

    def set_delayer(self, given: Json) -> list[list[int]]:
        """Put the prefill delayer's state in place; returns the other ranks' rows."""
        check_keys(given, ("skip_first", "delayed_count", "age_ms", "max_prefill_bs", "other_ranks"), "delayer")
        set_delayer_state(self.scheduler.prefill_delayer, given)
        self.scheduler.max_prefill_bs = given.get("max_prefill_bs", 0)
        return [rank_row(rank) for rank in given.get("other_ranks") or []]


def set_delayer_state(delayer: PrefillDelayer, given: Json) -> None:
    """State at the start: first wish still free, and a wait in progress."""
    delayer.skip_first_delayer = given.get("skip_first", True)
    if given.get("delayed_count") is not None:
        delayer._curr_state = delayer_module._State(
            delayed_count=given["delayed_count"], start_time=CLOCK() - given.get("age_ms", 0) / 1000
        )


def rank_row(rank: Json) -> list[int]:
    """Another rank's row in the gather."""
    check_keys(rank, RANK_FIELDS, "other_ranks")
    return [int(rank.get(name) or 0) for name in RANK_FIELDS]


# -- kind: pass -------------------------------------------------------------------------------------------


def run_pass(scenario: Json, config: Json) -> Json:
    """Build the state of a ``pass`` scenario, run it, and report."""
    queue = expand_queue(scenario)
    tokens = Tokens(scenario, queue)
    delayer = scenario.get("delayer") or {}
    passes = scenario.get("passes", 1)
    others = len(delayer.get("other_ranks") or [])
    ranks = data_parallel(1 + others, attention=others > 0)
    everyone = [*queue, *(scenario.get("running") or []), *filter(None, [scenario.get("chunked_req")])]
    longest = max(
        [64]
        + [sequence_length(tokens, request) for request in everyone]
        + [len(tokens.sequence(entry["seq"])) for entry in scenario.get("cache") or []]
    )
    CLOCK.now = START_TIME
    with ranks, configured(config):
        try:
            engine = Engine(config, tokens, longest + passes + 8)
            engine.build_scheduler()
        except ValueError as error:
            return {"error": {"type": "ValueError", "contains": first_clause(error)}}
        running_batch = build_state(engine, scenario, queue)
        rows = engine.set_delayer(delayer) if engine.scheduler.prefill_delayer else []
        with gathering(Gather(rows)):
            outcomes = run_steps(engine, running_batch, passes)
        result = {"passes": outcomes} if "passes" in scenario else outcomes[0]
        if "probe" in scenario and "error" not in outcomes[-1]:
            result["probe"] = [engine.match(entry).device_prefix_len for entry in scenario["probe"]]
        return result


def sequence_length(tokens: Tokens, request: Json) -> int:
    """Prompt and output tokens of a request."""
    output = request.get("output", 0)
    return len(tokens.sequence(request["input"])) + (
        output if isinstance(output, int) else len(tokens.sequence(output))
    )


def build_state(engine: Engine, scenario: Json, queue: list[Json]) -> ScheduleBatch:
    """Put cache, running requests, chunk, pool size and queue in place, in this order."""
    scheduler = engine.scheduler
    try:
        for entry in scenario.get("cache") or []:
            engine.insert(entry)
        running_batch = scheduler.running_batch
        for given in scenario.get("running") or []:
            batch = engine.start(given)
            if running_batch.is_empty():
                running_batch = batch
            else:
                running_batch.merge_batch(batch)
        if scenario.get("chunked_req"):
            engine.start_chunk(scenario["chunked_req"])
    except RuntimeError as error:
        raise UnsupportedError(f"the state does not fit: {str(error).splitlines()[0]}") from error
    if (pool := scenario.get("pool")) is not None:
        check_keys(pool, ("free",), "pool")
        engine.leave_free(pool["free"])
    scheduler.waiting_queue = [engine.waiting(given) for given in queue]
    scheduler.processed_tokens_counter = scenario.get("processed_tokens", 0)
    running_batch.batch_is_full = bool(scenario.get("batch_is_full", False))
    scheduler.max_total_num_tokens = engine.allocator.size
    scheduler.init_pool_stats_observer()
    return running_batch


def run_steps(engine: Engine, running_batch: ScheduleBatch, passes: int) -> list[Json]:
    """Run scheduler steps; after each, the prefill batch's tokens are generated."""
    scheduler = engine.scheduler
    last_batch: ScheduleBatch | None = None
    outcomes: list[Json] = []
    for number in range(passes):
        trace = engine.trace = PassTrace()
        before = running_batch
        try:
            if number == 0:
                plan = scheduler.get_new_batch_prefill(running_batch)
            else:
                plan = scheduler.get_next_batch_to_run(running_batch, last_batch)
        except RuntimeError as error:
            outcomes.append(failed_outcome(engine, before, error))
            if passes > 1:
                raise UnsupportedError("allocation failed and not all passes were run") from error
            break
        running_batch, last_batch = plan.running_batch, plan.batch_to_run
        outcomes.append(outcome(engine, running_batch, last_batch))
        if number + 1 == passes:
            break
        if trace.adder is not None and len(trace.adder.preempt_list) > 1:
            raise UnsupportedError("two preempted in one pass, not the last: their order is SGLang's hash order")
        if last_batch is not None:
            generate(engine, last_batch)
    return outcomes


def generate(engine: Engine, batch: ScheduleBatch) -> None:
    """What a forward pass and its result do: count the tokens, add one output token to each request."""
    engine.scheduler.processed_tokens_counter += batch.extend_num_tokens
    decoding = batch.decoding_reqs or []
    for req in batch.reqs:
        if req.finished() or req.is_retracted:
            continue
        if req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1
        elif any(req is other for other in decoding):
            req.output_ids.extend(engine.tokens.fresh(1))
            req.update_finish_state()
            if req.finished():
                release_kv_cache(req, engine.tree, checkpoint=True)
        else:
            engine.commit_token(req)


def outcome(engine: Engine, running_batch: ScheduleBatch, batch: ScheduleBatch | None) -> Json:
    """The outcome of a pass that ended normally."""
    scheduler, trace = engine.scheduler, engine.trace
    result = decisions(engine, running_batch)
    result["running_after"] = [req.rid for req in running_batch.reqs]
    if scheduler.is_mixed_chunk:
        decoding = batch.decoding_reqs if batch is not None else None
        result["mixed_decoding"] = [req.rid for req in decoding or []]
    result["pool_after"] = engine.pool()
    result["evicted"] = trace.evicted
    if (executor := trace.delayer_pass) is not None:
        delayer, verdict = scheduler.prefill_delayer, executor._result
        state = delayer._curr_state
        result["delayer"] = {
            "allow": verdict.output_allow,
            "reason": verdict.output_reason,
            "estimation": verdict.input_estimation,
            "delayed_count": None if state is None else state.delayed_count,
            "skip_first": delayer.skip_first_delayer,
            "observed_bs": trace.observed_bs,
        }
    return result


def failed_outcome(engine: Engine, running_batch: ScheduleBatch, error: RuntimeError) -> Json:
    """The outcome of a pass in which an allocation failed; any other failure has no place in the format."""
    if "out of memory" not in str(error).lower() or engine.trace.adder is None:
        raise error
    result = decisions(engine, running_batch)
    result["error"] = {"type": "RuntimeError", "contains": first_clause(error)}
    return result


def first_clause(error: Exception) -> str:
    """The part of a message that says what is wrong, without advice."""
    return re.split(r"[.;] ", str(error))[0]


def decisions(engine: Engine, running_batch: ScheduleBatch) -> Json:
    """The part of the outcome that is known before slots are allocated."""
    scheduler, trace = engine.scheduler, engine.trace
    result: Json = {"configured_policy": scheduler.policy.policy.value}
    if trace.order is not None:
        matched = {rid: trace.matches[rid][1] for rid in trace.order}
        result |= {
            "active_policy": trace.active_policy,
            "order": trace.order,
            "matched": matched,
            "prefix_len": {rid: trace.matches[rid][0] for rid in trace.order if trace.matches[rid][0] != matched[rid]},
            "deprioritized": trace.deprioritized,
            "budget": trace.budget,
            "chunk_limit": trace.chunk_limit,
            "admission": trace.admission,
        }
    adder = trace.adder
    # The preempted are requeued in the order of object hashes; by rid here, so that results can be repeated.
    preempted = sorted(req.rid for req in (adder.preempt_list if adder is not None else []))
    waiting = [req.rid for req in scheduler.waiting_queue if req.rid not in preempted]
    requeued = [rid for rid in preempted if len(scheduler.waiting_queue) > len(waiting)]
    result |= {
        "stop": stop_reason(trace, running_batch),
        "admitted": [
            {"rid": req.rid, "prefix_len": req.prefix_len, "extend_len": req.extend_len}
            for req in (adder.can_run_list if adder is not None else [])
        ],
        "chunked_req": scheduler.chunked_req.rid if scheduler.chunked_req is not None else None,
        "preempted": preempted,
        "batch_is_full": running_batch.batch_is_full,
        "waiting_after": waiting + requeued,
        "pool_before": trace.pool_before,
    }
    return result


def stop_reason(trace: PassTrace, running_batch: ScheduleBatch) -> str:
    """Why nobody else was looked at."""
    if trace.order is None:
        if trace.slots_delayed:
            return "not_started:min_free_slots_delay"
        if trace.allocatable_asked:
            return "not_started:no_slot"
        return "not_started:batch_is_full" if running_batch.batch_is_full else "not_started:idle"
    if trace.looking_at:
        return "no_slot"
    return trace.stop or "queue_end"


# -- kind: evict ------------------------------------------------------------------------------------------


def run_evict(scenario: Json, config: Json) -> Json:
    """Run an ``evict`` scenario."""
    tokens = Tokens(scenario)
    operations = ("insert", "touch", "lock", "probe", "evict", "sizes")
    longest = 64
    for op in scenario["ops"]:
        check_keys(op, (*operations, "extra_key", "cache_salt", "priority"), "ops")
        sequence: list[Any] = next((op[name] for name in operations[:4] if name in op), [])
        longest = max(longest, len(tokens.sequence(sequence)))
    results: list[Json] = []
    CLOCK.now = START_TIME
    with configured(config):
        engine = Engine(config, tokens, longest + 8)
        engine.build_scheduler()
        for op in scenario["ops"]:
            name = next(name for name in operations if name in op)
            entry = {key: op[key] for key in ("extra_key", "cache_salt", "priority") if key in op}
            if name == "evict":
                result = engine.tree.evict(EvictParams(num_tokens=op["evict"]))
                results.append({"evicted": result.num_tokens_evicted})
            elif name == "sizes":
                sizes = engine.pool()
                results.append({"evictable": sizes["evictable"], "protected": sizes["protected"]})
            elif name == "insert":
                engine.insert({"seq": op["insert"], **entry})
            else:
                match = engine.match({"seq": op[name], **entry})
                if name == "lock":
                    engine.tree.lock(match.last_device_node)
                elif name == "probe":
                    results.append({"matched": match.device_prefix_len})
    return {"results": results}


# -- kind: delayer ----------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One data-parallel rank's delayer."""

    delayer: PrefillDelayer
    recent: RecentPrefillBatchSizeTracker


DELAYER_RANK_KEYS = {
    "prefillable",
    "token_usage",
    "running_batch",
    "waiting_queue_len",
    "max_prefill_bs",
    "max_running_requests",
    "actual_prefill_bs",
    "calls",
    "now",
}


def run_delayer(scenario: Json, config: Json) -> Json:
    """Run a ``delayer`` scenario: every rank's real ``PrefillDelayer`` with the gather done here."""
    given = scenario.get("delayer") or {}
    check_keys(given, ("skip_first", "delayed_count", "age_ms"), "delayer")
    count = config["dp_size"] if config["enable_dp_attention"] else 1
    outcomes: list[Json] = []
    with data_parallel(config["dp_size"], attention=config["enable_dp_attention"]), configured(config):
        CLOCK.now = 0.0
        ranks = []
        for _ in range(count):
            delayer = PrefillDelayer(
                max_delay_passes=config["prefill_delayer_max_delay_passes"],
                token_usage_low_watermark=config["prefill_delayer_token_usage_low_watermark"],
            )
            set_delayer_state(delayer, given)
            window = envs.SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE.get()
            ranks.append(Rank(delayer, RecentPrefillBatchSizeTracker(window_size=window)))
        for step in scenario["passes"]:
            check_keys(step, ("now", "repeat", "ranks"), "passes")
            outcomes.extend(delayer_pass(ranks, step, config) for _ in range(step.get("repeat", 1)))
    return {"passes": outcomes}


def delayer_pass(ranks: list[Rank], step: Json, config: Json) -> Json:
    """One pass on all ranks: first each rank's row is captured, then each decides on all of them."""
    if len(step["ranks"]) != len(ranks):
        raise UnsupportedError(f"{len(step['ranks'])} ranks given, {len(ranks)} expected")
    executors = []
    rows = []
    for rank, given in zip(ranks, step["ranks"], strict=True):
        check_keys(given, DELAYER_RANK_KEYS, "ranks")
        executor = PrefillDelayerSinglePassExecutor(rank.delayer, token_usage=given.get("token_usage", 1.0))
        executors.append(executor)
        CLOCK.now = float(given.get("now", step.get("now", 0)))
        with gathering(Capture()):
            try:
                ask(executor, rank, given, config)
            except _Gathered as sent:
                rows.append(sent.row)
    observed = []
    with gathering(lambda output, *_, **__: output.copy_(torch.tensor(rows).flatten())):
        for rank, executor, given in zip(ranks, executors, step["ranks"], strict=True):
            CLOCK.now = float(given.get("now", step.get("now", 0)))
            for _ in range(given.get("calls", 1)):
                ask(executor, rank, given, config)
            allowed = given.get("prefillable", False) and executor._result.output_allow
            size = executor.finalize(actual_prefill_bs=given.get("actual_prefill_bs", 0) if allowed else 0)
            observed.append(size)
            if size > 0:
                rank.recent.observe_attempt(size)
    verdicts = [executor._result for executor in executors]
    first, state = verdicts[0], ranks[0].delayer._curr_state
    return {
        "allow": first.output_allow,
        "reason": first.output_reason,
        "estimation": first.input_estimation,
        "num_prefillable": first.num_prefillable,
        "wait_forward_passes": first.wait_forward_passes,
        "wait_seconds": [rounded(verdict.wait_seconds) for verdict in verdicts],
        "delayed_count": None if state is None else state.delayed_count,
        "skip_first": ranks[0].delayer.skip_first_delayer,
        "observed_bs": observed,
        "max_prefill_bs": [rank.recent.max_prefill_bs for rank in ranks],
    }


def ask(executor: PrefillDelayerSinglePassExecutor, rank: Rank, given: Json, config: Json) -> None:
    """One rank's question whether it may prefill, as admission asks it, or as the end of a pass does."""
    if given.get("prefillable", False):
        executor.negotiate_should_allow_prefill(
            local_prefillable=True,
            running_batch=given.get("running_batch", 0),
            max_prefill_bs=given.get("max_prefill_bs", rank.recent.max_prefill_bs),
            max_running_requests=given.get("max_running_requests", config["max_running_requests"]),
            waiting_queue_len=given.get("waiting_queue_len", 0),
        )
    else:
        executor.negotiate_should_allow_prefill(local_prefillable=False)


# -- program ----------------------------------------------------------------------------------------------

RUNNERS: dict[str, Callable[[Json, Json], Json]] = {
    "pass": run_pass,
    "delayer": run_delayer,
    "evict": run_evict,
}


def run(scenario: Json) -> Json:
    """The outcome of one scenario, in the vocabulary of ``expect``."""
    kind = scenario["kind"]
    check_keys(scenario, TOP_KEYS | KIND_KEYS[kind], "scenario")
    given = scenario.get("config") or {}
    check_keys(given, CONFIG_DEFAULTS, "config")
    try:
        return RUNNERS[kind](scenario, CONFIG_DEFAULTS | given)
    finally:
        CLOCK.now = None


def read_scenarios(path: str) -> Iterator[Json]:
    """The scenarios of a file, in order."""
    if path == "-":
        yield from (json.loads(line) for line in sys.stdin if line.strip())
        return
    data = Path(path).read_bytes()
    name = path
    if name.endswith(".gz"):
        data, name = gzip.decompress(data), name.removesuffix(".gz")
    if name.endswith((".yaml", ".yml")):
        import yaml

        yield from (document for document in yaml.safe_load_all(io.BytesIO(data)) if document)
    else:
        yield from (json.loads(line) for line in data.splitlines() if line.strip())


def claim_stdout() -> TextIO:
    """Standard output for results only: whatever SGLang prints goes to standard error."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return results


def publish() -> None:
    """Install a configuration that lets the scheduler's classes run on a CPU."""
    logging.disable(logging.CRITICAL)
    get_context().override_server_args(attention_backend="torch_native", device=DEVICE).install()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run scheduling scenarios through the real SGLang classes.")
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl, .yaml, optionally .gz; - for stdin")
    parser.add_argument("--fill", action="store_true", help="write whole scenarios, with expect filled in")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of unsupported scenarios on stderr")
    args = parser.parse_args()
    results = claim_stdout()
    publish()
    unsupported = 0
    for path in args.files:
        for scenario in read_scenarios(path):
            if scenario.get("kind") not in KINDS:
                continue
            line: Json = {"id": scenario["id"]}
            try:
                line["expect"] = run(scenario)
            except Exception as error:
                if args.verbose:
                    traceback.print_exc()
                line["unsupported"] = f"{type(error).__name__}: {error}".splitlines()[0]
                unsupported += 1
                print(f"{scenario['id']}: {line['unsupported']}", file=sys.stderr)
            if not args.fill:
                print(json.dumps(line), file=results, flush=True)
            elif "expect" in line:
                print(json.dumps(scenario | line, separators=(",", ":")), file=results, flush=True)
    if unsupported:
        print(f"{unsupported} scenarios unsupported", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
