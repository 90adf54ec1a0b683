"""Compare what a scenario did with what it expects. What a scenario doesn't mention is not compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from schedscope.engine.errors import ScenarioError
from schedscope.replay.scenario import Placed, Scenario
from schedscope.replay.scenario_run import Outcome, run_scenario

SETS = frozenset({"deprioritized", "preempted"})
TOLERANCE = 1e-6
LONGEST_VALUE = 160
_NOTHING = object()
_SHAPES: dict[str, type] = {
    "deprioritized": list,
    "error": dict,
    "order_head": list,
    "order_tail": list,
    "preempted": list,
    "waiting_after": list,
}


class Difference(NamedTuple):
    """One value that is not as expected."""

    where: str
    """Path below `expect`."""
    expected: Any
    actual: Any

    def __str__(self) -> str:
        return f"{self.where}: expected {_short(self.expected)}, got {_short(self.actual)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


class Checked(NamedTuple):
    """The result for one scenario."""

    scenario: Scenario
    where: str
    differences: tuple[Difference, ...]
    skipped: bool
    """Not executed: kind check, or nothing is expected."""


def check(placed: Placed) -> Checked:
    """Run one scenario and compare."""
    scenario = placed.scenario
    if scenario.kind == "check":
        return Checked(scenario, placed.where, (), True)
    outcome = run_placed(placed)
    return Checked(scenario, placed.where, tuple(compare(scenario.expect, outcome.expect)), False)


def try_check(placed: Placed) -> Checked | ScenarioError:
    """`check`, with the error of a scenario that makes no sense as a value."""
    try:
        return check(placed)
    except ScenarioError as error:
        return error


def run_placed(placed: Placed) -> Outcome:
    """Run one scenario. Raises ScenarioError, naming its file."""
    try:
        return run_scenario(placed.scenario)
    except ScenarioError as error:
        raise ScenarioError(f"{placed.where}: {error}") from None


def compare(expected: dict[str, Any], actual: dict[str, Any], where: str = "") -> Iterator[Difference]:
    """Differences between an `expect` and an outcome."""
    for key, wanted in expected.items():
        path = f"{where}.{key}" if where else key
        got = actual.get(key, _NOTHING)
        if got is _NOTHING:
            yield Difference(path, wanted, "nothing")
        elif key in _SHAPES and not isinstance(wanted, _SHAPES[key]):
            yield Difference(path, wanted, got)
        elif key == "error":
            yield from _compare_error(wanted, got, path)
        elif key == "order_head":
            yield from _compare_value(wanted, got[: len(wanted)], path)
        elif key == "order_tail":
            yield from _compare_value(wanted, got[len(got) - len(wanted) :], path)
        elif key in SETS:
            if Counter(map(str, wanted)) != Counter(got):
                yield Difference(path, wanted, sorted(got))
        elif key == "waiting_after":
            yield from _compare_queue(wanted, got, path, actual)
        else:
            yield from _compare_value(wanted, got, path)


def _compare_value(wanted: Any, got: Any, path: str) -> Iterator[Difference]:
    if isinstance(wanted, dict) and isinstance(got, dict):
        yield from compare(wanted, got, path)
    elif isinstance(wanted, list) and isinstance(got, list):
        if len(wanted) != len(got):
            yield Difference(f"{path} length", len(wanted), len(got))
        for i, (item, other) in enumerate(zip(wanted, got, strict=False)):
            yield from _compare_value(item, other, f"{path}[{i}]")
    elif _is_number(wanted) and _is_number(got):
        if not math.isclose(wanted, got, rel_tol=0, abs_tol=TOLERANCE):
            yield Difference(path, wanted, got)
    elif wanted != got:
        yield Difference(path, wanted, got)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compare_error(wanted: dict[str, str], got: dict[str, str], path: str) -> Iterator[Difference]:
    if wanted.get("type", got["type"]) != got["type"]:
        yield Difference(f"{path}.type", wanted["type"], got["type"])
    # What a scenario may ask of the text is SGLang's; ours says more behind it.
    if got["type"] == "ValueError" and str(wanted.get("contains", "")) not in got["message"]:
        yield Difference(f"{path}.contains", wanted["contains"], got["message"])


def _compare_queue(wanted: list[str], got: list[str], path: str, actual: dict[str, Any]) -> Iterator[Difference]:
    """Preempted requests are at the end, in any order among themselves."""
    preempted = len(actual.get("preempted", ()))
    split = len(wanted) - preempted
    same_end = Counter(map(str, wanted[split:])) == Counter(got[split:])
    if len(wanted) != len(got) or wanted[:split] != got[:split] or not same_end:
        yield Difference(path, wanted, got)
