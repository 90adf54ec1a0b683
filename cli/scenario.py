"""`schedscope scenario run | check`: play with hand-written queues, and hold the scheduler to what is expected."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from rich.text import Text
from schedscope.cli.options import Switch
from schedscope.cli.output import console, errors, print_json, say, show_pass
from schedscope.engine.errors import ScenarioError, UsageError
from schedscope.replay.describe import plan_json, printable, stop_words
from schedscope.replay.scenario import read_scenarios, try_scenarios
from schedscope.replay.scenario_check import run_placed, try_check

app = App(name="scenario", help="Run and check hand-written scheduling scenarios.")

DIFFERENT = 1
SHOWN_DIFFERENCES = 5


@app.command
def run(file: Path, /, *, json: Switch = False) -> int:
    """Show what the scheduler does with the scenarios of a file.

    Parameters
    ----------
    file
        YAML or JSONL, also .gz; see docs/scenario-format.md.
    json
        Print one JSON document instead of tables.
    """
    documents = []
    found = list(read_scenarios([file]))
    if not found:
        raise ScenarioError(f"{file}: no scenario in this file")
    for placed in found:
        scenario = placed.scenario
        outcome = run_placed(placed)
        if json:
            passes = [plan_json(plan) for plan in outcome.plans]
            documents.append({"id": scenario.id, "title": scenario.title, "passes": passes, "outcome": outcome.expect})
            continue
        console.print(Text.assemble((printable(scenario.id), "bold"), f"  {printable(scenario.title)}"))
        if "error" in outcome.expect and not outcome.plans:
            say("can't be built", outcome.expect["error"]["message"], "red")
        for number, plan in enumerate(outcome.plans):
            title = f"pass {number}"
            if plan.ordering is not None:
                show_pass(title, plan)
            say("Stopped" if plan.ordering is not None else title, f"{stop_words(plan)}.")
        for key, value in outcome.expect.items() if not outcome.plans else ():
            if key != "error":
                console.print(f"{key}:")
                for item in value:
                    console.print(f"  {item}", soft_wrap=True)
        if scenario.reason:
            console.print(Text(" ".join(scenario.reason.split()), style="dim"))
        console.print()
    if json:
        print_json("schedscope.scenario-run/1", {"scenarios": documents})
    return 0


@app.command
def check(*paths: Path, json: Switch = False) -> int:
    """Compare scenarios with what they expect; exit code 1 if any differs, 7 if any breaks the format.

    Parameters
    ----------
    paths
        Files (YAML, JSONL, also .gz) and folders of them.
    json
        Print one JSON document instead of a line per difference.
    """
    if not paths:
        raise UsageError("scenario check: give at least one file or folder")
    checked = skipped = 0
    different = []
    broken: list[str] = []
    for placed in try_scenarios(list(paths)):
        result = placed if isinstance(placed, ScenarioError) else try_check(placed)
        if isinstance(result, ScenarioError):
            broken.append(str(result))
            errors.print(f"schedscope: {result}", markup=False, soft_wrap=True)
            continue
        if result.skipped:
            skipped += 1
            continue
        checked += 1
        if not result.differences:
            continue
        different.append(result)
        if not json:
            for difference in result.differences[:SHOWN_DIFFERENCES]:
                print(f"{result.where} {result.scenario.id}: {difference}")
            if (more := len(result.differences) - SHOWN_DIFFERENCES) > 0:
                print(f"{result.where} {result.scenario.id}: and {more} more")
    counts = {"checked": checked, "differ": len(different), "not_executable": skipped, "broken": len(broken)}
    if json:
        found = [
            {
                "id": result.scenario.id,
                "where": result.where,
                "differences": [d._asdict() for d in result.differences],
            }
            for result in different
        ]
        print_json("schedscope.scenario-check/1", {**counts, "scenarios": found, "errors": broken})
    else:
        behind = f", {len(broken)} broken" if broken else ""
        print(f"{checked} checked, {len(different)} differ, {skipped} not executable{behind}")
    if broken:
        return ScenarioError.exit_code
    return DIFFERENT if different else 0
