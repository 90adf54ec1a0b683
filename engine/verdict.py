"""What a pass says about a request it looked at: a result, a reason, and the operands of the decisive check."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from schedscope.engine.budget import Remaining


class Result(StrEnum):
    """SGLang's own verdict: whether to go on with the next request."""

    CONTINUE = "CONTINUE"
    NO_TOKEN = "NO_TOKEN"
    OTHER = "OTHER"
    CHUNK = "CHUNK"
    """The continuing chunked request, which gets no verdict."""


class Reason(StrEnum):
    """Why a request was refused, or what ended the pass behind an admitted one. Finer than SGLang's `Result`."""

    ADMITTED = "admitted"
    CHUNK_CONTINUED = "chunk_continued"
    # refused
    PREFILL_MAX_REQUESTS = "prefill_max_requests"
    MEMORY = "memory"
    """Prompt, output reserve and a page don't fit in what is free and evictable."""
    MEMORY_IGNORE_EOS = "memory_ignore_eos"
    """The prompt's pages don't fit (ignore_eos, prefix cache off)."""
    MEMORY_FUTURE = "memory_future"
    """It fits now, but not when the outputs of all have grown (ignore_eos, prefix cache off)."""
    INPUT_BUDGET = "input_budget"
    CHUNK_TAKEN = "chunk_taken"
    """It would have to be cut, but shortest-prefill-first has a chunked request already."""
    CHUNK_TOO_SMALL = "chunk_too_small"
    """What is left of the chunk is less than one aligned page."""
    CHUNK_BUDGET = "chunk_budget"
    DELAYED = "delayed"
    """The prefill delayer said no."""
    # admitted, but the pass ends behind it
    TOTAL_SPENT = "total_spent"
    CURRENT_SPENT = "current_spent"
    INPUT_SPENT = "input_spent"
    CHUNK_SPENT = "chunk_spent"
    # of a recorded server
    UNKNOWN = "unknown"
    """It did not say, and nobody has worked it out yet."""


class Verdict(NamedTuple):
    """What the pass said about one request it looked at."""

    rid: str
    result: Result
    reason: Reason
    prefix_len: int
    """Cached tokens it would use, whole pages, at least one short of its sequence."""
    extend_len: int | None
    """Tokens to compute in this pass; None if not admitted."""
    chunked: bool
    """It is unfinished after this pass."""
    need: float | None
    """What the decisive check asked for."""
    have: float | None
    """What there was."""
    remaining: Remaining
    """Budgets after it."""
    preempted: tuple[str, ...] = ()
    """Running requests retracted to look at it."""

    @property
    def admitted(self) -> bool:
        """It joined the batch."""
        return self.extend_len is not None
