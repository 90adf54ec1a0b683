"""Run whole workloads through the loop of the real SGLang 0.5.23 scheduler, on a CPU and without a model.

This is a test oracle, like ``run_sglang.py``, whose construction of the scheduler it uses.  It turns the loop of
``event_loop_normal`` (input, ``get_next_batch_to_run``, forward, ``process_batch_result``, idle) or, where the
configuration has ``disable_overlap_schedule: false``, that of ``event_loop_overlap``, in which the results of a batch
are processed after the next one was decided.  All that schedules, retracts, finishes, frees or caches is SGLang's own;
only what needs a model or a socket is replaced: the output tokens are given by the workload, and of ``run_batch`` the
token counter remains.

Usage, with the Python of an environment that has ``sglang==0.5.23`` and a CPU build of torch::

    PYTHONPATH=stubs python loop_sglang.py < workloads.jsonl > traces.jsonl

With ``--watch FOLDER`` schedscope's plugin records each workload as it would record a server; schedscope must then be
installed beside SGLang.

Each line of input is a workload; each gives one line ``{"id": ..., "steps": [...]}``, written before the next one
is read, so that a process can be kept and asked.  A workload is::

    {"id": "w1", "config": {...}, "steps": 300, "events": [
        {"step": 0, "arrive": {"rid": "r01", "prompt": [5, 6], "output": [7, 8, 2], "max_new_tokens": 8, ...}},
        {"step": 9, "abort": "r01"},
        {"step": 20, "flush": true}]}

``output`` holds the tokens that the model would give, ``EOS`` being the end of sequence.  ``config`` is that of the
conformance format and ``LOOP_DEFAULTS``.  What a step has to say is in ``observe``; a step in which SGLang's server
would die has ``error`` and is the last one; a trace also ends when nothing is left to do.  Times are not compared:
every request that joins the queue gets a later one.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import run_sglang as oracle  # first: it replaces the clock
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
    ScheduleBatch,
)
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

Json = dict[str, Any]

EOS = 2
STEP_S = 1.0
DECIDE_S = 1e-3
"""From the start of a step, when input is taken, to the decision."""
TICK_S = 1e-6
"""Between two requests that join the queue in one step."""
KINDS = {FINISH_ABORT: "abort", FINISH_LENGTH: "length", FINISH_MATCHED_TOKEN: "stop"}

LOOP_DEFAULTS: Json = {
    "max_queued_requests": None,
    "req_waiting_timeout": None,
    "schedule_conservativeness": 1.0,
    "retraction_policy": "length",
    "init_new_token_ratio": 0.7,
    "min_new_token_ratio_factor": 0.14,
    "new_token_ratio_decay_steps": 600,
    "retract_decode_steps": 20,
    "abort_on_priority_when_disabled": False,
    "disable_overlap_schedule": True,
}
"""The config keys that matter only to a loop, with their defaults."""


@contextlib.contextmanager
def configured(config: Json) -> Iterator[None]:
    """Make ``config`` (complete) SGLang's configuration."""
    with (
        oracle.configured(config),
        envs.SGLANG_INIT_NEW_TOKEN_RATIO.override(config["init_new_token_ratio"]),
        envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.override(config["min_new_token_ratio_factor"]),
        envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.override(config["new_token_ratio_decay_steps"]),
        envs.SGLANG_RETRACT_DECODE_STEPS.override(config["retract_decode_steps"]),
        envs.SGLANG_REQ_WAITING_TIMEOUT.override(config["req_waiting_timeout"] or -1.0),
    ):
        get_context().override(
            "workload",
            schedule_conservativeness=config["schedule_conservativeness"],
            retraction_policy=config["retraction_policy"],
        )
        yield


