"""What prompts have in common, read from recorded tokens.

Hashed tokens do as well: then lengths are whole pages, as far as they were hashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from schedscope.engine import tokens
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.view import View

BLOCK = 32
"""Tokens that are compared at a time."""


class Prompt(NamedTuple):
    """A request's prompt."""

    rid: str
    space: bytes
    """Namespace of the prefix cache."""
    text: bytes
    """Packed tokens."""


class Reuse(NamedTuple):
    """How much of some prompts was there before."""

    prompt_tokens: int
    repeated_tokens: int
    """That a cache which never forgets would have found, in whole blocks."""

    @property
    def rate(self) -> float:
        """The share that repeats, 0..1."""
        return self.repeated_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def reuse(prompts: Iterable[Prompt], *, apart: bool = True) -> Reuse:
    """What a cache that never forgets would find of prompts that come in this order.

    Args:
        apart: whether namespaces keep them apart.
    """
    seen: set[int] = set()
    total = repeated = 0
    step = BLOCK * TOKEN_BYTES
    for prompt in prompts:
        total += tokens.length(prompt.text)
        path = hash(prompt.space) if apart else 0
        known = True
        for start in range(0, len(prompt.text) - step + 1, step):
            path = hash((path, prompt.text[start : start + step]))
            known = known and path in seen
            repeated += BLOCK if known else 0
            seen.add(path)
    return Reuse(total, repeated)


class Duplicate(NamedTuple):
    """A request of a batch that computes what another one of it computes."""

    rid: str
    other: str
    tokens: int


def duplicates(view: View, batch: Sequence[tuple[str, int, int]]) -> list[Duplicate]:
    """Requests of a batch that compute the same tokens side by side.

    Args:
        view: what the pass could read.
        batch: per admitted request its rid, the tokens it finds cached, and those it computes.
    """
    queue = {request.rid: request for request in view.queue}
    found: list[Duplicate] = []
    before: list[tuple[str, int]] = []
    for rid, prefix_len, extend_len in batch:
        request = queue.get(rid)
        if request is None:
            continue
        best: Duplicate | None = None
        for other, end in before:
            if queue[other].space != request.space:
                continue
            shared = min(tokens.common_prefix(queue[other].tokens, request.tokens), end, prefix_len + extend_len)
            if shared > prefix_len and (best is None or shared - prefix_len > best.tokens):
                best = Duplicate(rid, other, shared - prefix_len)
        if best is not None:
            found.append(best)
        before.append((rid, prefix_len + extend_len))
    return found
