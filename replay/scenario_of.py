"""A recorded pass as a scenario: a file to play with, to send to somebody, to keep as a test. No token id is in it.

The cache and the running batch are described as a scenario describes them, by prompts that were computed one after the
other, which keeps what matches and what is free, but not every clock in the tree. So the scenario is run, and says
whether it comes to the recorded decision.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import yaml
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.engine.radix import Node, RadixCache
from schedscope.engine.tokens import TOKEN_BYTES, length
from schedscope.engine.view import Chunked, Running, View, Waiting
from schedscope.replay.moment import Moment, decide_again
from schedscope.replay.scenario import Scenario
from schedscope.replay.scenario_check import compare
from schedscope.replay.scenario_run import describe_plan, run_scenario

_EXPECTED = ("order", "deprioritized", "admitted", "preempted", "stop")
_NOT_IN_SCENARIOS = frozenset(
    {"compat", "dp_size", "enable_dp_attention", "max_total_tokens", "disable_overlap_schedule"}
)


class Scene(NamedTuple):
    """A scenario made of a pass."""

    document: dict[str, Any]
    differs: str | None
    """Where it comes to another decision than the recorded one; None: nowhere."""

    def to_yaml(self) -> str:
        """The scenario's file."""
        return str(yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True, width=110))


def scenario_of(moment: Moment, name: str) -> Scene:
    """Make a scenario of a pass, run it, and compare. Raises UsageError for a pass that a gate ended.

    Args:
        name: its `id`.
    """
    plan = decide_again(moment)
    if plan.ordering is None:
        raise UsageError(f"pass {moment.number}: a gate ended the step, so there is no pass to describe")
    outcome = describe_plan(plan)
    expected = {key: outcome[key] for key in _EXPECTED}
    document = {**_Writer(moment).document(name), "expect": expected}
    try:
        found = run_scenario(msgspec.convert(document, Scenario)).expect
        difference = next((str(each) for each in compare(expected, found)), None)
    except (SchedscopeError, msgspec.ValidationError) as error:
        difference = str(error)
    if difference is not None:
        document["reason"] = f"Made of a recorded pass, to which it does not come exactly: {difference}"
        document["verified"] = False
    return Scene(document, difference)


