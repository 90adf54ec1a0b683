"""What SGLang found in its cache of each waiting request.

Requests of a server are big, and before a pass they are in no cache of the processor's: to read three attributes of
each of a hundred takes a quarter of all that recording a pass takes. A policy that doesn't match the queue leaves them
as they were, though. Then only those are read that admission looked at in the last pass, or that are new.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedscope.engine.ordering import POLICIES
from schedscope.recorder.sglang_request import Req

Looks = tuple[list[str], list[int], list[int]]
"""Columns of a queue: rid, and the lengths that `prefix_len` and `num_matched_prefix_tokens` tell."""

_NOTHING: tuple[list[Req], Looks] = [], ([], [], [])
_MATCHING = frozenset(name for name, policy in POLICIES.items() if policy.cache_aware)


def read(queue: Sequence[Req]) -> Looks:
    """Of each request. Column by column takes half as long as row by row."""
    return (
        [req.rid for req in queue],
        [req.prefix_len for req in queue],
        [req.num_matched_prefix_tokens for req in queue],
    )


class Looking:
    """Reads the queue of one scheduler, pass by pass.

    Args:
        always: what was found may change in other ways than those of plain policies and admission.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._kept = _NOTHING
        """Requests in a row of which nothing changes until they are matched, and what was found of them."""

    def look(self, queue: list[Req], active: str) -> Looks:
        """Of each request, once its policy has sorted.

        Args:
            queue: before it was sorted.
            active: the policy.
        """
        kept, looks = self._kept
        if active in _MATCHING or active not in POLICIES or not kept or kept[0] not in queue:
            return read(queue)
        begin = queue.index(kept[0])
        end = begin + len(kept)
        if queue[begin:end] != kept:
            return read(queue)
        before, behind = read(queue[:begin]), read(queue[end:])
        return before[0] + looks[0] + behind[0], before[1] + looks[1] + behind[1], before[2] + looks[2] + behind[2]

    def keep(self, queue: list[Req], looks: Looks, last: Req | None, stayed: bool) -> None:
        """Remember what a pass found.

        Args:
            queue: as `look` was given it.
            last: the last one that admission looked at.
            stayed: sorting changed nothing, so admission went through it in this order.
        """
        if not stayed or self._always:
            self._kept = _NOTHING
            return
        begin = 0 if last is None else queue.index(last) + 1
        rids, prefix_lens, matched = looks
        self._kept = queue[begin:], (rids[begin:], prefix_lens[begin:], matched[begin:])
