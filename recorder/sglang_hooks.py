"""Where SGLang's scheduler is watched: the methods that are wrapped, and whether this SGLang still has them."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from schedscope.recorder.sglang_pass import MIXING

VERIFIED = {
    "0.5.23": "all policies, chunked and mixed prefill, priority preemption, retraction, aborts, the prefill delayer, "
    "page sizes 1 and 16, with and without overlap"
}
"""Versions of SGLang whose recordings were replayed and found identical, and with what."""

Args = Sequence[Any]
Named = Mapping[str, Any]

log = logging.getLogger("schedscope.recorder")


class Guard(Protocol):
    """Holds the observer; see `schedscope.recorder.sglang_plugin`."""

    observer: Any

    def let_go(self, error: Exception) -> None:
        """End the recording: something in the observer failed."""


class Hook(NamedTuple):
    """A method that is wrapped."""

    target: str
    """Below `sglang.srt`."""
    parameters: tuple[str, ...]
    """That the method must have for us to understand it."""
    without: str
    """What is not recorded, or not right, if it can't be wrapped."""
    before: Callable[[Any, Args, Named], Any] | None = None
    """Called with the observer and the arguments; what it returns is given to `after`."""
    after: Callable[[Any, Any, Any, Args, Named], None] | None = None
    """Called with the observer, what `before` returned, the result, and the arguments."""
    needed_for: str | None = None
    """A kind of events, or `MIXING`; where the observer needs nothing for it, nothing is called."""


def _arg(args: Args, named: Named, place: int, name: str) -> Any:
    return args[place] if len(args) > place else named[name]


def _add_before(observer: Any, args: Args, named: Named) -> None:
    observer.arrives(_arg(args, named, 1, "req"))


def _add_after(observer: Any, _: Any, __: Any, args: Args, named: Named) -> None:
    observer.joined(_arg(args, named, 1, "req"))


def _abort(observer: Any, args: Args, named: Named) -> None:
    request = _arg(args, named, 1, "recv_req")
    observer.aborts(request.rid, request.abort_all)


def _turned_away(observer: Any, _: Any, __: Any, args: Args, named: Named) -> None:
    reason = _arg(args, named, 1, "abort_req").finished_reason
    observer.turned_away(_arg(args, named, 2, "req"), reason.get("message") if reason else None)


def _flushed(observer: Any, _: Any, done: bool, __: Args, ___: Named) -> None:
    if done:
        observer.flushed()


def _turn(observer: Any, _: Args, __: Named) -> None:
    observer.turns()


def _formed(observer: Any, _: Any, plan: Any, __: Args, ___: Named) -> None:
    observer.formed(plan.batch_to_run, plan.running_batch)


def _enter(observer: Any, args: Args, named: Named) -> None:
    observer.enters(_arg(args, named, 1, "running_batch"))


def _leave(observer: Any, _: Any, plan: Any, __: Args, ___: Named) -> None:
    observer.leaves(plan.running_batch)


def _paused(observer: Any, _: Any, __: Any, ___: Args, ____: Named) -> None:
    observer.rests()


def _sort(observer: Any, args: Args, named: Named) -> None:
    observer.passes.sorts(_arg(args, named, 1, "waiting_queue"))


def _sorted(observer: Any, _: Any, __: Any, args: Args, named: Named) -> None:
    observer.passes.sorted(_arg(args, named, 1, "waiting_queue"))


def _held(observer: Any, _: Any, rids: set[str], __: Args, ___: Named) -> None:
    observer.passes.held(rids)


def _budget(observer: Any, _: Any, __: Any, args: Args, ___: Named) -> None:
    observer.passes.begins(args[0])


def _continued(observer: Any, _: Any, __: Any, args: Args, named: Named) -> None:
    observer.passes.continued(args[0], _arg(args, named, 1, "req"))


def _looked(observer: Any, _: Any, result: Any, args: Args, named: Named) -> None:
    observer.passes.looked(args[0], _arg(args, named, 1, "req"), result._name_)


def _running(_: Any, args: Args, __: Named) -> list[Any]:
    return list(args[0].running_batch.reqs)


def _preempted(observer: Any, running: list[Any], done: bool, args: Args, _: Named) -> None:
    if done:
        observer.passes.preempted(running, args[0])


def _admitted(observer: Any, _: Args, __: Named) -> None:
    observer.passes.admitted()


def _gathered(observer: Any, _: Any, table: Any, __: Args, ___: Named) -> None:
    observer.passes.gathered(table.tolist())


def _negotiate(observer: Any, args: Args, _: Named) -> Any:
    return observer.passes.negotiates(args[0])


def _negotiated(observer: Any, found: tuple[float, Any], output: Any, args: Args, named: Named) -> None:
    observer.passes.negotiated(args[0], *found, _arg(args, named, 2, "token_usage"), output)


def _retracted(observer: Any, _: Any, result: Any, __: Args, ___: Named) -> None:
    observer.retracted(result[0])


def _computed(observer: Any, _: Any, __: Any, args: Args, named: Named) -> None:
    observer.computed(_arg(args, named, 1, "batch"))


def _inserted(observer: Any, _: Any, __: Any, args: Args, named: Named) -> None:
    observer.inserted(_arg(args, named, 1, "req"), _arg(args, named, 2, "up_to"))


def _evicted(observer: Any, _: Any, result: Any, __: Args, ___: Named) -> None:
    observer.evicted(result.num_tokens_evicted)


