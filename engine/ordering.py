"""The order of the waiting queue: `order` gives every request a key and sorts by it.

The key is the explanation. Each policy has one named tuple, built so that plain tuple comparison is the policy;
its last field is the place in the queue before, which makes it unique and keeps ties stable. Why A stands before
B is the first field in which their keys differ.

Source: `schedule_policy.py` of SGLang 0.5.23, faults included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter, is_, itemgetter, neg
from typing import Any, NamedTuple, Protocol, TypeVar, cast, overload

from schedscope.engine.chance import RandomState, shuffle
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.dedup import Duplicate, Herds, find_duplicates
from schedscope.engine.errors import ConfigError
from schedscope.engine.looks import Looks
from schedscope.engine.radix import Match, Node, RadixCache
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.view import Running, Waiting

_RID, _PROMPT_LEN, _ENTRY_TIME, _MATCHED = (
    itemgetter(Waiting._fields.index(name)) for name in ("rid", "prompt_len", "entry_time", "matched")
)
_LENGTH = itemgetter(Match._fields.index("length"))
_CUT_END = attrgetter("end")

Made = TypeVar("Made")


def _maker(kind: type[Made]) -> Callable[[tuple[object, ...]], Made]:
    """`kind._make` without the step through Python that takes most of its time."""
    return cast("Callable[[tuple[object, ...]], Made]", partial(tuple.__new__, cast("type[Any]", kind)))


# ---- keys ----------------------------------------------------------------------------------------------------


class QueueKey(NamedTuple):
    """fcfs, and every policy that leaves the queue as it is."""

    position: int


class PriorityFcfsKey(NamedTuple):
    """fcfs with priority scheduling."""

    signed_priority: int
    entry_time: float
    position: int


class LpmKey(NamedTuple):
    """Longest prefix match."""

    negative_matched: float
    """Minus the matched tokens; infinite when deprioritized."""
    position: int


class DfsWeightKey(NamedTuple):
    """Depth first through the cache, heavier branches first."""

    branches: tuple[tuple[float, float], ...]
    """(minus the requests in the branch, when it was created) per fork; a node's own requests come last."""
    position: int


class HrrnKey(NamedTuple):
    """Highest response ratio next."""

    negative_ratio: float
    """Minus (tokens processed since arrival / uncached tokens); +inf when deprioritized, -inf with nothing to do."""
    rid: str
    position: int


class ShortestPrefillKey(NamedTuple):
    """Shortest prefill first."""

    deprioritized: bool
    work: int
    """Tokens to compute, at least 1."""
    entry_time: float
    position: int


class LofKey(NamedTuple):
    """Longest output first."""

    signed_priority: int
    """0 without priority scheduling."""
    negative_max_new_tokens: int
    position: int


class RandomKey(NamedTuple):
    """random."""

    draw: int
    position: int


class RoutingKey(NamedTuple):
    """Requests whose routing key runs already come first, the most frequent key ahead."""

    unknown: bool
    negative_count: int
    key: str
    position: int


class PriorityMatchKey(NamedTuple):
    """schedscope's own `priority` policy: priority, then longest match, then arrival."""

    signed_priority: int
    negative_matched: float
    entry_time: float
    position: int


Key = (
    QueueKey
    | PriorityFcfsKey
    | LpmKey
    | DfsWeightKey
    | HrrnKey
    | ShortestPrefillKey
    | LofKey
    | RandomKey
    | RoutingKey
    | PriorityMatchKey
)


class Keys(Sequence[Key]):
    """A key per queue position, field by field: sorting needs no more, and a key is made when it is looked at."""

    def __init__(self, kind: type[Key], *columns: Sequence[Any]) -> None:
        self._kind = kind
        self.columns = columns
        """All fields but the last, which is the position."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all fields."""
        return self._kind._fields

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Key]:
        return map(_maker(self._kind), zip(*self.columns, range(len(self)), strict=True))

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | Sequence[Key]:
        return tuple(self)[index]


