"""In-batch duplicates: waiting requests that bring the same cold prefix as one before them in the queue.

SGLang keeps a second radix tree for this, filled anew in each pass. What it decides needs no tree: a request goes
into it only if it shares fewer than T tokens with everything in there, so at most one of them shares its first T
tokens, and a dictionary from the first T tokens to that one leader finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.view import Waiting


class Duplicate(NamedTuple):
    """Why a request is deprioritized."""

    partner: str | None
    """rid of the earlier queued request whose prefix it repeats; None if the threshold asks for no shared token."""
    shared_len: int
    """Tokens it shares with the partner."""


def find_duplicates(queue: Sequence[Waiting], config: SchedulerConfig) -> list[Duplicate | None]:
    """Per request of the queue, in queue order: held back for whom, or None. `prefix_len` must be this pass's."""
    check = config.in_batch_prefix_caching_check_threshold
    threshold = config.in_batch_prefix_caching_deprioritize_threshold
    head_bytes = threshold * TOKEN_BYTES
    leaders: dict[tuple[bytes, bytes], Waiting] = {}
    found: list[Duplicate | None] = []
    for request in queue:
        duplicate = None
        if request.prefix_len <= check:
            if threshold <= 0:
                duplicate = Duplicate(None, 0)
            elif request.length >= threshold and not config.radix_force_miss:
                leader = leaders.setdefault((request.space, request.tokens[:head_bytes]), request)
                if leader is not request:
                    shared = tokens.common_prefix(leader.tokens, request.tokens)
                    duplicate = Duplicate(leader.rid, shared)
        found.append(duplicate)
    return found