_SCHEDULER = "managers.scheduler.Scheduler"
_POLICY = "managers.schedule_policy.SchedulePolicy"
_ADDER = "managers.schedule_policy.PrefillAdder"
_BATCH = "managers.schedule_batch.ScheduleBatch"
_DELAYER = "managers.prefill_delayer.PrefillDelayer"
_CACHE = "mem_cache.unified_radix_cache.UnifiedRadixCache"

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_SCHEDULER}._add_request_to_queue", ("req",), "arrivals", _add_before, _add_after),
    Hook(f"{_SCHEDULER}.abort_request", ("recv_req",), "aborts", _abort),
    Hook(f"{_SCHEDULER}.send_abort_output", ("abort_req", "req"), "ends of aborted requests", after=_turned_away),
    Hook(f"{_SCHEDULER}.flush_cache", (), "flushes of the cache", after=_flushed),
    Hook(f"{_SCHEDULER}.get_next_batch_to_run", ("running_batch",), "steps", _turn, _formed),
    Hook(f"{_SCHEDULER}.get_new_batch_prefill", ("running_batch",), "passes", _enter, _leave),
    Hook(f"{_SCHEDULER}.pause_generation", (), "the last step before a pause, until it is over", after=_paused),
    Hook(f"{_SCHEDULER}.process_batch_result", ("batch",), "outputs and ends of requests", after=_computed),
    Hook(f"{_POLICY}.calc_priority", ("waiting_queue",), "the order of the queue", _sort, _sorted),
    Hook(f"{_POLICY}._compute_prefix_matches", (), "who is held back as a duplicate", after=_held),
    Hook(f"{_ADDER}.__init__", ("running_batch",), "budgets", after=_budget),
    Hook(f"{_ADDER}.add_chunked_req", ("req",), "continuing chunks", after=_continued),
    Hook(f"{_ADDER}.add_one_req", ("req",), "verdicts of admission", after=_looked),
    Hook(f"{_ADDER}.preempt_to_schedule", ("req",), "preemptions", _running, _preempted),
    Hook(f"{_DELAYER}._gather_info", (), "what ranks tell the prefill delayer", after=_gathered),
    Hook(
        f"{_DELAYER}._negotiate_should_allow_prefill",
        ("token_usage",),
        "verdicts of the prefill delayer",
        _negotiate,
        _negotiated,
    ),
    Hook(f"{_BATCH}.prepare_for_extend", (), "the mark behind admission", _admitted, needed_for=MIXING),
    Hook(f"{_BATCH}.retract_decode", (), "retractions", after=_retracted),
    Hook(f"{_CACHE}.checkpoint", ("req", "up_to"), "inserts into the cache", after=_inserted, needed_for="insert"),
    Hook(f"{_CACHE}.evict", ("params",), "evictions", after=_evicted, needed_for="evict"),
    Hook(f"{_CACHE}.evict_for_alloc", (), "evictions", after=_evicted, needed_for="evict"),
)


def register(guard: Guard, attach: Callable[[Any], None]) -> dict[str, str]:
    """Have SGLang wrap the methods that it has, and say in the log which it lacks.

    Args:
        attach: called with every scheduler that is built.

    Returns target and what is not recorded, of those.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    version = sglang_version()
    missing: dict[str, str] = {}
    for hook in HOOKS:
        problem = _problem(hook)
        if problem is None:
            HookRegistry.register(f"sglang.srt.{hook.target}", _around(hook, guard), HookType.AROUND)
        else:
            missing[hook.target] = f"{hook.without} ({problem})"
    HookRegistry.register(f"sglang.srt.{_SCHEDULER}.__init__", _built(attach), HookType.AROUND)
    if version not in VERIFIED:
        known = ", ".join(VERIFIED)
        lost = "".join(f"; not recorded: {effect.partition(' (')[0]}: {name}" for name, effect in missing.items())
        log.warning("SGLang %s was not verified (%s was); replay will show what holds%s", version, known, lost)
    return missing


def unapplied() -> dict[str, str]:
    """Hooks that SGLang was given and did not apply, once it has applied the others."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return {
        hook.target: hook.without
        for hook in HOOKS
        if f"sglang.srt.{hook.target}" in HookRegistry._hooks
        and f"sglang.srt.{hook.target}" not in HookRegistry._patched
    }


def sglang_version() -> str:
    """Of the SGLang that is installed."""
    return importlib.metadata.version("sglang")


def _problem(hook: Hook) -> str | None:
    """Why a method can't be wrapped; None: it can."""
    try:
        method = pkgutil.resolve_name(f"sglang.srt.{hook.target}")
        names = inspect.signature(method).parameters
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    lacking = [name for name in hook.parameters if name not in names]
    return f"it has no parameter {', '.join(lacking)}" if lacking else None


def _built(attach: Callable[[Any], None]) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], scheduler: Any, *args: Any, **named: Any) -> Any:
        result = original(scheduler, *args, **named)
        attach(scheduler)
        return result

    return hook


def _around(hook: Hook, guard: Guard) -> Callable[..., Any]:
    """The wrapper of a method: the original runs exactly once, and outside of what is guarded.

    Between two of its calls the model has been computed and the processor's caches are cold, so what counts is how many
    functions and objects are touched. That is why it looks after exceptions and time by itself.
    """
    before, after, needed_for = hook.before, hook.after, hook.needed_for
    clock_ns = time.monotonic_ns

    def around(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        observer = guard.observer
        if observer is None or (needed_for is not None and needed_for not in observer.needs):
            return original(*args, **named)
        found = None
        if before is not None:
            began_ns = clock_ns()
            try:
                found = before(observer, args, named)
            except Exception as error:
                guard.let_go(error)
            observer.tracer.spent_ns += clock_ns() - began_ns
        result = original(*args, **named)
        if after is not None and guard.observer is observer:
            began_ns = clock_ns()
            try:
                after(observer, found, result, args, named)
            except Exception as error:
                guard.let_go(error)
            observer.tracer.spent_ns += clock_ns() - began_ns
        return result

    return around
