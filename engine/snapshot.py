"""A scheduler's whole state as plain values, and back: what a checkpoint in a recording holds.

Dictionaries, lists, numbers and texts, so that any format can carry them; no pickle. Token ids, by far the most of a
state, stand apart, so that a recording can say where it has them already. KV slots are left out: no decision reads
which slot holds a token, only how many are free, so restoring hands out fresh ones.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from schedscope.engine.batch import Batch, InFlight, Member
from schedscope.engine.chance import as_state
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import DelayerState
from schedscope.engine.live import Live
from schedscope.engine.radix import Node, RadixCache
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.tokens import TOKEN_BYTES
from schedscope.engine.tracer import Tracer

_REQUEST_FACTS = ("rid", "priority", "routing_key", "extra_key", "cache_salt")
_SAMPLING_FACTS = SamplingParams.__slots__
_LIVE_FACTS = tuple(
    name
    for name in Live.__slots__
    if name not in {"said", "_tokens", "lock", "request", "rid", "row", "space", "waiting"}
)
"""What is kept as it is; the rest follows from the request, is tokens, or is slots."""
_STATE_FACTS = (
    "batch_is_full",
    "batch_is_full_pass",
    "last_entry_time",
    "last_prefill_only",
    "last_prefill_tokens",
    "max_prefill_bs",
    "new_token_ratio",
    "processed_tokens",
    "refresh_calls",
    "rows",
    "running_extend_tokens",
    "running_prefill_only",
)
_NODE_FACTS = ("id", "lock_ref", "last_access", "creation", "hit_count", "priority")


class Snapshot(NamedTuple):
    """Everything a scheduler's future depends on."""

    facts: dict[str, Any]
    """JSON-like values; requests and nodes as columns, a list per fact."""
    keys: list[bytes]
    """Tokens of each cache node, packed; nodes as `RadixCache.nodes` gives them."""
    sequences: list[bytes]
    """Prompt and output of each request, packed; requests as `held_requests` gives them."""


def held_requests(scheduler: Scheduler) -> list[Live]:
    """The requests that the scheduler still knows: those that live, and those that ended but are in a batch."""
    held = dict.fromkeys(scheduler.lives.values())
    state = scheduler.state
    held.update(dict.fromkeys((*state.running, *state.last_prefill)))
    held.update(dict.fromkeys(member.live for flying in state.in_flight for member in flying.batch.members))
    return list(held)


def take_snapshot(scheduler: Scheduler) -> Snapshot:
    """Take it between two steps. Raises nothing and changes nothing."""
    held = held_requests(scheduler)
    nodes = list(scheduler.state.cache.nodes())
    return Snapshot(pack_facts(scheduler, held, nodes), [node.key for node in nodes], [live.tokens for live in held])


def pack_facts(scheduler: Scheduler, held: Sequence[Live], nodes: Sequence[Node]) -> dict[str, Any]:
    """A snapshot without its tokens.

    Args:
        held: `held_requests(scheduler)`.
        nodes: its cache's nodes.
    """
    state = scheduler.state
    places = {live: i for i, live in enumerate(held)}
    return {
        "steps": scheduler.steps,
        "passes": scheduler.passes,
        "requests": _pack_requests(held),
        "lives": [places[live] for live in scheduler.lives.values()],
        "queue": [places[live] for live in state.queue],
        "running": [places[live] for live in state.running],
        "last_prefill": [places[live] for live in state.last_prefill],
        "in_flight": [_pack_in_flight(flying, places) for flying in state.in_flight],
        "chunked": None if state.chunked is None else places[state.chunked],
        "state": {name: getattr(state, name) for name in _STATE_FACTS},
        "random_state": state.random_state,
        "delayer": list(state.delayer),
        "prefill_batch_sizes": list(state.prefill_batch_sizes),
        "pool": {"num_pages": state.pool.num_pages, "available": state.pool.available},
        "cache": _pack_cache(state.cache, nodes),
    }


def restore_snapshot(snapshot: Snapshot, config: SchedulerConfig, tracer: Tracer | None = None) -> Scheduler:
    """A scheduler that goes on where `take_snapshot` left off, in other KV slots."""
    facts = snapshot.facts
    scheduler = Scheduler(config, tracer)
    state = scheduler.state
    scheduler.steps = facts["steps"]
    scheduler.passes = facts["passes"]
    state.pool.num_pages = facts["pool"]["num_pages"]
    nodes = _unpack_cache(facts["cache"], snapshot.keys, state.cache)
    held = _unpack_requests(facts["requests"], snapshot.sequences, nodes)
    _hand_out_slots(scheduler, held, facts["requests"]["held"])
    state.pool.set_aside(facts["pool"]["available"])
    scheduler.lives = {held[i].rid: held[i] for i in facts["lives"]}
    state.queue = [held[i] for i in facts["queue"]]
    state.running = [held[i] for i in facts["running"]]
    state.last_prefill = [held[i] for i in facts["last_prefill"]]
    state.in_flight = deque(_unpack_in_flight(packed, held) for packed in facts["in_flight"])
    state.chunked = None if facts["chunked"] is None else held[facts["chunked"]]
    for name in _STATE_FACTS:
        setattr(state, name, facts["state"][name])
    state.random_state = as_state(facts["random_state"])
    state.delayer = DelayerState(*facts["delayer"])
    state.prefill_batch_sizes = deque(facts["prefill_batch_sizes"], state.prefill_batch_sizes.maxlen)
    return scheduler