# ---- results -------------------------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """A request at its place in the queue after sorting."""

    request: Waiting
    """With `prefix_len` and `matched` of this pass, where the policy looked."""
    key: Key
    position: int
    """Place before sorting, from 0."""
    duplicate: Duplicate | None
    """Set if it is deprioritized: held back because an earlier waiting request brings the same prefix."""


class Ranking(Sequence[Ranked]):
    """The queue after sorting. Deciding needs only the requests, so a place and its key are made when looked at."""

    def __init__(
        self,
        queue: Sequence[Waiting],
        keys: Sequence[Key],
        positions: Sequence[int],
        duplicates: Sequence[Duplicate | None],
    ) -> None:
        self.requests = tuple(map(queue.__getitem__, positions))
        """In order."""
        self.queue = queue
        """Before sorting, as are `keys` and `duplicates`."""
        self.keys = keys
        self.positions = positions
        """In order: where each stood before."""
        self.duplicates = duplicates

    @cached_property
    def _places(self) -> tuple[Ranked, ...]:
        columns = self.queue, self.keys, range(len(self.queue)), self.duplicates
        places = list(map(_maker(Ranked), zip(*columns, strict=True)))
        return tuple(map(places.__getitem__, self.positions))

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Ranked]:
        return iter(self._places)

    @overload
    def __getitem__(self, index: int) -> Ranked: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Ranked]: ...
    def __getitem__(self, index: int | slice) -> Ranked | Sequence[Ranked]:
        return self._places[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranking) and self._places == other._places

    def __hash__(self) -> int:
        return hash(self._places)

    def __repr__(self) -> str:
        return f"Ranking{self._places!r}"


class Ordering(NamedTuple):
    """The queue as a policy wants it."""

    configured: str
    """The policy after replacement where it can't run at all (no prefix cache)."""
    active: str
    """The policy of this pass."""
    fallback: str | None
    """Why active is not what was asked for."""
    ranked: Ranking
    touches: tuple[Match, ...]
    """What sorting makes recent in the cache, in this order."""
    random_state: RandomState | None
    """Chance after the pass."""
    refresh_calls: int


# ---- policies ------------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What a policy's key function may look at, besides the request."""

    config: SchedulerConfig
    cache: RadixCache
    running: Sequence[Running]
    processed_tokens: int
    matches: Sequence[Match]
    """Per queue position; empty for cache-agnostic policies."""
    random_state: RandomState | None


Keyed = tuple[Sequence[Key] | None, RandomState | None]
"""A key per queue position, or None to leave the queue as it is; and chance afterwards."""


class KeyFunction(Protocol):
    """Keys for a queue whose requests carry this pass's matches, and chance after it."""

    def __call__(self, queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts, /) -> Keyed: ...


class Policy(NamedTuple):
    """A scheduling policy."""

    name: str
    cache_aware: bool
    """Whether it matches the queue against the cache and looks for duplicates."""
    limited: bool
    """Whether it gives up above `waiting_queue_prefix_match_max` waiting requests."""
    keys: KeyFunction
    steady: bool = False
    """Whether its keys follow from the queue, the matches and `processed_tokens` alone."""
    extension: bool = False
    """schedscope's own, not SGLang's."""


def _fcfs(queue: Sequence[Waiting], _: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    if not facts.config.enable_priority_scheduling:
        return None, facts.random_state
    sign = facts.config.priority_sign
    keys = [PriorityFcfsKey(r.priority * sign, r.entry_time, i) for i, r in enumerate(queue)]
    return keys, facts.random_state


def _negative_matched(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None]) -> list[float]:
    """Minus the matched tokens; infinite when deprioritized."""
    if not any(duplicates):
        return list(map(neg, map(_MATCHED, queue)))
    return [-r.matched if duplicate is None else math.inf for r, duplicate in zip(queue, duplicates, strict=True)]


