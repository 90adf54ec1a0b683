"""The seven eviction policies: which unlocked leaf of the prefix cache goes first.

Each gives a leaf a key; the smallest key is evicted first. Logical clocks make keys of two leaves differ; where
they don't, the older node (smaller id) goes first. Source: `evict_policy.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

EvictionKey = tuple[int, ...]


class Evictable(Protocol):
    """What a policy may look at in a node."""

    last_access: int
    creation: int
    hit_count: int
    priority: int


def _lru(node: Evictable) -> EvictionKey:
    return (node.last_access,)


def _lfu(node: Evictable) -> EvictionKey:
    return (node.hit_count, node.last_access)


def _fifo(node: Evictable) -> EvictionKey:
    return (node.creation,)


def _mru(node: Evictable) -> EvictionKey:
    return (-node.last_access,)


def _filo(node: Evictable) -> EvictionKey:
    return (-node.creation,)


def _priority(node: Evictable) -> EvictionKey:
    return (node.priority, node.last_access)


_KEYS: dict[str, Callable[[Evictable], EvictionKey]] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "mru": _mru,
    "filo": _filo,
    "priority": _priority,
}
EVICTION_POLICIES = (*_KEYS, "slru")


def eviction_key(policy: str, slru_protected_hits: int = 2) -> Callable[[Evictable], EvictionKey]:
    """The key function of a policy; under slru a node with so many hits outlives all with fewer."""
    if policy in _KEYS:
        return _KEYS[policy]
    return lambda node: (int(node.hit_count >= slru_protected_hits), node.last_access)
