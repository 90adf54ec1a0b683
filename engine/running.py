"""The running batch: the requests that get a token in every step.

Between two changes of the batch a step does the same to all of them: a KV slot and a token more. So a step only notes
both, for all at once, and they are written to each request when somebody looks at one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter

from schedscope.engine.live import Live

_KV_LEN = attrgetter("kv_len")


class RunningBatch:
    """Requests that decode together. Another one takes its place whenever any joins or leaves.

    Args:
        lives: in this order.
    """

    def __init__(self, lives: Iterable[Live] = ()) -> None:
        self._lives = list(lives)
        self._slots: list[array[int]] = []
        """Of each step that nobody looked at yet: a slot per request."""
        self._tokens: list[Sequence[int]] = []
        self._rids: list[str] | None = None
        self.first_lens: list[int] = []
        """`kv_len` of each before the first step of this batch."""
        self.steps = 0
        """For which it got slots."""
        self.plain = self._is_plain()
        """None of them has ended, or is to because its client wants it; whoever changes that says so with `mark`."""
        self._left: int | None = None

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def lives(self) -> list[Live]:
        """The requests, up to date."""
        self.settle()
        return self._lives

    @property
    def rids(self) -> list[str]:
        """Whose tokens `take` expects, in this order."""
        if self._rids is None:
            self._rids = [live.rid for live in self._lives]
        return self._rids

    @property
    def left(self) -> int:
        """Tokens that the one closest to the length it asked for may still get."""
        if self._left is None:
            asked = [live.request.sampling.max_new_tokens - live.output_len for live in self.lives]
            self._left = min(asked, default=0)
        return self._left

    def grow(self, slots: array[int]) -> None:
        """A step: a slot for each."""
        if not self.steps:
            self.first_lens = list(map(_KV_LEN, self._lives))
        self.steps += 1
        self._slots.append(slots)

    def take(self, sampled: Sequence[int]) -> None:
        """A token for each."""
        self._tokens.append(sampled)
        if self._left is not None:
            self._left -= 1

    def mark(self) -> None:
        """One of them may have ended, or is to."""
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
        self.settle()
        self._left = None

    def settle(self) -> None:
        """Write down for each request what was noted for all."""
        if not self._slots and not self._tokens:
            return
        slots, said = self._slots, self._tokens
        self._slots, self._tokens = [], []
        steps = len(slots)
        rows = zip(*slots, strict=True) if slots else repeat(())
        texts = zip(*said, strict=True) if said else repeat(())
        for live, row, text in zip(self._lives, rows, texts, strict=False):
            live.row.extend(row)
            live.kv_len += steps
            live.extend(text)
