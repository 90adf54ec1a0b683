"""A request of SGLang's from its arrival to its end, and what its recording tells of it."""

from __future__ import annotations

from typing import Any

Req = Any
"""`sglang.srt.managers.schedule_batch.Req`."""


class WatchedRequest:
    """What has been told of it so far."""

    __slots__ = ("asked", "cached_tokens", "output_len", "preemptions", "prompt_len", "retractions", "rid", "taken")

    def __init__(self, rid: str, prompt_len: int, asked: dict[str, Any]) -> None:
        self.rid = rid
        self.prompt_len = prompt_len
        self.asked = asked
        """See `asked`."""
        self.output_len = 0
        """Tokens that were told."""
        self.taken = 0
        """Of SGLang's list of outputs, how many were looked at."""
        self.cached_tokens = 0
        self.retractions = 0
        self.preemptions = 0


def asked(req: Req, priority: int | None) -> dict[str, Any]:
    """Its parameters without its prompt, as `schedscope.engine.scheduler.describe_request` tells those of ours.

    Args:
        priority: as it was when the request arrived.
    """
    sampling = req.sampling_params
    return {
        "priority": priority,
        "routing_key": req.routing_key,
        "extra_key": req.extra_key,
        "cache_salt": req.cache_salt,
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop_strs or ()),
        "stop_token_ids": sorted(sampling.stop_token_ids or ()),
        "seed": sampling.sampling_seed,
    }
