"""In-batch duplicates: waiting requests that bring the same cold prefix as one before them in the queue.

SGLang keeps a second radix tree for this, filled anew in each pass. What it decides needs no tree: a request goes
into it only if it shares fewer than T tokens with everything in there, so at most one of them shares its first T
tokens, and a dictionary from the first T tokens to that one leader finds it.

Who repeats whom is found anew in each pass; how much two requests share never changes, and is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.view import Waiting

# Requests that left and are not forgotten yet, beyond twice as many as there are in the queue.
_MAX_STALE = 64


class Duplicate(NamedTuple):
    """Why a request is deprioritized."""

    partner: str | None
    """rid of the earlier queued request whose prefix it repeats; None if the threshold asks for no shared token."""
    shared_len: int
    """Tokens it shares with the partner."""


class Herd:
    """Requests of one namespace with the same first T tokens."""

    __slots__ = ("head", "likely", "reference")

    def __init__(self, head: tuple[bytes, bytes], reference: bytes) -> None:
        self.head = head
        self.reference = reference
        """The sequence that all of them are compared with; mostly of the first one that came."""
        self.likely = head[1]
        """What the last one shared with it. Most share the same, so this is tried first."""


class Member:
    """A request in its herd. What two of them share follows from what each shares with the reference."""

    __slots__ = ("answer", "answers", "follows", "herd", "next", "number", "request", "shared_len")

    def __init__(self, request: Waiting, herd: Herd, number: int) -> None:
        self.request = request
        self.herd = herd
        self.number = number
        """Its own among all there ever were."""
        self.follows = 0
        """The number of the leader for which it got its last answer."""
        self.answer: Duplicate | None = None
        self.answers: dict[int, Duplicate] = {}
        """What followers were told, by tokens shared."""
        self.compare()

    def compare(self) -> None:
        """Count what it shares with the reference."""
        herd, own = self.herd, self.request.tokens
        end = len(herd.likely)
        if own is herd.reference:
            end = len(own)
        elif not own.startswith(herd.likely) or own[end : end + TOKEN_BYTES] == herd.reference[end : end + TOKEN_BYTES]:
            end = tokens.common_prefix(own, herd.reference) * TOKEN_BYTES
            herd.likely = own[:end]
        self.shared_len = end // TOKEN_BYTES
        self.next = own[end : end + TOKEN_BYTES]
        """The token after that, empty at its end."""


class Herds:
    """The herds of the last passes. To find a duplicate again costs a few look-ups, however much it shares."""

    def __init__(self) -> None:
        self._head_bytes = 0
        self._herds: dict[tuple[bytes, bytes], Herd] = {}
        self._joined = 0
        self._members: dict[int, Member] = {}
        """By the identity of the request, which a member keeps alive."""

    def duplicates(self, queue: Sequence[Waiting], check: int, threshold: int) -> list[Duplicate | None]:
        """`find_duplicates` for a threshold of at least one token."""
        if self._head_bytes != threshold * TOKEN_BYTES:
            self._head_bytes, self._herds, self._members = threshold * TOKEN_BYTES, {}, {}
        known = self._members
        leaders: dict[Herd, Member] = {}
        found: list[Duplicate | None] = [None] * len(queue)
        for i, request in enumerate(queue):
            if request.prefix_len > check:
                continue
            member = known.get(id(request)) or self._join(request)
            if member is None:
                continue
            leader = leaders.setdefault(member.herd, member)
            if leader is not member:
                found[i] = member.answer if member.follows == leader.number else self._follow(member, leader)
        if len(known) > 2 * len(queue) + _MAX_STALE:
            self._members = {id(request): known[id(request)] for request in queue if id(request) in known}
            self._herds = {member.herd.head: member.herd for member in self._members.values()}
        return found

    def _join(self, request: Waiting) -> Member | None:
        """None: too short to be a duplicate."""
        if request.length * TOKEN_BYTES < self._head_bytes:
            return None
        head = request.space, request.tokens[: self._head_bytes]
        herd = self._herds.get(head)
        if herd is None:
            herd = self._herds[head] = Herd(head, request.tokens)
        self._joined += 1
        member = self._members[id(request)] = Member(request, herd, self._joined)
        return member

    def _follow(self, member: Member, leader: Member) -> Duplicate:
        length = self._shared(member, leader)
        answer = leader.answers.get(length) or leader.answers.setdefault(length, Duplicate(leader.request.rid, length))
        member.follows, member.answer = leader.number, answer
        return answer

    def _shared(self, member: Member, leader: Member) -> int:
        """Tokens that two of a herd share."""
        if member.shared_len == leader.shared_len and member.next == leader.next and member.next:
            # They leave the reference together: from now on the leader is the reference.
            herd = leader.herd
            herd.reference, herd.likely = leader.request.tokens, herd.head[1]
            for other in self._members.values():
                if other.herd is herd:
                    other.compare()
        return min(member.shared_len, leader.shared_len)


def find_duplicates(
    queue: Sequence[Waiting], config: SchedulerConfig, herds: Herds | None = None
) -> list[Duplicate | None]:
    """Per request of the queue, in queue order: held back for whom, or None. `prefix_len` must be this pass's.

    `herds` is what earlier passes left, to be faster; it changes no answer.
    """
    check = config.in_batch_prefix_caching_check_threshold
    threshold = config.in_batch_prefix_caching_deprioritize_threshold
    if config.radix_force_miss and threshold > 0:
        return [None] * len(queue)
    if threshold <= 0:
        return [Duplicate(None, 0) if request.prefix_len <= check else None for request in queue]
    return (herds or Herds()).duplicates(queue, check, threshold)