def _pack_in_flight(flying: InFlight, places: Mapping[Live, int]) -> dict[str, Any]:
    members = [[places[live], *span] for live, *span in flying.batch.members]
    return {"step": flying.step, "kind": flying.batch.kind, "members": members}


def _unpack_in_flight(packed: Mapping[str, Any], held: Sequence[Live]) -> InFlight:
    members = tuple(Member(held[i], *span) for i, *span in packed["members"])
    return InFlight(packed["step"], Batch(packed["kind"], members))


def _pack_requests(held: Sequence[Live]) -> dict[str, list[Any]]:
    columns = {name: [getattr(live.request, name) for live in held] for name in _REQUEST_FACTS}
    columns |= {name: [getattr(live.request.sampling, name) for live in held] for name in _SAMPLING_FACTS}
    columns |= {f"live_{name}": [getattr(live, name) for live in held] for name in _LIVE_FACTS}
    columns["lock"] = [None if live.lock is None else live.lock.id for live in held]
    columns["held"] = [len(live.row) for live in held]
    return columns


def _unpack_requests(columns: dict[str, list[Any]], sequences: Sequence[bytes], nodes: dict[int, Node]) -> list[Live]:
    held = []
    for i, sequence in enumerate(sequences):
        sampling = {name: columns[name][i] for name in _SAMPLING_FACTS}
        sampling["stop"] = tuple(sampling["stop"])
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        request = Request(
            prompt=sequence[: columns["live_prompt_len"][i] * TOKEN_BYTES],
            sampling=SamplingParams(**sampling),
            **{name: columns[name][i] for name in _REQUEST_FACTS},
        )
        live = Live(request, columns["live_priority"][i])
        for name in _LIVE_FACTS:
            setattr(live, name, columns[f"live_{name}"][i])
        live.tokens = sequence
        lock = columns["lock"][i]
        live.lock = None if lock is None else nodes[lock]
        held.append(live)
    return held


def _pack_cache(cache: RadixCache, nodes: Sequence[Node]) -> dict[str, Any]:
    page = cache.page_size * TOKEN_BYTES
    parents = [node.parent.id if node.parent is not None else 0 for node in nodes]
    return {
        "clock": cache.clock,
        "next_id": cache.next_id,
        "root": [getattr(cache.root, name) for name in _NODE_FACTS],
        "parents": parents,
        "spaces": [node.edge[:-page].decode() for node, parent in zip(nodes, parents, strict=True) if parent == 0],
        "nodes": {name: [getattr(node, name) for node in nodes] for name in _NODE_FACTS},
    }


def _unpack_cache(packed: dict[str, Any], keys: Sequence[bytes], cache: RadixCache) -> dict[int, Node]:
    cache.clock, cache.next_id = packed["clock"], packed["next_id"]
    page = cache.page_size * TOKEN_BYTES
    nodes = {0: cache.root}
    _set_facts(cache.root, packed["root"])
    spaces = iter(packed["spaces"])
    rows = zip(*(packed["nodes"][name] for name in _NODE_FACTS), strict=True)
    for key, parent_id, row in zip(keys, packed["parents"], rows, strict=True):
        parent = nodes[parent_id]
        space = next(spaces).encode() if parent_id == 0 else b""
        node = Node(row[0], parent, space + key[:page], key, parent.end + len(key) // TOKEN_BYTES)
        _set_facts(node, row)
        nodes[node.id] = node
        cache.adopt(node)
    return nodes


def _set_facts(node: Node, row: Sequence[Any]) -> None:
    for name, value in zip(_NODE_FACTS, row, strict=True):
        setattr(node, name, value)


def _hand_out_slots(scheduler: Scheduler, held: Sequence[Live], lengths: Sequence[int]) -> None:
    """Slots for every cache node, all of whole pages, then for what each request holds behind its locked prefix."""
    pool, nodes = scheduler.state.pool, list(scheduler.state.cache.nodes())
    owned = [length - live.protected_len for live, length in zip(held, lengths, strict=True)]
    slots: array[int] = array("i")
    pool.extend(slots, sum(map(len, nodes)) + sum(map(pool.whole, owned)))
    given = 0
    for node in nodes:
        node.slots = slots[given : given + len(node)]
        given += len(node)
    for live, count in zip(held, owned, strict=True):
        if live.lock is not None and live.protected_len:
            for node in scheduler.state.cache.path(live.lock):
                live.row.extend(node.slots)
        live.row.extend(slots[given : given + count])
        given += pool.whole(count)
