"""`schedscope serve`: the engine behind an HTTP server, with SGLang's option names."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Literal

from schedscope.cli.options import LAST_PORT, Settings, Switch, parse_settings
from schedscope.cli.output import errors
from schedscope.engine.config import COMPAT, SchedulerConfig
from schedscope.engine.errors import ConfigError, ServerError
from schedscope.engine.ordering import POLICIES, resolve_policy

PRIORITY_POLICIES = ("fcfs", "lof", "priority")


def serve(
    *,
    model_path: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    device: str | None = None,
    dtype: str | None = None,
    schedule_policy: str = "fcfs",
    page_size: int = 1,
    max_total_tokens: int = 65_536,
    max_running_requests: int = 256,
    max_queued_requests: int | None = None,
    max_prefill_tokens: int = 16_384,
    chunked_prefill_size: int = 8_192,
    prefill_max_requests: int | None = None,
    enable_mixed_chunk: Switch = False,
    enable_priority_scheduling: Switch = False,
    schedule_low_priority_values_first: Switch = False,
    priority_scheduling_preemption_threshold: int = 10,
    disable_priority_preemption: Switch = False,
    abort_on_priority_when_disabled: Switch = False,
    min_free_slots_delay: int | None = None,
    schedule_conservativeness: float = 1.0,
    retraction_policy: Literal["length", "priority"] = "length",
    disable_radix_cache: Switch = False,
    radix_eviction_policy: str = "lru",
    enable_prefill_delayer: Switch = False,
    prefill_delayer_max_delay_passes: int = 30,
    prefill_delayer_token_usage_low_watermark: float | None = None,
    prefill_delayer_queue_min_ratio: float | None = None,
    prefill_delayer_max_delay_ms: float = 5_000.0,
    dp_size: int = 1,
    enable_dp_attention: Switch = False,
    req_waiting_timeout: float | None = None,
    random_seed: int = 0,
    compat: str = COMPAT,
    setting: Settings = None,
) -> int:
    """Serve a model over HTTP. Recorded when started as `schedscope record -- serve ...`.

    Parameters
    ----------
    model_path
        Checkpoint folder of the Llama or Qwen family; without it a small built-in model with random weights.
    host
        Address to listen on.
    port
        Port to listen on; 0 takes a free one.
    device
        cpu or cuda; by default CUDA where there is one.
    dtype
        float32, bfloat16 or float16; by default the checkpoint's, float32 on the CPU.
    schedule_policy
        lpm, dfs-weight, hrrn, shortest-prefill-first, fcfs, lof, random, routing-key; or schedscope's own
        priority (priority, then longest match, then arrival).
    page_size
        Tokens in a page of the KV pool.
    max_total_tokens
        Size of the KV pool in tokens.
    max_running_requests
        Requests that may run at once.
    max_queued_requests
        Requests that may wait; more are refused.
    max_prefill_tokens
        Prefill tokens in a pass.
    chunked_prefill_size
        Longest piece of a prompt in a pass; -1 never cuts prompts.
    prefill_max_requests
        Requests that may join in a pass.
    enable_mixed_chunk
        Decode in the forward of a chunked prefill.
    enable_priority_scheduling
        Serve by the requests' priority (with fcfs, lof or priority).
    schedule_low_priority_values_first
        Small numbers are urgent.
    priority_scheduling_preemption_threshold
        A waiting request preempts a running one whose priority is behind by more than this.
    disable_priority_preemption
        Priority orders the queue, but preempts nobody.
    abort_on_priority_when_disabled
        Refuse requests with a priority while priority scheduling is off.
    min_free_slots_delay
        While others run, new requests wait for so many free slots.
    schedule_conservativeness
        Scales the estimate of outputs still to come.
    retraction_policy
        Who loses memory first: the least output, or the lowest priority.
    disable_radix_cache
        No prefix cache.
    radix_eviction_policy
        lru, lfu, fifo, mru, filo, priority or slru.
    enable_prefill_delayer
        Hold prefills back for fuller batches.
    prefill_delayer_max_delay_passes
        Passes it may hold back in a row, plus one.
    prefill_delayer_token_usage_low_watermark
        Below this used share of the pool it never holds back.
    prefill_delayer_queue_min_ratio
        Also hold back while fewer wait than this share of the running requests.
    prefill_delayer_max_delay_ms
        But not longer than this.
    dp_size
        Data-parallel ranks, each with a scheduler and a KV pool of its own.
    enable_dp_attention
        The ranks step together and share the prefill delayer's verdict. All limits are per rank.
    req_waiting_timeout
        Seconds in the queue after which a request is aborted.
    random_seed
        Seed of the random policy, of sampling, and of the built-in model's weights.
    compat
        Whose decisions to make; sglang-0.5.23 is all there is.
    setting
        `name=value`: any other scheduler setting, such as in_batch_prefix_caching_check_threshold.
    """
    config = SchedulerConfig(
        schedule_policy=schedule_policy,
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        max_running_requests=max_running_requests,
        max_queued_requests=max_queued_requests,
        max_prefill_tokens=max_prefill_tokens,
        chunked_prefill_size=chunked_prefill_size if chunked_prefill_size != -1 else None,
        prefill_max_requests=prefill_max_requests,
        enable_mixed_chunk=enable_mixed_chunk,
        enable_priority_scheduling=enable_priority_scheduling,
        schedule_low_priority_values_first=schedule_low_priority_values_first,
        priority_scheduling_preemption_threshold=priority_scheduling_preemption_threshold,
        disable_priority_preemption=disable_priority_preemption,
        abort_on_priority_when_disabled=abort_on_priority_when_disabled,
        min_free_slots_delay=min_free_slots_delay,
        schedule_conservativeness=schedule_conservativeness,
        retraction_policy=retraction_policy,
        disable_radix_cache=disable_radix_cache,
        radix_eviction_policy=radix_eviction_policy,
        enable_prefill_delayer=enable_prefill_delayer,
        prefill_delayer_max_delay_passes=prefill_delayer_max_delay_passes,
        prefill_delayer_token_usage_low_watermark=prefill_delayer_token_usage_low_watermark,
        prefill_delayer_queue_min_ratio=prefill_delayer_queue_min_ratio,
        prefill_delayer_max_delay_ms=prefill_delayer_max_delay_ms,
        dp_size=dp_size,
        enable_dp_attention=enable_dp_attention,
        req_waiting_timeout=req_waiting_timeout,
        random_seed=random_seed,
        compat=compat,
    ).with_settings(parse_settings(setting or []))
    check_servable(config)
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"port={port}: must be between 0 and {LAST_PORT}")
    return _run(config, model_path, device, dtype, host, port)


def check_servable(config: SchedulerConfig) -> None:
    """Refuse settings under which nothing would ever run. Raises ConfigError."""
    if config.schedule_policy not in POLICIES:
        raise ConfigError(f"schedule_policy={config.schedule_policy}: choose from {', '.join(POLICIES)}")
    resolve_policy(config)
    if not config.disable_overlap_schedule:
        raise ConfigError("disable_overlap_schedule=false: this engine takes in each batch before it decides the next")
    if config.prefill_max_requests == 0:
        raise ConfigError("prefill_max_requests=0: no request would ever be admitted; leave it out for no limit")
    if config.enable_priority_scheduling and config.schedule_policy not in PRIORITY_POLICIES:
        raise ConfigError(
            f"enable_priority_scheduling works with {', '.join(PRIORITY_POLICIES)}, not with {config.schedule_policy}"
        )
    if config.retraction_policy == "priority" and not config.enable_priority_scheduling:
        raise ConfigError("retraction_policy=priority needs enable_priority_scheduling")
    chunk = config.chunked_prefill_size
    if chunk is not None and chunk % config.page_size:
        raise ConfigError(f"chunked_prefill_size={chunk}: not a multiple of page_size={config.page_size}")


def _run(
    config: SchedulerConfig, model_path: Path | None, device: str | None, dtype: str | None, host: str, port: int
) -> int:
    from schedscope.engine.model import load_model
    from schedscope.engine.server import Serving, build_app, serve_app
    from schedscope.engine.serving import ServingEngine
    from schedscope.engine.tokenizer import load_tokenizer
    from schedscope.recorder.hello import Description, Source
    from schedscope.recorder.manifest import own_version
    from schedscope.recorder.sink import open_sink
    from schedscope.recorder.standalone import ensure_companion
    from schedscope.recorder.tracer import RunTracer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    path = None if model_path is None else str(model_path)
    model = load_model(path, device=device, dtype=dtype, seed=config.random_seed)
    ensure_companion()
    tracers: list[RunTracer | None] = []
    for rank in range(config.dp_size):
        described = Description(source=Source("engine", own_version()), config=config.to_dict(), model=model.name)
        sink = open_sink(rank, described)
        tracers.append(None if sink is None else RunTracer(sink))
    engine = ServingEngine(config, model, load_tokenizer(path), tracers=tracers)
    for rank_loop, tracer in zip(engine.ranks, tracers, strict=True):
        if tracer is not None:
            tracer.attach(rank_loop.scheduler)
    engine.start()

    def ready(serving: Serving) -> None:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, serving.stop)
        errors.print(f"Serving {model.name} on {serving.url} with {config.schedule_policy}; Ctrl-C ends it.")

    try:
        asyncio.run(serve_app(build_app(engine), host, port, ready))
    finally:
        engine.stop()
        for tracer in tracers:
            if tracer is not None:
                tracer.close()
    if engine.failure is not None:
        raise ServerError(f"the scheduler failed while serving: {engine.failure}")
    return 0
