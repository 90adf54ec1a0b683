"""The scheduler decides as SGLang 0.5.23 does: every scenario's outcome was taken from the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedscope.replay.scenario import Placed, read_scenarios
from schedscope.replay.scenario_check import check

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "tests" / "conformance"
TEACHING = ROOT / "sample_logs" / "scenarios"


def _all(folder: Path) -> list[Placed]:
    return list(read_scenarios([folder]))


@pytest.mark.parametrize("file", sorted(CONFORMANCE.glob("*.jsonl*")), ids=lambda path: path.name)
def test_generated_scenarios_come_out_as_in_sglang(file: Path) -> None:
    checked = [check(placed) for placed in read_scenarios([file])]
    different = [f"{c.scenario.id}: {c.differences[0]}" for c in checked if c.differences]
    assert not different
    assert len(checked) >= 40


@pytest.mark.parametrize("placed", _all(CONFORMANCE / "yaml"), ids=lambda placed: placed.scenario.id)
def test_documented_faults_and_rules_hold(placed: Placed) -> None:
    result = check(placed)
    assert not result.differences
    if result.skipped:
        pytest.skip("described for people, not executable")


@pytest.mark.parametrize("placed", _all(TEACHING), ids=lambda placed: placed.scenario.id)
def test_teaching_examples_tell_the_truth(placed: Placed) -> None:
    assert not check(placed).differences


def test_a_wrong_expectation_is_found() -> None:
    placed = next(p for p in _all(CONFORMANCE / "yaml") if p.scenario.id == "S02")
    placed.scenario.expect["matched"]["warm"] = 499
    placed.scenario.expect["order"].reverse()
    differences = [str(difference) for difference in check(placed).differences]
    assert "matched.warm: expected 499, got 500" in differences
    assert any(difference.startswith("order[0]") for difference in differences)
