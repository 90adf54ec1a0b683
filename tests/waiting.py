"""Requests of a waiting queue, for tests of what sorts and groups them."""

from __future__ import annotations

from collections.abc import Iterable

from schedscope.engine import tokens
from schedscope.engine.view import Waiting


def waiting(number: int, ids: Iterable[int], prefix_len: int = 0, space: bytes = b"") -> Waiting:
    """Request `r{number}` with these prompt tokens, fresh from a client."""
    prompt = tokens.encode(ids)
    return Waiting(
        rid=f"r{number}",
        tokens=prompt,
        prompt_len=tokens.length(prompt),
        output_len=0,
        max_new_tokens=1,
        ignore_eos=False,
        priority=0,
        routing_key=None,
        space=space,
        entry_time=0.0,
        arrival_processed_tokens=0,
        retracted=False,
        prefix_len=prefix_len,
    )
