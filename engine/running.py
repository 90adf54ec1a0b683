"""The running batch: the requests that get a token in every step.

Between two changes of the batch a step does the same to all of them: a KV slot and a token more. So a step only notes
both, for all at once, and they are written to each request when somebody looks at one.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter

from schedscope.engine.live import Live
from schedscope.engine.view import Running, RunningRequests

_KV_LEN = attrgetter("kv_len")
_append = array.append


class RunningBatch:
    """Requests that decode together. Another one takes its place whenever any joins or leaves.

    Args:
        lives: in this order.
    """

    def __init__(self, lives: Iterable[Live] = ()) -> None:
        self._lives = list(lives)
        self._slots: list[array[int]] = []
        """Of each step that nobody looked at yet: a slot per request."""
        self._tokens: list[array[int]] = []
        """Of each commit that nobody looked at yet: a token per request."""
        self._rids: list[str] | None = None
        self.first_lens: list[int] = []
        """`kv_len` of each before the first step of this batch."""
        self.steps = 0
        """For which it got slots."""
        self.plain = self._is_plain()
        """None of them has ended, or is to because its client wants it; whoever changes that says so with `mark`."""
        self._asked: list[int] | None = None
        """Tokens that each may still get, without those in `_got`."""
        self._got = 0
        self._ignores_eos: bool | None = None
        self._frozen: weakref.ref[RunningRequests] | None = None
        """What was frozen and holds still."""

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def lives(self) -> list[Live]:
        """The requests, up to date; for those who may change them, too."""
        self.keep_frozen()
        self.settle()
        return self._lives

    @property
    def rids(self) -> list[str]:
        """Of the requests, in their order."""
        if self._rids is None:
            self._rids = [live.rid for live in self._lives]
        return self._rids

    @property
    def left(self) -> int:
        """Tokens that the one closest to the length it asked for may still get."""
        return min(self._still_asked(), default=0) - self._got

    def _still_asked(self) -> list[int]:
        if self._asked is None:
            self.settle()
            self._asked = [live.request.sampling.max_new_tokens - live.output_len for live in self._lives]
            self._got = 0
        return self._asked

    def freeze(self, page_size: int) -> RunningRequests:
        """What a decision may read of it."""
        frozen = None if self._frozen is None else self._frozen()
        if frozen is None:
            if self._ignores_eos is None:
                self._ignores_eos = any(live.request.sampling.ignore_eos for live in self._lives)
            asked = self._still_asked()
            frozen = RunningRequests(partial(self._freeze, page_size), asked, self._got, self._ignores_eos)
            self._frozen = weakref.ref(frozen)
        return frozen

    def _freeze(self, page_size: int) -> tuple[Running, ...]:
        self.settle()
        return tuple(
            [
                Running(
                    live.rid,
                    live.prompt_len,
                    live.output_len,
                    (sampling := live.request.sampling).max_new_tokens,
                    sampling.ignore_eos,
                    live.priority,
                    live.request.routing_key,
                    live.entry_time,
                    live.finished,
                    -(-len(live.row) // page_size) * page_size - live.protected_len,
                    live.lock,
                )
                for live in self._lives
            ]
        )

    def keep_frozen(self) -> None:
        """Something is about to change: what was frozen and somebody still has is to stay as it was."""
        frozen = None if self._frozen is None else self._frozen()
        self._frozen = None
        if frozen is not None:
            frozen.made  # noqa: B018

    def grow(self, slots: array[int]) -> None:
        """A step: a slot for each."""
        self.keep_frozen()
        if not self.steps:
            self.first_lens = list(map(_KV_LEN, self._lives))
        self.steps += 1
        self._slots.append(slots)

    def take(self, sampled: Sequence[int]) -> None:
        """A token for each, in the order of `rids`. Raises ValueError, OverflowError."""
        said = array("i", sampled)
        if len(said) != len(self):
            raise ValueError(f"{len(said)} tokens for {len(self)} requests")
        self.keep_frozen()
        self._tokens.append(said)
        self._got += 1

    def mark(self) -> None:
        """One of them is about to end, or to lose its memory."""
        self.keep_frozen()
        self.plain = False

    def drop_finished(self) -> RunningBatch:
        """The batch without those that ended: this one if nobody has."""
        if self.plain:
            return self
        left = [live for live in self.lives if not live.finished]
        if len(left) < len(self):
            return RunningBatch(left)
        self.plain = self._is_plain()
        return self

    def _is_plain(self) -> bool:
        return not any(live.finished or live.to_finish is not None for live in self._lives)

    def changed(self) -> None:
        """Requests of it get tokens in another way."""
        self.keep_frozen()
        self.settle()
        self._asked = None

    def settle(self) -> None:
        """Write down for each request what was noted for all."""
        if not self._slots and not self._tokens:
            return
        slots, said = self._slots, self._tokens
        self._slots, self._tokens = [], []
        lives, steps, count = self._lives, len(slots), len(said)
        if slots:
            rows = [live.row for live in lives]
            for each in slots:
                deque(map(_append, rows, each), 0)
        if said:
            texts = [live.said for live in lives]
            for tokens in said:
                deque(map(_append, texts, tokens), 0)
        for live in lives:
            live.kv_len += steps
            live.output_len += count