class Nothing:
    """Stands in for what reports to the outside: any method of it does nothing, any number in it is 0."""

    num_generated_tokens = 0
    forward_ct_decode = 0
    num_retracted_reqs = 0
    enable_metrics = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Loop:
    """A scheduler that has just started, and the loop around it."""

    def __init__(self, workload: Json, config: Json) -> None:
        self.config = config
        self.outputs: dict[str, list[int]] = {}
        arrivals = [event["arrive"] for event in workload["events"] if "arrive" in event]
        longest = max((len(one["prompt"]) + len(one["output"]) for one in arrivals), default=0)
        self.engine = oracle.Engine(config, oracle.Tokens({}), max(longest, 64) + 8)
        self.engine.build_scheduler()
        self.scheduler = scheduler = self.engine.scheduler
        # The oracle of single passes has wrapped these; here they are the real ones.
        for name in ("get_new_batch_prefill", "update_running_batch", "get_prefill_adder_class"):
            delattr(scheduler, name)
        scheduler.enable_overlap = scheduler.enable_skip_finishing_decode = not config["disable_overlap_schedule"]
        scheduler.result_queue = deque()
        scheduler.max_queued_requests = config["max_queued_requests"]
        scheduler.abort_on_priority_when_disabled = config["abort_on_priority_when_disabled"]
        scheduler.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        scheduler.max_total_num_tokens = self.engine.allocator.size
        scheduler.init_pool_stats_observer()
        scheduler.mm_receiver = None
        scheduler.draft_worker = None
        scheduler.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        scheduler.grammar_manager = SimpleNamespace(
            has_waiting_grammars=lambda: False, abort_requests=lambda _: None, grammar_queue=[], clear=lambda: None
        )
        scheduler.metrics_reporter = Nothing()
        scheduler.processor = self._processor()
        scheduler.loop = self
        self._watch()
        random.seed(config["random_seed"])

    def _processor(self) -> SchedulerBatchResultProcessor:
        scheduler = self.scheduler
        return SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=scheduler.disaggregation_mode,
            enable_overlap=scheduler.enable_overlap,
            enable_overlap_mlx=False,
            model_config=SimpleNamespace(self_opened_think_start_ids=None, think_end_ids=None),
            token_to_kv_pool_allocator=self.engine.allocator,
            tree_cache=self.engine.tree,
            hisparse_coordinator=None,
            req_to_token_pool=self.engine.req_to_token_pool,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=scheduler.metrics_reporter,
            draft_worker=None,
            model_worker=None,
            logprob_result_processor=None,
            output_streamer=Nothing(),
            beam_coordinator=scheduler.beam_coordinator,
            abort_request=scheduler.abort_request,
        )

    def _watch(self) -> None:
        """Note who is preempted, retracted and turned away."""
        scheduler, loop = self.scheduler, self
        self.preempted: list[str] = []
        self.retracted: list[str] = []
        self.ended: list[str] = []
        scheduler.beam_coordinator.retire_group = lambda _: None
        add = scheduler._add_request_to_queue

        def watched_add(req: Req, is_retracted: bool = False) -> None:
            assert oracle.CLOCK.now is not None
            oracle.CLOCK.now += TICK_S
            if is_retracted:
                loop.retracted.append(req.rid)
            add(req, is_retracted=is_retracted)

        class Adder(PrefillAdder):  # type: ignore[misc]
            """Preempted requests come in the order of a set of objects; here in that of the running batch."""

            def preempt_to_schedule(self, req: Req) -> bool:
                order = list(self.running_batch.reqs)
                before = len(self.preempt_list)
                done = bool(super().preempt_to_schedule(req))
                victims = sorted(self.preempt_list[before:], key=order.index)
                self.preempt_list[before:] = victims
                loop.preempted += [victim.rid for victim in victims]
                return done

        scheduler._add_request_to_queue = watched_add
        scheduler.get_prefill_adder_class = lambda: Adder

    # -- a step --------------------------------------------------------------------------------------------

    def step(self, number: int, events: list[Json]) -> Json:
        """One turn of the loop."""
        scheduler = self.scheduler
        self.preempted, self.retracted, self.ended = [], [], []
        oracle.CLOCK.now = oracle.START_TIME + number * STEP_S
        timeouts = scheduler._poll_timeout_aborts()
        flushed = [self._take(event) for event in events]
        for timeout in timeouts:
            scheduler.abort_request(timeout)
        oracle.CLOCK.now = oracle.START_TIME + number * STEP_S + DECIDE_S
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        seen = self.observe(batch)
        seen["flushed"] = [done for done in flushed if done is not None]
        finished: list[Json] = []
        if batch:
            if batch.extend_num_tokens:
                scheduler.processed_tokens_counter += batch.extend_num_tokens
            batch.input_ids = None
            scheduler.result_queue.append((batch.copy() if scheduler.enable_overlap else batch, None))
        if scheduler.last_batch if scheduler.enable_overlap else batch:
            finished = self._process(scheduler.result_queue.popleft()[0])
        elif not batch and scheduler.is_fully_idle():
            scheduler.new_token_ratio_tracker.reset()
        scheduler.last_batch = batch
        seen |= {
            "finished": finished,
            "processed_tokens": scheduler.processed_tokens_counter,
            "ratio_after": scheduler.new_token_ratio_tracker.current,
            "pool_after": self.engine.pool(),
        }
        return seen

    def _take(self, event: Json) -> bool | None:
        assert oracle.CLOCK.now is not None
        oracle.CLOCK.now += TICK_S
        if "arrive" in event:
            given = event["arrive"]
            self.outputs[given["rid"]] = given["output"]
            self.scheduler._add_request_to_queue(request(given))
        elif "abort" in event:
            self.scheduler.abort_request(AbortReq(rid=event["abort"]))
        else:
            return bool(self.scheduler.flush_cache())
        return None

    def flush(self) -> bool:
        """``flush_cache`` without the parts that reach for the device."""
        scheduler = self.scheduler
        if not scheduler.is_fully_idle():
            return False
        scheduler.last_batch = None
        self.engine.tree.reset()
        self.engine.req_to_token_pool.clear()
        self.engine.allocator.clear()
        return True

    def _process(self, batch: ScheduleBatch) -> list[Json]:
        """A forward's tokens and what follows from them. Returns who has finished, how, after how many tokens."""
        tokens = []
        for req in batch.reqs:
            output = self.outputs[req.rid]
            tokens.append(output[min(len(req.output_ids), len(output) - 1)])
        result = GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))
        unfinished = [req for req in batch.reqs if not req.finished()]
        self.scheduler.process_batch_result(batch, result)
        return [
            {"rid": req.rid, "kind": KINDS[type(req.finished_reason)], "tokens": len(req.output_ids)}
            for req in unfinished
            if req.finished()
        ]

    def observe(self, batch: ScheduleBatch | None) -> Json:
        """What was decided, before the forward."""
        scheduler = self.scheduler
        kind, members = "none", []
        if batch:
            mode = batch.forward_mode
            kind = "decode" if mode.is_decode() else "mixed" if mode.is_mixed() else "prefill"
            if kind == "decode":
                ends = batch.seq_lens_cpu.tolist()
                spans = [(end - 1, end) for end in ends]
            else:
                spans = [(p, p + n) for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
            members = [[req.rid, *span] for req, span in zip(batch.reqs, spans, strict=True)]
        return {
            "kind": kind,
            "members": members,
            "queue": [req.rid for req in scheduler.waiting_queue],
            "running": [req.rid for req in scheduler.running_batch.reqs],
            "chunked": scheduler.chunked_req.rid if scheduler.chunked_req is not None else None,
            "batch_is_full": scheduler.running_batch.batch_is_full,
            "ratio": scheduler.new_token_ratio_tracker.current,
            "pool": self.engine.pool(),
            "free_rows": self.engine.req_to_token_pool.available_size(),
            "retracted": self.retracted,
            "preempted": self.preempted,
            "ended": self.ended,
        }


def _told(scheduler: Scheduler, abort_req: AbortReq, req: Req) -> None:
    del abort_req
    scheduler.loop.ended.append(req.rid)


def _flushed(scheduler: Scheduler, empty_cache: bool = True) -> bool:
    del empty_cache
    return bool(scheduler.loop.flush())


def _processed(scheduler: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    if batch.forward_mode.is_decode():
        scheduler.processor.process_batch_result_decode(batch, result)
    else:
        scheduler.processor.process_batch_result_prefill(batch, result)


# Of these three only the parts that need neither a socket nor a device.
Scheduler.send_abort_output = _told
Scheduler.flush_cache = _flushed
Scheduler.process_batch_result = _processed


class Watch:
    """schedscope's plugin, on: every workload is recorded into a run of its own below a folder."""

    def __init__(self, folder: str) -> None:
        from schedscope.recorder.sglang_hooks import register, unapplied
        from schedscope.recorder.sglang_plugin import GUARD
        from sglang.srt.plugins.hook_registry import HookRegistry

        self.folder, self.guard = folder, GUARD
        missing = register(GUARD, lambda _: None)
        HookRegistry.apply_hooks()
        assert not missing | unapplied(), (missing, unapplied())

    @contextlib.contextmanager
    def watching(self, name: str, scheduler: Scheduler) -> Iterator[None]:
        """Record what a scheduler does."""
        from schedscope.recorder.direct_sink import DirectSink
        from schedscope.recorder.hello import Description, Detail, Source
        from schedscope.recorder.manifest import create_run
        from schedscope.recorder.sglang_config import read_config
        from schedscope.recorder.sglang_observer import Observer

        config = read_config(scheduler)
        described = Description(source=Source(kind="sglang", version="0.5.23"), config=config.to_dict())
        run = create_run(self.folder, name)
        observer = self.guard.observer = Observer(scheduler, config, DirectSink(run, 0, described, detail=Detail()))
        try:
            yield
            assert self.guard.observer is observer, "the observer failed"
        finally:
            self.guard.observer = None
            observer.close()


def request(given: Json) -> Req:
    """A request as the scheduler makes it of its input."""
    sampling = SamplingParams(max_new_tokens=given["max_new_tokens"], ignore_eos=given.get("ignore_eos", False))
    sampling.normalize(None)
    return Req(
        rid=given["rid"],
        origin_input_text="",
        origin_input_ids=array("q", given["prompt"]),
        sampling_params=sampling,
        eos_token_ids={EOS},
        vocab_size=oracle.VOCAB_SIZE,
        **{key: given.get(key) for key in ("priority", "extra_key", "routing_key", "cache_salt")},
    )


def run(workload: Json, watch: Watch | None = None) -> Json:
    """The trace of one workload."""
    config = oracle.CONFIG_DEFAULTS | LOOP_DEFAULTS | workload["config"]
    oracle.check_keys(workload["config"], oracle.CONFIG_DEFAULTS | LOOP_DEFAULTS, "config")
    steps: list[Json] = []
    with oracle.data_parallel(1, attention=False), configured(config):
        oracle.CLOCK.now = oracle.START_TIME
        try:
            with oracle.gathering(oracle.Gather([])), contextlib.ExitStack() as stack:
                loop = Loop(workload, config)
                if watch is not None:
                    stack.enter_context(watch.watching(workload["id"], loop.scheduler))
                last = max((event["step"] for event in workload["events"]), default=-1)
                for number in range(workload["steps"]):
                    if number > last + 1 and loop.scheduler.is_fully_idle():
                        break
                    events = [event for event in workload["events"] if event["step"] == number]
                    try:
                        steps.append(loop.step(number, events))
                    except RuntimeError as error:
                        steps.append({"error": oracle.first_clause(error)})
                        break
        finally:
            oracle.CLOCK.now = None
    return {"id": workload["id"], "steps": steps}


def main() -> int:
    """Command line."""
    results = oracle.claim_stdout()
    oracle.publish()
    watch = Watch(sys.argv[sys.argv.index("--watch") + 1]) if "--watch" in sys.argv else None
    for line in sys.stdin:
        workload = json.loads(line)
        started = time.monotonic()
        try:
            trace = run(workload, watch)
        except Exception as error:
            if "--verbose" in sys.argv:
                raise
            trace = {"id": workload["id"], "unsupported": f"{type(error).__name__}: {error}".splitlines()[0]}
        trace["seconds"] = round(time.monotonic() - started, 3)
        print(json.dumps(trace), file=results, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
