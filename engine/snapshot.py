"""A scheduler's whole state as plain values, and back: what a checkpoint in a recording holds.

Only dictionaries, lists, numbers, texts and bytes, so that any format can carry it; no pickle.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import asdict
from typing import Any

from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import DelayerState
from schedscope.engine.live import Live
from schedscope.engine.radix import Node, RadixCache
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.tracer import Tracer

_LIVE_FACTS = tuple(
    name for name in Live.__slots__ if name not in {"lock", "prompt_len", "request", "row", "space", "waiting"}
)
"""What is kept as it is; the rest follows from the request or is packed."""
_STATE_FACTS = (
    "batch_is_full",
    "batch_is_full_pass",
    "last_entry_time",
    "last_prefill_tokens",
    "max_prefill_bs",
    "new_token_ratio",
    "processed_tokens",
    "refresh_calls",
    "rows",
    "running_extend_tokens",
)


def take_snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """Everything the scheduler's future depends on. Take it between two steps."""
    state = scheduler.state
    held = list(scheduler.lives.values())
    held += [live for live in (*state.running, *state.last_prefill) if live.rid not in scheduler.lives]
    places = {id(live): i for i, live in enumerate(held)}
    return {
        "steps": scheduler.steps,
        "passes": scheduler.passes,
        "requests": [_pack_live(live) for live in held],
        "lives": [places[id(live)] for live in scheduler.lives.values()],
        "queue": [places[id(live)] for live in state.queue],
        "running": [places[id(live)] for live in state.running],
        "last_prefill": [places[id(live)] for live in state.last_prefill],
        "chunked": None if state.chunked is None else places[id(state.chunked)],
        "state": {name: getattr(state, name) for name in _STATE_FACTS},
        "random_state": state.random_state,
        "delayer": list(state.delayer),
        "prefill_batch_sizes": list(state.prefill_batch_sizes),
        "free_pages": list(state.pool.snapshot()),
        "cache": _pack_cache(state.cache),
    }


def restore_snapshot(snapshot: dict[str, Any], config: SchedulerConfig, tracer: Tracer | None = None) -> Scheduler:
    """A scheduler that goes on where `take_snapshot` left off."""
    scheduler = Scheduler(config, tracer)
    state = scheduler.state
    scheduler.steps = snapshot["steps"]
    scheduler.passes = snapshot["passes"]
    nodes = _unpack_cache(snapshot["cache"], state.cache)
    held = [_unpack_live(packed, nodes) for packed in snapshot["requests"]]
    scheduler.lives = {held[i].rid: held[i] for i in snapshot["lives"]}
    state.queue = [held[i] for i in snapshot["queue"]]
    state.running = [held[i] for i in snapshot["running"]]
    state.last_prefill = [held[i] for i in snapshot["last_prefill"]]
    state.chunked = None if snapshot["chunked"] is None else held[snapshot["chunked"]]
    for name in _STATE_FACTS:
        setattr(state, name, snapshot["state"][name])
    if snapshot["random_state"] is not None:
        version, words, gauss = snapshot["random_state"]
        state.random_state = RandomState((version, tuple(words), gauss))
    state.delayer = DelayerState(*snapshot["delayer"])
    state.prefill_batch_sizes = deque(snapshot["prefill_batch_sizes"], state.prefill_batch_sizes.maxlen)
    state.pool.restore(*snapshot["free_pages"])
    return scheduler


def _pack_live(live: Live) -> dict[str, Any]:
    packed: dict[str, Any] = {name: getattr(live, name) for name in _LIVE_FACTS}
    packed["row"] = live.row.tobytes()
    packed["lock"] = None if live.lock is None else live.lock.id
    packed["request"] = asdict(live.request)
    return packed


def _unpack_live(packed: dict[str, Any], nodes: dict[int, Node]) -> Live:
    facts = dict(packed["request"])
    sampling = dict(facts.pop("sampling"))
    sampling["stop"] = tuple(sampling["stop"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    live = Live(Request(**facts, sampling=SamplingParams(**sampling)), packed["priority"])
    for name in _LIVE_FACTS:
        setattr(live, name, packed[name])
    live.row = array("i", packed["row"])
    live.lock = None if packed["lock"] is None else nodes[packed["lock"]]
    return live


def _pack_cache(cache: RadixCache) -> dict[str, Any]:
    return {
        "clock": cache.clock,
        "next_id": cache.next_id,
        "root": _pack_node(cache.root),
        "nodes": [_pack_node(node) for node in cache.nodes()],
    }


def _pack_node(node: Node) -> list[Any]:
    return [
        node.id,
        None if node.parent is None else node.parent.id,
        node.edge,
        node.key,
        node.end,
        node.slots.tobytes(),
        node.lock_ref,
        node.last_access,
        node.creation,
        node.hit_count,
        node.priority,
    ]


def _unpack_cache(packed: dict[str, Any], cache: RadixCache) -> dict[int, Node]:
    cache.clock, cache.next_id = packed["clock"], packed["next_id"]
    nodes: dict[int, Node] = {0: cache.root}
    for number, parent, edge, key, end, slots, *facts in (packed["root"], *packed["nodes"]):
        if parent is None:
            node = cache.root
        else:
            node = nodes[number] = Node(number, nodes[parent], edge, key, end)
            node.slots = array("i", slots)
        node.lock_ref, node.last_access, node.creation, node.hit_count, node.priority = facts
        if parent is not None:
            cache.adopt(node)
    return nodes
