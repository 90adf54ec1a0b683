"""Chance as a value: the state of Python's Mersenne Twister goes in, the next one comes out.

SGLang shuffles with Python's global generator. Here the state is an argument of the decision and is recorded,
so the same shuffle can be made again on another day in another process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NewType, TypeVar

RandomState = NewType("RandomState", tuple[Any, ...])
"""What `random.Random.getstate` gives: (version, 625 words, None)."""

T = TypeVar("T")


def seeded(seed: int) -> RandomState:
    """The state of a generator fresh from `seed`."""
    return RandomState(random.Random(seed).getstate())


def as_state(packed: Sequence[Any] | None) -> RandomState | None:
    """A state again, of what a format without tuples made of it."""
    if packed is None:
        return None
    version, words, gauss = packed
    return RandomState((version, tuple(words), gauss))


def shuffle(items: Sequence[T], state: RandomState) -> tuple[list[T], RandomState]:
    """The items in the order that `random.shuffle` gives them, and the state after it."""
    generator = random.Random()
    generator.setstate(state)
    shuffled = list(items)
    generator.shuffle(shuffled)
    return shuffled, RandomState(generator.getstate())
