"""What a pass does to the cache and the batch, as values. A decision lists them, the state carries them out."""

from __future__ import annotations

from typing import NamedTuple


class Touch(NamedTuple):
    """An admission look-up: makes the first `length` tokens of the request's path recent, splitting where it ends."""

    rid: str
    length: int


class Lock(NamedTuple):
    """An admitted request keeps the first `length` tokens of its path from eviction."""

    rid: str
    length: int


class Preempt(NamedTuple):
    """Running requests are released, in running order."""

    rids: tuple[str, ...]
    room: tuple[int, ...]
    """Tokens that have to be free after each release, by evicting if need be."""


Operation = Touch | Lock | Preempt
