"""What the model has to compute in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine.live import Live
from schedscope.engine.running import RunningBatch


class Member(NamedTuple):
    """A request's part of a forward."""

    live: Live
    start: int
    """First position to compute."""
    end: int
    """One past the last."""
    decode: bool
    """It decodes, in a batch that may prefill others."""
    unfinished: bool
    """Its prompt goes on in a later pass: no token is sampled."""


class Batch:
    """What the model has to compute in this step.

    Args:
        kind: `prefill`, `decode` or `mixed`.
    """

    def __init__(self, kind: str, members: Sequence[Member]) -> None:
        self.kind = kind
        self._members: tuple[Member, ...] | None = tuple(members)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def members(self) -> tuple[Member, ...]:
        """The requests in it, up to date."""
        assert self._members is not None
        return self._members

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return sum([member.end - member.start for member in self.members])

    @property
    def prefill_only(self) -> bool:
        """Whether nothing in it wants a token. SGLang doesn't decode a running batch that began as such batches."""
        if self.kind != "prefill":
            return False
        return not any(member.live.request.sampling.max_new_tokens for member in self.members)

    @property
    def extend_tokens(self) -> int:
        """Tokens that SGLang counts as processed: all but pure decode rows."""
        return self.computed if self.kind != "decode" else 0


class DecodeBatch(Batch):
    """A token for each request of the running batch. Its members are made when somebody looks at them."""

    def __init__(self, running: RunningBatch) -> None:
        self.kind = "decode"
        self._members = None
        self.running = running
        self._step = running.steps - 1
        """Its place among the steps of the running batch."""

    def __len__(self) -> int:
        return len(self.running)

    @property
    def members(self) -> tuple[Member, ...]:
        """The requests in it, up to date."""
        lives = self.running.lives
        if self._members is None:
            starts = [length + self._step for length in self.running.first_lens]
            self._members = tuple(
                [Member(live, start, start + 1, True, False) for live, start in zip(lives, starts, strict=True)]
            )
        return self._members

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return len(self)


class InFlight(NamedTuple):
    """A batch that was formed, and whose tokens are not taken in yet."""

    step: int
    batch: Batch
