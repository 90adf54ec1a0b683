"""What the model has to compute in a step."""

from __future__ import annotations

from typing import NamedTuple

from schedscope.engine.live import Live


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


class Batch(NamedTuple):
    """What the model has to compute in this step."""

    kind: str
    """`prefill`, `decode` or `mixed`."""
    members: tuple[Member, ...]

    @property
    def prefill_only(self) -> bool:
        """Whether nothing in it wants a token. SGLang doesn't decode a running batch that began as such batches."""
        asked = [member.live.request.sampling.max_new_tokens for member in self.members]
        return self.kind == "prefill" and not any(asked)

    @property
    def extend_tokens(self) -> int:
        """Tokens that SGLang counts as processed: all but pure decode rows."""
        return sum(member.end - member.start for member in self.members) if self.kind != "decode" else 0


class InFlight(NamedTuple):
    """A batch that was formed, and whose tokens are not taken in yet."""

    step: int
    batch: Batch
