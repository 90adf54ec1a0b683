"""Build the state that a scenario describes, the way a server would come to it: request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import DelayerState
from schedscope.engine.errors import ConfigError, ScenarioError
from schedscope.engine.live import Live
from schedscope.engine.pool import PoolExhaustedError
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.state import SchedulerState
from schedscope.replay.scenario import CacheEntry, Part, Scenario, SceneRequest

FIRST_SEGMENT_TOKEN = 2**30
LONGEST_COUNT = 7
"""Digits."""
ROOMY_POOL = 2**26
"""Tokens of a pool in which nothing is ever evicted."""


class Vocabulary:
    """Token ids for segments: all different, within a segment and between segments."""

    def __init__(self, scenario: Scenario) -> None:
        self._id = scenario.id
        self._lengths = dict(scenario.segments)
        for part in _all_parts(scenario):
            if isinstance(part, str) and ":" in part:
                name, length = self._split(part)
                if name not in scenario.segments:
                    self._lengths[name] = max(self._lengths.get(name, 0), length)
        self._segments: dict[str, bytes] = {}
        self._next = FIRST_SEGMENT_TOKEN

    def fresh(self, count: int) -> bytes:
        """Tokens used nowhere else."""
        made = tokens.encode(range(self._next, self._next + count))
        self._next += count
        return made

    def sequence(self, parts: Sequence[Part]) -> bytes:
        """The tokens of a sequence."""
        return b"".join(self._part(part) for part in parts)

    def _part(self, part: Part) -> bytes:
        if isinstance(part, dict):
            if set(part) != {"tokens"}:
                raise ScenarioError(f"{self._id}: a sequence part is a name, name:n or {{tokens: [...]}}")
            for token in part["tokens"]:
                if not 0 <= token < FIRST_SEGMENT_TOKEN:
                    raise ScenarioError(f"{self._id}: literal token {token} is not in 0..2**30-1")
            return tokens.encode(part["tokens"])
        name, _, _ = part.partition(":")
        if name not in self._lengths:
            raise ScenarioError(f"{self._id}: segment {name!r} has no length")
        if name not in self._segments:
            self._segments[name] = self.fresh(self._lengths[name])
        whole = self._segments[name]
        if ":" not in part:
            return whole
        length = self._split(part)[1]
        if length > self._lengths[name]:
            raise ScenarioError(f"{self._id}: {part!r} is longer than its segment ({self._lengths[name]} tokens)")
        return whole[: length * tokens.TOKEN_BYTES]

    def _split(self, part: str) -> tuple[str, int]:
        name, _, length = part.partition(":")
        if not (length.isascii() and length.isdigit() and len(length) <= LONGEST_COUNT):
            raise ScenarioError(f"{self._id}: {part[:80]!r}: expected name:count")
        return name, int(length)


def _all_parts(scenario: Scenario) -> list[Part]:
    parts: list[Part] = []
    for entry in scenario.cache:
        parts += entry.seq
    chunked = [scenario.chunked_req] if scenario.chunked_req else []
    for request in (*scenario.running, *chunked, *scenario.queue()):
        parts += request.input
        parts += request.output if isinstance(request.output, list) else []
    for probe in scenario.probe:
        parts += probe.seq
    for action in scenario.ops:
        parts += action.insert or action.touch or action.lock or action.probe or []
    return parts


def scenario_config(scenario: Scenario, **changes: Any) -> SchedulerConfig:
    """The scheduler configuration that a scenario's `config` means."""
    settings = {k: v for k, v in scenario.config.items() if k != "new_token_ratio"}
    chunk = settings.get("chunked_prefill_size")
    if isinstance(chunk, int) and chunk <= 0:
        settings["chunked_prefill_size"] = None
    if settings.get("chunked_prefill_size") is None:
        settings.pop("enable_mixed_chunk", None)
    if settings.get("prefill_delayer_max_delay_ms", 0) is None:
        del settings["prefill_delayer_max_delay_ms"]
    settings.update(changes)
    try:
        return SchedulerConfig.from_dict(settings)
    except (TypeError, ConfigError) as error:
        raise ScenarioError(f"{scenario.id}: config: {error}") from None


