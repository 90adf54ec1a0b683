"""In-batch duplicates: waiting requests that bring the same cold prefix as one before them in the queue.

SGLang keeps a second radix tree for this, filled anew in each pass. What it decides needs no tree: a request goes
into it only if it shares fewer than T tokens with everything in there, so at most one of them shares its first T
tokens, and a dictionary from the first T tokens to that one leader finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.view import Waiting

# Requests that left and are not forgotten yet, beyond as many as there are in the queue.
_MAX_STALE = 64


class Duplicate(NamedTuple):
    """Why a request is deprioritized."""

    partner: str | None
    """rid of the earlier queued request whose prefix it repeats; None if the threshold asks for no shared token."""
    shared_len: int
    """Tokens it shares with the partner."""


class Herd:
    """Requests of one namespace with the same first T tokens. The first of them in the queue leads."""

    __slots__ = ("head", "leader", "likely")

    def __init__(self, head: tuple[bytes, bytes]) -> None:
        self.head = head
        self.leader: Member | None = None
        """Whom `likely` is of."""
        self.likely = head[1]
        """How the leader begins, as far as another one does. Most share the same, so this is tried first."""


class Member:
    """A request in its herd, and how much it shares with the leader it had last."""

    __slots__ = ("duplicate", "herd", "leader", "next", "request", "shared_len")

    def __init__(self, request: Waiting, herd: Herd) -> None:
        self.request = request
        self.herd = herd
        self.leader: Member | None = None
        self.shared_len = 0
        self.next = b""
        """The token after what it shares."""
        self.duplicate: Duplicate | None = None

    def follow(self, leader: Member) -> None:
        """Take a new leader. What both shared with the old one mostly says what they share."""
        if self.leader is None or self.leader is not leader.leader:
            self._share(self._compare(leader))
        elif leader.shared_len < self.shared_len:
            self._share(leader.shared_len)
        elif leader.shared_len == self.shared_len and leader.next == self.next:
            self._share(self._compare(leader))
        self.leader = leader
        self.duplicate = Duplicate(leader.request.rid, self.shared_len)

    def _share(self, length: int) -> None:
        if length != self.shared_len:
            self.shared_len = length
            self.next = _token(self.request, length)

    def _compare(self, leader: Member) -> int:
        """Tokens that both share, counted."""
        herd, own, other = self.herd, self.request.tokens, leader.request.tokens
        if herd.leader is not leader:
            herd.leader = leader
            if not other.startswith(herd.likely):
                herd.likely = herd.head[1]
        end = tokens.length(herd.likely)
        if not own.startswith(herd.likely) or _token(self.request, end) == _token(leader.request, end):
            end = tokens.common_prefix(other, own)
            herd.likely = own[: end * TOKEN_BYTES]
        return end


def _token(request: Waiting, place: int) -> bytes:
    return request.tokens[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES]


class Herds:
    """The herds of the last passes. To find them again costs a look-up per request, however much it shares."""

    def __init__(self) -> None:
        self._head_bytes = 0
        self._herds: dict[tuple[bytes, bytes], Herd] = {}
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
                if member.leader is not leader:
                    member.follow(leader)
                found[i] = member.duplicate
        for leader in leaders.values():
            leader.leader = None
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
            herd = self._herds[head] = Herd(head)
        member = self._members[id(request)] = Member(request, herd)
        return member


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
