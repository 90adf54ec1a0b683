"""What a `Timeline` tells, beside tables."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class RankExtent(NamedTuple):
    """How far a rank's recording reaches."""

    rank: int
    first_ns: int
    """Begin of its first step."""
    last_ns: int
    """End of its last step."""
    first_pass: int | None
    last_pass: int | None
    """None: it has no pass whose step has ended."""
    passes: int
    requests: int
    """That arrived; at level steps those that ended."""


class Extent(NamedTuple):
    """How far a run reaches."""

    first_ns: int
    last_ns: int
    passes: int
    """Of all ranks."""
    requests: int
    ranks: tuple[RankExtent, ...]
    level: str
    """How much was recorded, see `Detail`: what isn't is null, never 0."""


class Stretch(NamedTuple):
    """A time in which something stayed the same."""

    rank: int
    what: str
    """A policy, a gate, or why records are missing."""
    begin_ns: int
    end_ns: int
    first_pass: int | None
    last_pass: int | None
    """Passes in it; of a gap those around it. None: there is none, or (gap) it reaches to the run's begin or end."""
    total: int | None
    """Steps (gate), passes (policy) or lost records (gap; None: unknown)."""


class Stretches(NamedTuple):
    """The stretches of a window."""

    longest: tuple[Stretch, ...]
    """By begin."""
    others: int
    """Shorter ones that were left out."""


class HeatMap(NamedTuple):
    """How many requests had which time to first token when."""

    edges_s: tuple[float, ...]
    """Of the rows: row `i` holds from `edges_s[i]` up to `edges_s[i + 1]`, seconds; a constant ratio apart."""
    cells: pa.Table
    """`bucket`, `row`, `requests`: only cells with any."""


class Found(NamedTuple):
    """A request that was searched."""

    rank: int
    rid: str
    arrive_ns: int
    ttft_s: float | None
    """None: no token yet, or none ever."""
    end_reason: str | None
    """None: it has not ended."""


class Turn(NamedTuple):
    """What a rank did at a moment."""

    rank: int
    step: int
    begin_ns: int
    end_ns: int
    kind: str
    gate: str | None
    pass_number: int | None
    """The pass of this step, or the last one before it; None: there is none."""
    queue_len: int
    running: int
    admitted: int | None
    """Of the pass, if it was in this step."""
    stop: str | None
    policy: str | None
    """The active one, with the reason of a fallback in brackets."""


class Served(NamedTuple):
    """A request that got its first token."""

    rank: int
    rid: str
    arrive_ns: int
    first_token_ns: int
    ttft_s: float
    waited_s: float | None
    prefill_s: float | None
    scheduling_s: float | None
    prompt_tokens: int
    cached_tokens: int
    priority: int | None
    routing_key: str | None


class Forgone(NamedTuple):
    """A request whose cached prefix was evicted before its turn, see `schedscope.replay.evicted`."""

    rank: int
    rid: str
    best: int
    """Tokens that were cached of it while it waited, at most."""
    cached: int
    """Tokens that it found at its admission."""
    lost: int
    had_pass: int
    """The last pass that saw any of it cached."""
    admit_pass: int | None
    waited_s: float
