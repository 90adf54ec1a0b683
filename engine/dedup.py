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
    prefixes: dict[tuple[bytes, bytes], bytes] = {}
    found: list[Duplicate | None] = []
    for request in queue:
        duplicate = None
        if request.prefix_len <= check:
            if threshold <= 0:
                duplicate = Duplicate(None, 0)
            elif request.length >= threshold and not config.radix_force_miss:
                head = request.space, request.tokens[:head_bytes]
                leader = leaders.setdefault(head, request)
                if leader is not request:
                    prefix = _shared_prefix(leader.tokens, request.tokens, prefixes.get(head, head[1]))
                    prefixes[head] = prefix
                    duplicate = Duplicate(leader.rid, tokens.length(prefix))
        found.append(duplicate)
    return found


def _shared_prefix(leader: bytes, other: bytes, likely: bytes) -> bytes:
    """What they share. Most that repeat a prefix repeat the same one, so the last answer is tried first."""
    end = len(likely)
    if other.startswith(likely) and leader[end : end + TOKEN_BYTES] != other[end : end + TOKEN_BYTES]:
        return likely
    return leader[: tokens.common_prefix(leader, other) * TOKEN_BYTES]
