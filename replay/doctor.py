"""Examines a run: runs detectors over it, and tries on recorded passes what they advise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

from schedscope.engine.decision import Plan
from schedscope.engine.errors import SchedscopeError, UsageError
from schedscope.recorder.run import Run
from schedscope.replay.case import Case
from schedscope.replay.detect_cache import (
    apart_by_namespace,
    cold_prefix_storm,
    duplicate_prefill,
    evicted_before_use,
    held_back,
    low_hit_rate,
    queue_too_long,
    silent_fallback,
    thrashing_pool,
)
from schedscope.replay.detect_log import dead_metrics, lost_records
from schedscope.replay.detect_memory import (
    excessive_preemption,
    pointless_preemption,
    repeated_victims,
    retraction_storm,
)
from schedscope.replay.detect_ranks import delayer_mixed, delayer_veto, rank_behind
from schedscope.replay.detect_waiting import (
    blocked_head,
    budget_limit,
    chunk_monopoly,
    decode_starvation,
    latched_full,
    never_fits,
    priority_inversion,
    rid_ties,
    starvation,
)
from schedscope.replay.finding import Checked, Finding, Severity, Trial
from schedscope.replay.redecide import redecide

GROUP = "schedscope.detectors"
"""Entry points of this group are detectors, too."""

Look = Callable[..., Iterable[Finding]]
"""`look(case, *, threshold=default, ...)`: reads the case and changes nothing."""
Needs = Literal["steps", "passes", "tokens", "decisions", "evictions"]


class Detector(NamedTuple):
    """A way to look at a run."""

    name: str
    look: Look
    needs: Needs = "steps"
    """What has to be recorded for it to judge; other findings of it it says itself."""


BUILT_IN = (
    Detector("never_fits", never_fits, "decisions"),
    Detector("starvation", starvation),
    Detector("blocked_head", blocked_head, "decisions"),
    Detector("latched_full", latched_full),
    Detector("priority_inversion", priority_inversion),
    Detector("rid_ties", rid_ties, "decisions"),
    Detector("chunk_monopoly", chunk_monopoly, "passes"),
    Detector("decode_starvation", decode_starvation),
    Detector("budget_limit", budget_limit, "decisions"),
    Detector("queue_too_long", queue_too_long, "passes"),
    Detector("silent_fallback", silent_fallback, "passes"),
    Detector("held_back", held_back, "decisions"),
    Detector("cold_prefix_storm", cold_prefix_storm, "decisions"),
    Detector("duplicate_prefill", duplicate_prefill, "decisions"),
    Detector("evicted_before_use", evicted_before_use, "decisions"),
    Detector("thrashing_pool", thrashing_pool, "evictions"),
    Detector("low_hit_rate", low_hit_rate, "tokens"),
    Detector("apart_by_namespace", apart_by_namespace, "tokens"),
    Detector("retraction_storm", retraction_storm),
    Detector("repeated_victims", repeated_victims),
    Detector("pointless_preemption", pointless_preemption, "decisions"),
    Detector("excessive_preemption", excessive_preemption, "passes"),
    Detector("delayer_veto", delayer_veto, "passes"),
    Detector("delayer_mixed", delayer_mixed, "passes"),
    Detector("rank_behind", rank_behind),
    Detector("dead_metrics", dead_metrics),
    Detector("lost_records", lost_records),
)


@dataclass(frozen=True, slots=True)
class Examination:
    """What came of it."""

    findings: tuple[Finding, ...]
    """The worst first."""
    examined: tuple[str, ...]
    """Detectors that could judge."""
    not_judged: Mapping[str, str]
    """Others, and why."""
    waiting_s: float
    """All waiting in the run: what its requests spent in the queue, together, as `explain run` has it, seconds."""
    lasts_s: float
    """How long the run was recorded, seconds."""
    requests: int
    """That came."""

    @property
    def worst(self) -> Severity | None:
        """Of the findings."""
        return min((each.severity for each in self.findings), key=lambda each: each.rank, default=None)


def known_detectors(extra: Sequence[str] = ()) -> dict[str, Detector]:
    """The built-in ones, those of installed packages, and `package.module:function` ones, by name.

    Raises UsageError for one that can't be loaded.
    """
    found = {each.name: each for each in BUILT_IN}
    for point in entry_points(group=GROUP):
        try:
            found[point.name] = Detector(point.name, _callable(point.name, point.load()))
        except (ImportError, AttributeError) as error:
            raise UsageError(f"detector {point.name} of {point.value} can't be loaded: {error}") from None
    for path in extra:
        module, colon, name = path.partition(":")
        if not colon or not module or not name:
            raise UsageError(f"--detector {path}: expected package.module:function")
        try:
            look = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"--detector {path}: can't be loaded: {error}") from None
        found[name] = Detector(name, _callable(path, look))
    return found


def _callable(name: str, look: Any) -> Look:
    if not callable(look):
        raise UsageError(f"detector {name}: not a function")
    made: Look = look
    return made


def thresholds(detector: Detector) -> dict[str, Any]:
    """The names of its thresholds, with their defaults."""
    parameters = inspect.signature(detector.look).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def examine(
    run: Run,
    detectors: Iterable[Detector] = BUILT_IN,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    check: bool = True,
    case: Case | None = None,
) -> Examination:
    """Let detectors look at a run.

    Args:
        settings: thresholds by detector and name.
        check: whether to try what they advise on recorded passes.
        case: of this run, if it is already there.

    Raises RunNotFoundError for a run in which nothing was recorded, RunFormatError for one that can't be read,
    UsageError for a detector that fails.
    """
    run.check_recorded()
    case = case or Case.of_run(run)
    found: list[Finding] = []
    examined, not_judged = [], {}
    for detector in detectors:
        reason = why_not(case, detector)
        if reason is not None:
            not_judged[detector.name] = reason
            continue
        examined.append(detector.name)
        found += _look(case, detector, (settings or {}).get(detector.name, {}))
    found.sort(key=lambda each: (each.severity.rank, -each.cost_s, each.detector, each.rank or 0))
    if check:
        found = [_tried(case, finding) for finding in found]
    requests: int = case.one("SELECT count(*) AS n FROM measured")["n"]
    return Examination(tuple(found), tuple(examined), not_judged, case.queued_s, case.lasts_s(), requests)


def _look(case: Case, detector: Detector, settings: Mapping[str, Any]) -> list[Finding]:
    if detector in BUILT_IN:
        return list(detector.look(case, **settings))
    try:
        return list(detector.look(case, **settings))
    except Exception as error:
        raise UsageError(f"detector {detector.name} failed: {error!r}") from error


def why_not(case: Case, detector: Detector) -> str | None:
    """Why a detector has nothing to read; None: it has."""
    if detector.needs == "passes" and case.level == "steps":
        return "passes are not recorded (--level passes)"
    if detector.needs == "tokens" and not case.has_tokens:
        return "tokens are not recorded (--tokens hashed or full), so what prompts share isn't known"
    if detector.needs in {"decisions", "evictions"} and not case.has_decisions:
        return "decisions are not recorded (--level decisions)"
    if detector.needs == "evictions" and not case.has_evictions:
        return "what leaves the cache is not recorded (--level full)"
    return None


# ---- trying ------------------------------------------------------------------------------------------------------


def _tried(case: Case, finding: Finding) -> Finding:
    """The finding with what came of its trials, up to the first that helps."""
    checked: list[Checked] = []
    for trial in finding.trials:
        try:
            moment = case.moment(trial.rank, trial.pass_number)
        except SchedscopeError as error:
            return replace(finding, unchecked=str(error))
        try:
            again = redecide(moment, None, trial.settings)
        except SchedscopeError as error:
            checked.append(Checked(trial, False, f"can't run: {error}"))
            continue
        checked.append(_judged(trial, again.recorded, again.other))
        if checked[-1].helps:
            break
    return replace(finding, checked=tuple(checked))


def _judged(trial: Trial, recorded: Plan, other: Plan) -> Checked:
    before, after = _outcome(recorded), _outcome(other)
    match trial.hope:
        case "admits":
            helps = trial.rid in after.admitted
            words = f"{trial.rid} would be admitted" if helps else f"{trial.rid} would still not be admitted"
        case "admits_more":
            helps = len(after.admitted) > len(before.admitted)
            words = f"it would admit {len(after.admitted)} instead of {len(before.admitted)}"
        case "moves_up":
            place, new = before.places.get(trial.rid or ""), after.places.get(trial.rid or "")
            helps = place is not None and new is not None and new < place
            words = f"{trial.rid} would stand at place {new} instead of {place}"
            words += f" and {'' if trial.rid in after.admitted else 'still not '}be admitted" if helps else ""
        case "finds_more":
            helps = after.cached > before.cached
            words = f"what it admits would find {after.cached:,} tokens cached instead of {before.cached:,}"
        case "preempts_less":
            helps = after.preempted < before.preempted
            words = f"it would preempt {after.preempted} instead of {before.preempted}"
    return Checked(trial, helps, words)


class _Outcome(NamedTuple):
    """What matters of a plan."""

    admitted: tuple[str, ...]
    places: Mapping[str, int]
    cached: int
    """Tokens that those of the queue which are admitted find."""
    preempted: int


def _outcome(plan: Plan) -> _Outcome:
    if plan.ordering is None or plan.admission is None:
        return _Outcome((), {}, 0, 0)
    places = {place.request.rid: after for after, place in enumerate(plan.ordering.ranked)}
    admitted = plan.admission.admitted
    return _Outcome(
        admitted=tuple(verdict.rid for verdict in admitted),
        places=places,
        cached=sum(verdict.prefix_len for verdict in admitted if verdict.rid in places),
        preempted=len(plan.admission.preempted),
    )


def settings_words(settings: Mapping[str, str]) -> str:
    """Settings as `replay pass` takes them: `--policy P --set NAME=VALUE`."""
    return " ".join(_option(name, value) for name, value in settings.items())


def _option(name: str, value: str) -> str:
    return f"--policy {value}" if name == "schedule_policy" else f"--set {name}={value}"


def parse_thresholds(words: Sequence[str], known: Mapping[str, Detector]) -> dict[str, dict[str, Any]]:
    """`DETECTOR.NAME=VALUE` words by detector and name. Raises UsageError."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        path, equals, text = word.partition("=")
        detector, dot, name = path.partition(".")
        if not equals or not dot:
            raise UsageError(f"--set {word}: expected DETECTOR.NAME=VALUE")
        if detector not in known:
            raise UsageError(f"--set {word}: no detector {detector!r}; there are: {', '.join(known)}")
        names = thresholds(known[detector])
        if name not in names:
            there = f"it has: {', '.join(names)}" if names else "it has none"
            raise UsageError(f"--set {word}: {detector} has no threshold {name!r}; {there}")
        try:
            found.setdefault(detector, {})[name] = type(names[name])(text)
        except ValueError:
            raise UsageError(f"--set {word}: expected a number such as {names[name]}") from None
    return found
