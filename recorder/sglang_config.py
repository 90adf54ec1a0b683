"""What an SGLang scheduler is configured to do, in the words of `SchedulerConfig`, and what of it we can't follow.

Everything is read from the scheduler itself once it is built, so that defaults SGLang computed are what is recorded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schedscope.engine.config import SchedulerConfig


class Gap(NamedTuple):
    """Something that this server does and a recording of it does not show."""

    feature: str
    """SGLang's name of it."""
    effect: str
    """What can't be re-run because of it."""

    def to_dict(self) -> dict[str, str]:
        """For the manifest."""
        return self._asdict()


def read_config(scheduler: Any) -> SchedulerConfig:
    """The configuration of a scheduler that was built. Raises what a scheduler of another version raises."""
    policy = importlib.import_module("sglang.srt.managers.schedule_policy")
    context = importlib.import_module("sglang.srt.runtime_context")
    envs = importlib.import_module("sglang.srt.environ").envs
    schedule, memory, parallel = context.get_schedule(), context.get_memory(), context.get_parallel()
    timeout = envs.SGLANG_REQ_WAITING_TIMEOUT.get()
    delay_ms = schedule.prefill_delayer_max_delay_ms
    settings: dict[str, Any] = {name: getattr(scheduler, name) for name in _SCHEDULER}
    settings |= {name: getattr(schedule, name) for name in _SCHEDULE}
    settings |= {
        "max_total_tokens": scheduler.token_to_kv_pool_allocator.size,
        "max_running_requests": parallel.pp_max_micro_batch_size,
        "enable_mixed_chunk": scheduler.is_mixed_chunk,
        "disable_overlap_schedule": not scheduler.enable_overlap,
        "disable_radix_cache": bool(scheduler.tree_cache.disable),
        "radix_force_miss": envs.SGLANG_RADIX_FORCE_MISS.get(),
        "radix_eviction_policy": memory.radix_eviction_policy.lower(),
        "in_batch_prefix_caching_check_threshold": policy.IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD,
        "in_batch_prefix_caching_deprioritize_threshold": policy.IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD,
        "waiting_queue_prefix_match_max": policy.WAITING_QUEUE_PREFIX_MATCH_MAX,
        "enable_waiting_prefix_refresh": envs.SGLANG_ENABLE_WAITING_PREFIX_REFRESH.get(),
        "waiting_prefix_refresh_interval": policy.WAITING_PREFIX_REFRESH_INTERVAL,
        "clip_max_new_tokens": policy.CLIP_MAX_NEW_TOKENS,
        "ignore_eos_reserve_tokens": policy.IGNORE_EOS_RESERVE_TOKENS,
        "init_new_token_ratio": envs.SGLANG_INIT_NEW_TOKEN_RATIO.get(),
        "min_new_token_ratio_factor": envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get(),
        "new_token_ratio_decay_steps": envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get(),
        "retract_decode_steps": envs.SGLANG_RETRACT_DECODE_STEPS.get(),
        "prefill_delayer_max_delay_ms": 5000.0 if delay_ms is None else float(delay_ms),
        "prefill_delayer_max_prefill_bs_window_size": envs.SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE.get(),
        "dp_size": parallel.num_dp_ranks,
        "enable_dp_attention": parallel.attn_dp_enabled,
        "req_waiting_timeout": timeout if timeout > 0 else None,
    }
    if settings["chunked_prefill_size"] is None:
        settings["enable_mixed_chunk"] = False
    return SchedulerConfig.from_dict(settings)


_SCHEDULER = (
    "schedule_policy",
    "page_size",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "abort_on_priority_when_disabled",
    "truncation_align_size",
    "max_queued_requests",
)
"""Fields that a scheduler has under the same names."""
_SCHEDULE = (
    "prefill_max_requests",
    "disable_priority_preemption",
    "min_free_slots_delay",
    "schedule_conservativeness",
    "retraction_policy",
    "enable_prefill_delayer",
    "prefill_delayer_max_delay_passes",
    "prefill_delayer_token_usage_low_watermark",
    "prefill_delayer_queue_min_ratio",
)
"""Fields that SGLang's configuration has."""


def source_gaps(scheduler: Any) -> list[Gap]:
    """What this scheduler does that our core doesn't know."""
    return [Gap(name, effect) for name, (is_on, effect) in _UNKNOWN.items() if is_on(scheduler)]


_HOST = "matches in host memory are not seen: matched lengths may be longer than replay can prove"
_ADMISSION = "admission follows rules that replay doesn't know"
_UNKNOWN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "hierarchical cache": (lambda s: bool(s.enable_hierarchical_cache), _HOST),
    "lmcache": (lambda s: bool(s.enable_lmcache), _HOST),
    "external cache linker": (lambda s: bool(s.enable_unified_cache_external_linker), _HOST),
    "lora": (lambda s: bool(s.enable_lora), _ADMISSION),
    "speculative decoding": (lambda s: not s.spec_algorithm.is_none(), "several tokens a step: " + _ADMISSION),
    "sliding window attention": (lambda s: bool(s.is_hybrid_swa), _ADMISSION),
    "state space layers": (lambda s: bool(s.is_hybrid_ssm), _ADMISSION),
    "prefill/decode disaggregation": (lambda s: s.disaggregation_mode.value != "null", _ADMISSION),
    "diffusion": (lambda s: s.dllm_config is not None, _ADMISSION),
    "hisparse": (lambda s: bool(s.enable_hisparse), _ADMISSION),
    "pipeline parallelism": (lambda s: s.server_args.pp_size > 1, "several batches are in flight at a time"),
    "prefill_decode_interval": (lambda s: bool(s.prefill_decode_interval), "steps without a pass are not explained"),
}