def _lpm(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    return Keys(LpmKey, _negative_matched(queue, duplicates)), facts.random_state


def _dfs_weight(queue: Sequence[Waiting], _: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    return Keys(DfsWeightKey, dfs_branches(facts.cache, queue, facts.matches)), facts.random_state


def _hrrn(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    now = facts.processed_tokens
    ratios = [
        math.inf
        if duplicate is not None
        else -math.inf
        if (uncached := r.prompt_len - r.matched) <= 0
        else -(waited / uncached if (waited := now - r.arrival_processed_tokens) > 0 else 0.0)
        for r, duplicate in zip(queue, duplicates, strict=True)
    ]
    return Keys(HrrnKey, ratios, list(map(_RID, queue))), facts.random_state


def shortest_prefill_work(request: Waiting) -> int:
    """Tokens that shortest-prefill-first expects to compute for a request, at least 1."""
    work = request.prompt_len + request.output_len - request.matched
    return work if work > 1 else 1


def _shortest_prefill_first(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    held_back = [duplicate is not None for duplicate in duplicates]
    work = list(map(shortest_prefill_work, queue))
    return Keys(ShortestPrefillKey, held_back, work, list(map(_ENTRY_TIME, queue))), facts.random_state


def _lof(queue: Sequence[Waiting], _: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    sign = facts.config.priority_sign if facts.config.enable_priority_scheduling else 0
    return [LofKey(r.priority * sign, -r.max_new_tokens, i) for i, r in enumerate(queue)], facts.random_state


def _random(queue: Sequence[Waiting], _: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    assert facts.random_state is not None, "the random policy needs a random state"
    shuffled, after = shuffle(range(len(queue)), facts.random_state)
    draws = [0] * len(queue)
    for draw, position in enumerate(shuffled):
        draws[position] = draw
    return [RandomKey(draw, i) for i, draw in enumerate(draws)], after


def _routing_key(queue: Sequence[Waiting], _: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    counts = Counter(r.routing_key for r in facts.running if r.routing_key)
    if not counts:
        return None, facts.random_state
    keys = []
    for i, r in enumerate(queue):
        count = counts.get(r.routing_key, 0) if r.routing_key else 0
        keys.append(RoutingKey(count == 0, -count, r.routing_key or "", i))
    return keys, facts.random_state


def _priority(queue: Sequence[Waiting], duplicates: Sequence[Duplicate | None], facts: Facts) -> Keyed:
    sign = facts.config.priority_sign
    priorities = [r.priority * sign for r in queue]
    entered = list(map(_ENTRY_TIME, queue))
    return Keys(PriorityMatchKey, priorities, _negative_matched(queue, duplicates), entered), facts.random_state


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("lpm", True, True, _lpm, steady=True),
        Policy("dfs-weight", True, False, _dfs_weight, steady=True),
        Policy("hrrn", True, True, _hrrn, steady=True),
        Policy("shortest-prefill-first", True, False, _shortest_prefill_first, steady=True),
        Policy("fcfs", False, False, _fcfs),
        Policy("lof", False, False, _lof),
        Policy("random", False, False, _random),
        Policy("routing-key", False, False, _routing_key),
        Policy("priority", True, False, _priority, steady=True, extension=True),
    )
}

SGLANG_POLICIES = tuple(name for name, policy in POLICIES.items() if not policy.extension)


def resolve_policy(config: SchedulerConfig) -> Policy:
    """The policy that a scheduler with this configuration runs.

    Without a prefix cache the cache-aware policies become fcfs, except shortest-prefill-first. Raises
    ConfigError, in SGLang's words first, for that one and for unknown names.
    """
    policy = POLICIES.get(config.schedule_policy)
    if policy is None:
        raise ConfigError(
            f"Unknown schedule_policy: policy={config.schedule_policy!r}; choose from {', '.join(POLICIES)}"
        )
    if policy.cache_aware and config.disable_radix_cache:
        if policy.name == "shortest-prefill-first":
            raise ConfigError(
                f"Unknown schedule_policy: policy={policy.name!r}: it needs the prefix cache, "
                "which disable_radix_cache turns off"
            )
        return POLICIES["fcfs"]
    return policy


def order(
    queue: Sequence[Waiting],
    cache: RadixCache,
    config: SchedulerConfig,
    *,
    running: Sequence[Running] = (),
    processed_tokens: int = 0,
    random_state: RandomState | None = None,
    refresh_calls: int = 0,
    policy: Policy | None = None,
) -> Ordering:
    """Sort the waiting queue. Reads the cache, changes nothing.

    Args:
        queue: in queue order, which all ties fall back to.
        running: the running batch, whose routing keys count.
        processed_tokens: prefill tokens computed so far, the clock of hrrn.
        refresh_calls: how often this ran before, for the touch of waiting prefixes.
        policy: what `resolve_policy(config)` gives, if known.
    """
    configured = policy or resolve_policy(config)
    active = configured
    fallback = None
    if configured.name != config.schedule_policy:
        fallback = "radix_cache_disabled"
    if configured.limited and len(queue) > config.waiting_queue_prefix_match_max:
        active = POLICIES["fcfs"]
        fallback = "queue_too_long"

    last = cache.memo(LastPass)
    inputs = configured, active, config, cache.version, processed_tokens, random_state, refresh_calls
    if active.steady and last.ordering is not None and last.is_of(queue, inputs):
        return last.ordering
    given = queue = tuple(queue)
    matches: Sequence[Match] = []
    shortest = 0
    duplicates: Sequence[Duplicate | None] = [None] * len(queue)
    if active.cache_aware:
        queue, matches = cache.memo(Looks).look(queue, cache, config.radix_force_miss)
        shortest = 0 if config.radix_force_miss else min(map(_LENGTH, matches), default=0)
        if shortest <= config.in_batch_prefix_caching_check_threshold:
            duplicates = find_duplicates(queue, config, cache.memo(Herds))

    # Above the limit SGLang doesn't sort at all, not even by priority.
    keys: Sequence[Key] | None = None
    if fallback != "queue_too_long":
        hits = [cache.root.whole] * len(queue) if config.radix_force_miss else matches
        facts = Facts(config, cache, running, processed_tokens, hits, random_state)
        keys, random_state = active.keys(queue, duplicates, facts)
    if keys is None:
        keys = [QueueKey(i) for i in range(len(queue))]
        places: Sequence[int] = range(len(queue))
    else:
        places = _sorted_places(keys)
    ranked = Ranking(queue, keys, places, duplicates)

    touches = tuple(matches)
    if cache.disabled or (shortest == 0 and min(map(_PROMPT_LEN, queue), default=0) < cache.page_size):
        touches = tuple([match for r, match in zip(queue, matches, strict=False) if match.length or _touches(r, cache)])
    if not active.cache_aware and queue and _refreshes(config):
        if refresh_calls % config.waiting_prefix_refresh_interval == 0:
            head = ranked.requests[: config.waiting_queue_prefix_match_max]
            touches += tuple([cache.match(r.tokens, r.space) for r in reversed(head) if _touches(r, cache)])
        refresh_calls += 1
    ordering = Ordering(configured.name, active.name, fallback, ranked, touches, random_state, refresh_calls)
    if active.steady:
        last.queue, last.inputs, last.ordering = given, inputs, ordering
    return ordering


class LastPass:
    """An unchanged queue over an unchanged tree isn't sorted again: what a pass read and what came of it."""

    def __init__(self) -> None:
        self.queue: Sequence[Waiting] = ()
        self.inputs: tuple[object, ...] = ()
        self.ordering: Ordering | None = None

    def is_of(self, queue: Sequence[Waiting], inputs: tuple[object, ...]) -> bool:
        """Whether it had these very requests and the same inputs."""
        return inputs == self.inputs and len(queue) == len(self.queue) and all(map(is_, queue, self.queue))


def _sorted_places(keys: Sequence[Key]) -> Sequence[int]:
    """Queue positions by key. Field by field from the last one: stable sorts of plain values beat tuple comparison."""
    columns = keys.columns if isinstance(keys, Keys) else list(zip(*keys, strict=True))[:-1]
    places = list(range(len(keys)))
    for column in reversed(columns):
        places.sort(key=column.__getitem__)
    return places


def _touches(request: Waiting, cache: RadixCache) -> bool:
    """A look-up of less than a page doesn't reach the tree, and so touches nothing."""
    return not cache.disabled and request.length >= cache.page_size


def _refreshes(config: SchedulerConfig) -> bool:
    return (
        config.enable_waiting_prefix_refresh
        and config.radix_eviction_policy == "lru"
        and not config.disable_radix_cache
    )


class _Cut(NamedTuple):
    """A place inside a node at which a match ends, and so SGLang splits it."""

    node: Node
    end: int
    creation: int


Step = Node | _Cut
"""On the way from the root to where matches end."""
Branches = tuple[tuple[float, float], ...]
_OWN = (math.inf, math.inf)
"""After all branches."""


class _Way(NamedTuple):
    steps: Sequence[Step]
    """From the first one below the root."""
    end: Step
    weight: int
    """Requests that go it to the end."""


def dfs_branches(cache: RadixCache, queue: Sequence[Waiting], matches: Sequence[Match]) -> list[Branches]:
    """For each match its way down the tree, as sort keys: heavier branches first, a node's own requests last.

    Only the places count at which requests part, so a key is short however deep the tree, and of most ways only the
    first step is looked at. A match that ends inside a node stands where the split that SGLang makes there would put
    it.
    """
    cuts: dict[Node, dict[int, _Cut]] = {}
    ends = [match.node if match.node.whole is match else _end(match, cache, cuts) for match in matches]
    weights = Counter(ends)
    branches: dict[Step, Branches] = {}
    tops, page = cache.root.children, cache.page_size * TOKEN_BYTES
    together: dict[Node, list[Step]] = {}
    for end, request in dict(zip(ends, queue, strict=True)).items():
        if end is cache.root:
            branches[end] = (_OWN,)
        else:
            together.setdefault(tops[request.space + request.tokens[:page]], []).append(end)
    for top, group in together.items():
        branch = -sum(map(weights.__getitem__, group)), top.creation
        if len(group) == 1:
            branches[group[0]] = (branch, _OWN)
        else:
            branches |= _part([_Way(_steps(end, cuts), end, weights[end]) for end in group], branch)
    return list(map(branches.__getitem__, ends))


def _end(match: Match, cache: RadixCache, cuts: dict[Node, dict[int, _Cut]]) -> Step:
    node = cache.resolve(match)
    if match.length == node.end:
        return node
    return cuts.setdefault(node, {}).setdefault(match.length, _Cut(node, match.length, node.creation))


def _steps(end: Step, cuts: Mapping[Node, Mapping[int, _Cut]]) -> list[Step]:
    """The way down to `end`: nodes, and the places inside them at which other matches end."""
    steps: list[Step] = []
    node: Node | None
    if not isinstance(end, _Cut):
        node = end
    else:
        steps += sorted([cut for cut in cuts[end.node].values() if cut.end <= end.end], key=_CUT_END, reverse=True)
        node = end.node.parent
    while node is not None and node.parent is not None:
        steps.append(node)
        if cuts and node in cuts:
            steps += sorted(cuts[node].values(), key=_CUT_END, reverse=True)
        node = node.parent
    steps.reverse()
    return steps


def _part(ways: Sequence[_Way], branch: tuple[float, float]) -> dict[Step, Branches]:
    """Branches by end, of ways that begin with one step together: a level wherever some of them part."""
    branches: dict[Step, Branches] = {}
    together: list[tuple[Sequence[_Way], int, Branches]] = [(ways, 1, (branch,))]
    while together:
        ways, depth, above = together.pop()
        depth = _fork(ways, depth)
        groups: dict[Step | None, list[_Way]] = {}
        for way in ways:
            groups.setdefault(way.steps[depth] if depth < len(way.steps) else None, []).append(way)
        for step, group in groups.items():
            below = above
            if step is not None:
                below = (*above, (-sum([way.weight for way in group]), step.creation))
            if len(group) == 1:
                branches[group[0].end] = (*below, _OWN)
            else:
                together.append((group, depth + 1, below))
    return branches


def _fork(ways: Sequence[_Way], depth: int) -> int:
    """The depth from `depth` on at which not all ways take the same step."""
    first, shortest = ways[0].steps, min([len(way.steps) for way in ways])
    while depth < shortest and all(way.steps[depth] is first[depth] for way in ways):
        depth += 1
    return depth
