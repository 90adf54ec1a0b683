"""The cache as one admission loop sees it: what the pass would lock, release and evict, on top of the real cache.

Locks and releases are small notes beside the tree. Only an eviction within the pass (a preemption that finds too
little free memory) needs a real copy, on which all that came before is carried out first.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedscope.engine.looks import Looks
from schedscope.engine.radix import Match, Node, RadixCache
from schedscope.engine.view import Waiting


class ScratchCache:
    """Overlay over a `RadixCache` that is never written to.

    Args:
        base: the cache before the pass.
        touches: what ordering looked up before.
    """

    def __init__(self, base: RadixCache, touches: Sequence[Match]) -> None:
        self.disabled = base.disabled
        self.nothing = Match(0, base.root)
        self._base = base
        self._touches = touches
        self._history: list[tuple[str, Match]] = []
        """What the pass did since, as long as there is no copy."""
        self._evictable = base.evictable
        self._pinned: dict[int, int] = {}
        """Node id to the depth up to which this pass locked it."""
        self._released: dict[int, int] = {}
        """Node id to the locks that this pass took off."""
        self._forked = False
        self._twins: dict[int, Node] = {}

    @property
    def evictable(self) -> int:
        """Tokens that nobody holds."""
        return self._evictable

    def match(self, request: Waiting, limit: int) -> Match:
        """Longest cached prefix of a waiting request."""
        return self._base.cut(self._base.memo(Looks).find(request, self._base), limit)

    def touch(self, match: Match) -> None:
        """Note a look-up."""
        if self._forked:
            self._base.touch(match)
        else:
            self._history.append(("touch", match))

    def pin_cost(self, match: Match) -> int:
        """Evictable tokens that locking this match would take now."""
        if self._forked:
            return self._base.pin_cost(match)
        cost = 0
        node = self._base.resolve(match)
        while node.parent is not None:
            if node.lock_ref > self._released.get(node.id, 0):
                break
            start = node.parent.end
            held = self._pinned.get(node.id, start)
            cost += max(min(match.length, node.end) - held, 0)
            if held > start:
                break
            node = node.parent
        return cost

    def lock(self, match: Match) -> None:
        """Lock an admitted request's prefix."""
        if self._forked:
            self._base.lock(self._base.resolve(match))
            self._evictable = self._base.evictable
            return
        self._evictable -= self.pin_cost(match)
        node = self._base.resolve(match)
        while node.parent is not None:
            before = self._pinned.get(node.id, 0)
            self._pinned[node.id] = max(before, min(match.length, node.end))
            if before:
                break  # Whoever locked it has locked all above it, whole.
            node = node.parent
        self._history.append(("lock", match))

    def unlock(self, node: Node) -> None:
        """Take off the lock of a running request, on the node of the real cache."""
        if self._forked:
            self._base.unlock(self._twins[node.id])
            self._evictable = self._base.evictable
            return
        self._history.append(("unlock", Match(node.end, node)))
        while node.parent is not None:
            released = self._released[node.id] = self._released.get(node.id, 0) + 1
            if released == node.lock_ref:
                start = node.parent.end
                self._evictable += node.end - self._pinned.get(node.id, start)
            node = node.parent

    def evict(self, wanted: int) -> int:
        """Evict for real, on a copy; returns the tokens freed."""
        if not self._forked:
            self._fork()
        freed = sum(evicted.tokens for evicted in self._base.evict(wanted))
        self._evictable = self._base.evictable
        return freed

    def _fork(self) -> None:
        self._base, self._twins = self._base.fork()
        for kind, match in [*(("touch", match) for match in self._touches), *self._history]:
            twin = Match(match.length, self._twins[match.node.id])
            if kind == "touch":
                self._base.touch(twin)
            elif kind == "lock":
                self._base.lock(self._base.resolve(twin))
            else:
                self._base.unlock(self._base.resolve(twin))
        self._forked = True
        self.nothing = Match(0, self._base.root)