class _Writer:
    """Names the pieces that sequences share, and describes a moment by them."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._pieces = RadixCache(page_size=1)
        self._fresh = 0
        self._lengths: dict[str, int] = {}
        view = moment.view
        self._leaves = list(_leaves(view.cache))
        for sequence, _ in self._leaves:
            self._learn(sequence)
        for request in view.queue:
            self._learn(request.tokens[: request.prompt_len * TOKEN_BYTES])
            self._learn(request.tokens)
        for running in view.running:
            self._learn(_held(running))

    def document(self, name: str) -> dict[str, Any]:
        view, config = self._moment.view, self._moment.config
        body = {
            "cache": [self._entry(sequence, node) for sequence, node in self._leaves if not node.lock_ref],
            "running": [self._running(request) for request in view.running],
            "chunked_req": None if view.chunked is None else self._chunked(view.chunked),
            "pool": {"free": view.available},
            "waiting_queue": [self._waiting(request) for request in view.queue],
            "processed_tokens": view.processed_tokens,
            "batch_is_full": view.batch_is_full,
            "delayer": _delayer(view) if config.enable_prefill_delayer else None,
        }
        return {
            "version": 1,
            "id": name,
            "kind": "pass",
            "title": f"Pass {self._moment.number}, as recorded",
            "config": _settings(config, view),
            "segments": self._lengths,
            **{key: value for key, value in body.items() if value},
        }

    def _learn(self, sequence: bytes) -> None:
        self._pieces.insert(sequence, b"", array("i", bytes(len(sequence))))

    def _parts(self, sequence: bytes) -> list[str]:
        """The names of a sequence's pieces; all of it was learnt."""
        found = self._pieces.match(sequence)
        names = []
        for node in self._pieces.path(self._pieces.resolve(found)):
            names.append(f"s{node.id}")
            self._lengths[names[-1]] = len(node)
        return names

    def _new(self, count: int) -> list[str]:
        if count <= 0:
            return []
        self._fresh += 1
        self._lengths[f"n{self._fresh}"] = count
        return [f"n{self._fresh}"]

    def _entry(self, sequence: bytes, node: Node) -> dict[str, Any]:
        return {"seq": self._parts(sequence), **_namespace(_space(node, self._moment.config.page_size))}

    def _waiting(self, request: Waiting) -> dict[str, Any]:
        prompt = request.tokens[: request.prompt_len * TOKEN_BYTES]
        whole, own = self._parts(request.tokens), self._parts(prompt)
        return {
            "rid": request.rid,
            "input": own,
            **({"output": whole[len(own) :]} if request.output_len else {}),
            **self._common(request),
            **_namespace(request.space),
            "arrival_processed_tokens": request.arrival_processed_tokens,
            "retracted": request.retracted,
        }

    def _running(self, request: Running) -> dict[str, Any]:
        held = _held(request)
        node = request.lock
        return {
            "rid": request.rid,
            "input": [*self._parts(held), *self._new(request.prompt_len - length(held))],
            "output": request.output_len,
            **self._common(request),
            **({} if node is None else _namespace(_space(node, self._moment.config.page_size))),
            "finished": request.finished,
        }

    def _chunked(self, request: Chunked) -> dict[str, Any]:
        return {
            "rid": request.rid,
            "input": self._new(request.prompt_len),
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.ignore_eos,
            "done": request.prefix_len,
        }

    def _common(self, request: Waiting | Running) -> dict[str, Any]:
        config = self._moment.config
        sent = config.enable_priority_scheduling and request.priority != config.lowest_priority
        return {
            "max_new_tokens": request.max_new_tokens,
            **({"ignore_eos": True} if request.ignore_eos else {}),
            **({"priority": request.priority} if sent else {}),
            **({"routing_key": request.routing_key} if request.routing_key is not None else {}),
            "entry_time": request.entry_time,
        }


def _leaves(cache: RadixCache) -> Iterator[tuple[bytes, Node]]:
    """Whole sequences in the cache and the nodes that end them, the least recent first."""
    leaves = [node for node in cache.nodes() if not node.children]
    for node in sorted(leaves, key=lambda leaf: leaf.last_access):
        yield b"".join(each.key for each in cache.path(node)), node


def _held(request: Running) -> bytes:
    """What a running request keeps in the cache of its prompt."""
    keys, node = [], request.lock
    while node is not None and node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return b"".join(reversed(keys))[: request.prompt_len * TOKEN_BYTES]


def _space(node: Node, page_size: int) -> bytes:
    """The namespace that a node is in: what its first page is kept under at the root, before that page."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node.edge[: max(0, len(node.edge) - page_size * TOKEN_BYTES)]


def _namespace(space: bytes) -> dict[str, Any]:
    if not space:
        return {}
    extra_key, cache_salt = json.loads(space)
    return {"extra_key": extra_key, "cache_salt": cache_salt}


def _settings(config: SchedulerConfig, view: View) -> dict[str, Any]:
    """Settings that are not the default, and the running estimate."""
    usual = SchedulerConfig().to_dict()
    changed = {name: value for name, value in config.to_dict().items() if usual[name] != value}
    kept = {name: value for name, value in changed.items() if name not in _NOT_IN_SCENARIOS}
    return {**kept, "new_token_ratio": view.new_token_ratio}


def _delayer(view: View) -> dict[str, Any]:
    state = view.delayer
    return {
        "skip_first": state.skip_first,
        "delayed_count": state.delayed_count,
        "age_ms": (view.now - state.start_time) * 1000.0 if state.delayed_count is not None else 0.0,
        "max_prefill_bs": view.max_prefill_bs,
        "other_ranks": [report._asdict() for report in view.reports],
    }