class StateBuilder:
    """Makes the state of a `pass` scenario; `words` then knows all its tokens."""

    def __init__(self, scenario: Scenario, config: SchedulerConfig) -> None:
        self._scenario = scenario
        self._config = config
        self.words = Vocabulary(scenario)

    def build(self) -> SchedulerState:
        """The state before the first pass. Raises ScenarioError, ConfigError."""
        try:
            return self._build()
        except PoolExhaustedError as error:
            raise ScenarioError(f"{self._scenario.id}: the state doesn't fit: {error}") from None

    def _build(self) -> SchedulerState:
        if self._scenario.pool is None:
            return self._build_with(self._config)
        # Nothing may be evicted on the way: build with room to spare, then take away what is too much.
        state = self._build_with(self._config.replace(max_total_tokens=ROOMY_POOL))
        state.pool.shrink(self._scenario.pool.free)
        return state

    def _build_with(self, config: SchedulerConfig) -> SchedulerState:
        scenario = self._scenario
        self.words = Vocabulary(scenario)
        state = SchedulerState(config)
        for entry in scenario.cache:
            self.cache(state, entry)
        for request in scenario.running:
            self._run_request(state, request)
        if scenario.chunked_req is not None:
            request = scenario.chunked_req
            live = self._live(state, request)
            if request.done is None or not 0 < request.done < live.prompt_len:
                raise ScenarioError(f"{scenario.id}: chunked_req needs `done`, less than its prompt")
            if config.chunked_prefill_size is None:
                raise ScenarioError(f"{scenario.id}: chunked_req needs a chunked_prefill_size")
            self._prefill(state, live, request.done)
            live.extend_end = live.prefix_len
            state.chunked = live
        queue = scenario.queue()
        chunked = [scenario.chunked_req] if scenario.chunked_req else []
        rids = Counter(request.rid for request in (*queue, *scenario.running, *chunked))
        if rids and rids.most_common(1)[0][1] > 1:
            raise ScenarioError(f"{scenario.id}: rid {rids.most_common(1)[0][0]!r} stands there twice")
        for request in queue:
            live = self._live(state, request)
            self._generate(live, request)
            live.retracted = request.retracted if request.retracted is not None else live.output_len > 0
            state.queue.append(live)
        state.processed_tokens = scenario.processed_tokens
        state.batch_is_full = scenario.batch_is_full
        state.new_token_ratio = scenario.config.get("new_token_ratio", 0.7)
        if scenario.delayer is not None:
            start = scenario.delayer
            state.delayer = DelayerState(start.delayed_count, -start.age_ms / 1000.0, start.skip_first)
            state.max_prefill_bs = start.max_prefill_bs
        state.evictions.clear()
        return state

    def cache(self, state: SchedulerState, entry: CacheEntry) -> None:
        """A request that runs alone and finishes."""
        request = Request(
            rid="cache",
            prompt=self.words.sequence(entry.seq),
            priority=entry.priority,
            extra_key=entry.extra_key,
            cache_salt=entry.cache_salt,
        )
        live = Live(request, state.resolved_priority(request) if entry.priority is not None else 0)
        self._prefill(state, live, live.prompt_len)
        lock = live.lock
        if entry.locked and lock is not None:
            state.cache.lock(lock)
        state.release(live, checkpoint=False)

    def _live(self, state: SchedulerState, request: SceneRequest) -> Live:
        made = Request(
            rid=request.rid,
            prompt=self.words.sequence(request.input),
            sampling=SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=request.ignore_eos),
            priority=request.priority,
            routing_key=request.routing_key,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
        )
        live = Live(made, state.resolved_priority(made))
        live.entry_time = request.entry_time
        live.arrival_processed_tokens = request.arrival_processed_tokens
        return live

    def _prefill(self, state: SchedulerState, live: Live, end: int) -> None:
        """Compute the first `end` tokens alone, and keep them in the cache, locked."""
        cache = state.cache
        match = cache.match(live.tokens, live.space, max(end - 1, 0))
        node = cache.touch(match) if match.length else cache.root
        if state.config.radix_force_miss:
            match, node = match._replace(length=0), cache.root
        cache.lock(node)
        live.lock = node
        live.protected_len = live.prefix_len = match.length
        for above in cache.path(node):
            live.row.extend(above.slots)
        state.rows += 1
        wanted = end - match.length + (state.config.page_size if state.config.page_size > 1 else 0)
        if not cache.disabled:
            state.make_room(wanted)
        state.pool.extend(live.row, end)
        live.kv_len = live.extend_end = end
        live.fill_len = live.length
        state.checkpoint(live, end)

    def _generate(self, live: Live, request: SceneRequest) -> None:
        output = request.output
        made = self.words.fresh(output) if isinstance(output, int) else self.words.sequence(output)
        live.tokens += made
        live.output_len = tokens.length(made)

    def _run_request(self, state: SchedulerState, request: SceneRequest) -> None:
        live = self._live(state, request)
        self._prefill(state, live, live.prompt_len)
        output = request.output
        made = self.words.fresh(max(output, 1)) if isinstance(output, int) else self.words.sequence(output)
        for i, token in enumerate(tokens.decode(made)):
            if i > 0:
                state.allocate_decode([live])
            live.append(token)
        if request.finished:
            live.finished = True
            state.release(live, checkpoint=True)
        state.running = [*state.running, live]
