"""What a decision may read. Frozen values; `schedscope.engine.decision.decide` gets one `View` and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from schedscope.engine.delayer import NOT_WAITING, DelayerState, Report
from schedscope.engine.radix import Node, RadixCache


class Waiting(NamedTuple):
    """A request in the waiting queue."""

    rid: str
    tokens: bytes
    """Prompt and what was generated before a retraction, packed."""
    prompt_len: int
    output_len: int
    max_new_tokens: int
    ignore_eos: bool
    priority: int
    """Resolved; 0 without priority scheduling."""
    routing_key: str | None
    space: bytes
    """Namespace of the prefix cache, see `schedscope.engine.radix.namespace`."""
    entry_time: float
    """When it entered the queue, seconds on the scheduler's clock."""
    arrival_processed_tokens: int
    """`processed_tokens` when it entered the queue."""
    retracted: bool
    prefix_len: int = 0
    """Tokens found in the cache at the last look, whole pages; stale if this pass doesn't match."""
    matched: int = 0
    """The same, at most one token short of the sequence, as the policies count it."""
    fill_len: int = 0
    """Sequence length at the last admission attempt or mixed step; 0 before the first. Preemption reads it."""

    @property
    def length(self) -> int:
        """Tokens to have in the KV pool before the next token can be sampled."""
        return self.prompt_len + self.output_len


class Running(NamedTuple):
    """A request in the running batch."""

    rid: str
    prompt_len: int
    output_len: int
    max_new_tokens: int
    ignore_eos: bool
    priority: int
    routing_key: str | None
    entry_time: float
    finished: bool
    """It ended, but has not left the batch."""
    private: int
    """Pool tokens, whole pages, that come free at once when it is released."""
    lock: Node | None
    """The cache node it keeps locked."""


class Chunked(NamedTuple):
    """The request whose prompt is computed chunk by chunk; at most one."""

    rid: str
    length: int
    """Tokens of the whole sequence."""
    prefix_len: int
    """Tokens computed so far."""
    output_len: int
    prompt_len: int
    max_new_tokens: int
    ignore_eos: bool
    retracted: bool


class RunningRequests(Sequence[Running]):
    """The running batch, frozen. What it says of each request is made when somebody looks, or before that changes.

    Args:
        make: all of it.
        asked: output tokens that each had still to get when `got` was 0.
        got: tokens that each has got since.
        ignores_eos: some go on after an end-of-text token.
    """

    __slots__ = ("__weakref__", "_made", "_make", "asked", "got", "ignores_eos")

    def __init__(
        self, make: Callable[[], tuple[Running, ...]], asked: Sequence[int], got: int, ignores_eos: bool
    ) -> None:
        self._make: Callable[[], tuple[Running, ...]] | None = make
        self._made: tuple[Running, ...] = ()
        self.asked = asked
        self.got = got
        self.ignores_eos = ignores_eos

    @property
    def made(self) -> tuple[Running, ...]:
        """All of it."""
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made

    def __len__(self) -> int:
        return len(self.asked)

    def __iter__(self) -> Iterator[Running]:
        return iter(self.made)

    @overload
    def __getitem__(self, index: int) -> Running: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Running]: ...
    def __getitem__(self, index: int | slice) -> Running | Sequence[Running]:
        return self.made[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.made == tuple(other)

    def __hash__(self) -> int:
        return hash(self.made)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One rank's state before a pass."""

    queue: tuple[Waiting, ...]
    running: Sequence[Running]
    cache: RadixCache
    """Read-only to a decision."""
    available: int
    """Free tokens of the KV pool, whole pages."""
    free_rows: int
    """Requests that could get a row of their own."""
    chunked: Chunked | None = None
    batch_is_full: bool = False
    processed_tokens: int = 0
    new_token_ratio: float = 0.7
    refresh_calls: int = 0
    """How often the waiting prefixes could have been touched."""
    delayer: DelayerState = NOT_WAITING
    reports: tuple[Report, ...] = ()
    """What the other ranks tell the delayer in this pass."""
    max_prefill_bs: int = 0
    """Largest of the recent prefill batches."""
    token_usage: float = 0.0
    """Used share of the KV pool, 0..1."""
    now: float = 0.0
    """This rank's clock, seconds; only the delayer's timeout reads it."""
