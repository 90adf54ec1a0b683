"""What a pass of another scheduler than ours could read, as a recording of it holds it.

The rows of `passes`, `decisions` and `events` tell most of it. This is the rest: who ran, how much memory was free,
what the prefill delayer and the random generator remembered. With it, `schedscope.replay.from_view` makes the view
of the pass again.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from schedscope.engine.delayer import DelayerState, Report
from schedscope.engine.errors import RunFormatError


class ObservedChunk(NamedTuple):
    """The request whose prompt is computed chunk by chunk, before the pass."""

    rid: str
    prefix_len: int
    """Tokens computed."""
    output_len: int
    retracted: bool
    protected: int
    """Tokens that the cache holds for it, locked."""


class Observed(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """The rest of a view, see above. Columns stand in the order of `running`."""

    running: list[str]
    """rids of the running batch."""
    output_lens: list[int]
    finished: list[int]
    """Places of those that ended and have not left the batch."""
    protected: list[int]
    """Tokens that the cache holds for each, locked."""
    allocated: list[int]
    """Tokens of KV memory that each has, what is protected included. Empty if nobody can be preempted."""
    available: int
    """Free tokens of the KV pool."""
    evictable: int
    free_rows: int
    chunked: ObservedChunk | None = None
    fill_lens: list[int] = []
    """Of each waiting request, in queue order; empty if nobody can be preempted."""
    max_prefill_bs: int = 0
    token_usage: float = 0.0
    delayer: DelayerState | None = None
    reports: list[Report] = []
    """What the other ranks told the prefill delayer."""
    now: float = 0.0
    """The clock that the prefill delayer read, seconds."""
    random_state: list[int] = []
    """The 625 words of Python's generator before the pass; empty if the policy uses no chance."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Observed).decode


def pack_observed(observed: Observed) -> bytes:
    """As the table `views` keeps it."""
    return _encode(observed)


def unpack_observed(packed: bytes) -> Observed:
    """The inverse. Raises RunFormatError."""
    try:
        return _decode(packed)
    except msgspec.DecodeError as error:
        raise RunFormatError(f"a recorded view can't be read: {error}") from None
