"""The scheduler's configuration: every number a decision depends on that is not state.

Names are SGLang's server arguments; what SGLang reads from the environment or hard-codes is a field here too,
with SGLang 0.5.23's value as its default.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedscope.engine.errors import ConfigError
from schedscope.engine.eviction import EVICTION_POLICIES

COMPAT = "sglang-0.5.23"
"""The scheduler whose decisions, faults included, are the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """See the comment under each field for what SGLang's documentation doesn't say."""

    compat: str = COMPAT
    schedule_policy: str = "fcfs"
    page_size: int = 1
    max_total_tokens: int = 1_048_576
    """KV pool, tokens; rounded down to pages."""
    max_running_requests: int = 256
    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int | None = None
    """Tokens; None: prompts are never cut."""
    prefill_max_requests: int | None = None
    enable_mixed_chunk: bool = False
    disable_overlap_schedule: bool = True
    """SGLang's own default is False: a batch's tokens are taken in after the next batch was decided."""
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    abort_on_priority_when_disabled: bool = False
    min_free_slots_delay: int | None = None
    disable_radix_cache: bool = False
    radix_force_miss: bool = False
    """Look up as usual, but treat every look-up as a miss."""
    radix_eviction_policy: str = "lru"
    slru_protected_hits: int = 2
    """Under slru, a node with so many hits outlives all with fewer."""
    in_batch_prefix_caching_check_threshold: int = 32
    """A request with at most this many cached tokens is compared with the queue before it; -1: none is."""
    in_batch_prefix_caching_deprioritize_threshold: int = 32
    """Sharing at least this many tokens with one of them holds it back."""
    waiting_queue_prefix_match_max: int = 128
    """lpm and hrrn give up above this many waiting requests; so many waiting prefixes are touched."""
    enable_waiting_prefix_refresh: bool = True
    waiting_prefix_refresh_interval: int = 32
    clip_max_new_tokens: int = 4096
    """Longest output that admission reserves memory for."""
    ignore_eos_reserve_tokens: int = 1
    truncation_align_size: int | None = None
    """Chunks are cut to multiples of this; some attention backends set it."""
    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    retract_decode_steps: int = 20
    """Decode steps that a retraction makes room for, per request left."""
    retraction_policy: str = "length"
    enable_prefill_delayer: bool = False
    prefill_delayer_max_delay_passes: int = 30
    prefill_delayer_token_usage_low_watermark: float | None = None
    prefill_delayer_queue_min_ratio: float | None = None
    prefill_delayer_max_delay_ms: float = 5000.0
    prefill_delayer_max_prefill_bs_window_size: int = 16
    dp_size: int = 1
    enable_dp_attention: bool = False
    max_queued_requests: int | None = None
    req_waiting_timeout: float | None = None
    """Seconds in the queue after which a request is aborted."""
    random_seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def priority_sign(self) -> int:
        """Factor that makes the request to serve first the smallest."""
        return 1 if self.schedule_low_priority_values_first else -1

    @property
    def lowest_priority(self) -> int:
        """What a request without a priority counts as under priority scheduling."""
        return 2**63 - 1 if self.schedule_low_priority_values_first else -(2**63)

    @property
    def priority_preemption(self) -> bool:
        """Whether a waiting request may push a running one out."""
        return self.enable_priority_scheduling and not self.disable_priority_preemption

    @property
    def min_free_slots(self) -> int:
        """Free slots below which new requests wait while others run; 0: never. SGLang takes 1 for 0."""
        wanted = min(self.min_free_slots_delay or 0, self.max_running_requests)
        return wanted if wanted > 1 else 0

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""
        return self.max_total_tokens // self.page_size

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SchedulerConfig:
        """The inverse of `to_dict`; unknown names raise ConfigError."""
        for name in values:
            if name not in FIELDS:
                raise _unknown_setting(name)
        return cls(**values)

    def replace(self, **changes: Any) -> SchedulerConfig:
        """A copy with some fields changed and all of them checked again."""
        return self.from_dict({**self.to_dict(), **changes})

    def with_settings(self, settings: Mapping[str, str]) -> SchedulerConfig:
        """A copy with `name=value` texts, as a person types them, applied."""
        return self.replace(**{name: parse_setting(name, text) for name, text in settings.items()})


FIELDS = {field.name: str(field.type) for field in dataclasses.fields(SchedulerConfig)}


def parse_setting(name: str, text: str) -> Any:
    """Turn the text of one setting into its field's type. Raises ConfigError."""
    kind = FIELDS.get(name)
    if kind is None:
        raise _unknown_setting(name)
    if "None" in kind and text.lower() in {"none", "null", ""}:
        return None
    base = kind.split(" ")[0]
    try:
        match base:
            case "bool":
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            case "int":
                return int(text)
            case "float":
                return float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name}={text}: expected {kind.replace(' | ', ' or ')}") from None
    return text


def _unknown_setting(name: str) -> ConfigError:
    near = difflib.get_close_matches(name, FIELDS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is, for example, {', '.join(sorted(FIELDS)[:4])}"
    return ConfigError(f"unknown scheduler setting {name!r}; {hint}")


_POSITIVE = (
    "page_size",
    "max_total_tokens",
    "max_running_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "truncation_align_size",
    "waiting_queue_prefix_match_max",
    "waiting_prefix_refresh_interval",
    "new_token_ratio_decay_steps",
    "prefill_delayer_max_delay_passes",
    "prefill_delayer_max_prefill_bs_window_size",
    "dp_size",
    "max_queued_requests",
    "req_waiting_timeout",
    "schedule_conservativeness",
)


_LARGEST = 2**62
"""Of any whole number: what the log can hold, with room to calculate."""


def _check_type(name: str, value: Any) -> None:
    """A value of its field's type, finite and not larger than anything real. Raises ConfigError."""
    kind = FIELDS[name]
    if value is None and "None" in kind:
        return
    base = kind.split(" ")[0]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "bool": isinstance(value, bool),
        "int": number and isinstance(value, int) and abs(value) <= _LARGEST,
        "float": number and math.isfinite(value),
        "str": isinstance(value, str),
    }
    if not fits[base]:
        expected = {"int": "a whole number", "float": "a finite number"}.get(base, base)
        raise ConfigError(f"{name}={value!r}: expected {expected}{' or none' if 'None' in kind else ''}")


def _check(config: SchedulerConfig) -> None:
    for name in FIELDS:
        _check_type(name, getattr(config, name))
    if config.compat != COMPAT:
        raise ConfigError(f"compat={config.compat}: this version knows {COMPAT} only")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}: must be greater than 0")
    for name in ("retract_decode_steps", "clip_max_new_tokens", "prefill_max_requests"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value}: must not be negative")
    if config.num_pages < 1:
        raise ConfigError(
            f"max_total_tokens={config.max_total_tokens}: the pool holds no page of page_size={config.page_size}"
        )
    if config.radix_eviction_policy not in EVICTION_POLICIES:
        raise ConfigError(
            f"radix_eviction_policy={config.radix_eviction_policy}: choose from {', '.join(EVICTION_POLICIES)}"
        )
    if config.retraction_policy not in {"length", "priority"}:
        raise ConfigError(f"retraction_policy={config.retraction_policy}: choose from length, priority")
    if config.enable_mixed_chunk and config.chunked_prefill_size is None:
        raise ConfigError("enable_mixed_chunk needs chunked_prefill_size")
