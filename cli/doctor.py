"""`schedscope doctor`: what goes wrong in a run, the worst first, with evidence and what to try."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text
from schedscope.cli.options import LogDir, RunName, Settings, Switch
from schedscope.cli.output import console, print_json
from schedscope.engine.errors import RunNotFoundError, UsageError
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run
from schedscope.replay.describe import printable
from schedscope.replay.doctor import (
    Detector,
    Examination,
    examine,
    known_detectors,
    parse_thresholds,
    settings_words,
    thresholds,
)
from schedscope.replay.finding import Checked, Evidence, Finding, Severity, plural, span

FOUND = 11
"""Exit code: there is a finding as bad as `--fail-on` says."""
_STYLES = {Severity.CRITICAL: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold"}
_SHOWN_EVIDENCE = 3

Names = Annotated[list[str] | None, Parameter(negative="")]


def doctor(
    run: RunName = None,
    *,
    log: LogDir = None,
    only: Names = None,
    detector: Names = None,
    set_: Settings = None,
    fail_on: Literal["critical", "warning", "note"] | None = None,
    check: bool = True,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    json: Switch = False,
) -> int:
    """Examine a run: find what makes its requests wait, with evidence, what it costs, and what to try.

    Parameters
    ----------
    only
        Run only these detectors.
    detector
        A detector of your own, as package.module:function; see docs/doctor.md.
    set_
        Another threshold, as DETECTOR.NAME=VALUE.
    fail_on
        Exit with code 11 if anything so bad, or worse, is found.
    check
        Try on recorded passes what is advised.
    list_
        List the detectors and their thresholds.
    json
        Print one JSON document.
    """
    known = known_detectors(detector or [])
    settings = parse_thresholds(set_ or [], known)
    for name in only or []:
        if name not in known:
            raise UsageError(f"--only {name}: no such detector; there are: {', '.join(known)}")
    chosen = [known[name] for name in known if not only or name in only]
    if list_:
        _show_detectors(chosen, json)
        return 0
    recorded = Run.open(resolve_run(run, log))
    found = examine(recorded, chosen, settings=settings, check=check)
    if not found.requests:
        raise RunNotFoundError(f"{recorded.where}: no request was recorded, so there is nothing to judge")
    if json:
        print_json("schedscope.doctor/1", _json(recorded, found))
    else:
        _show(recorded, found)
    failed = fail_on is not None and found.worst is not None and found.worst.rank <= Severity(fail_on).rank
    return FOUND if failed else 0


def _show(run: Run, found: Examination) -> None:
    console.print(Text(printable(run.where), style="bold"), soft_wrap=True)
    console.print(
        f"recorded for {span(found.lasts_s)}; {plural(found.requests, 'request')} waited {span(found.waiting_s)} in "
        "the queue, all together",
        markup=False,
    )
    for number, finding in enumerate(found.findings, start=1):
        console.print()
        _show_finding(run, found, number, finding)
    console.print()
    if not found.findings:
        console.print(f"Nothing found by {plural(len(found.examined), 'detector')}.", style="bold green")
    else:
        counts = ", ".join(
            f"{count} {severity.value}"
            for severity in Severity
            if (count := sum(each.severity is severity for each in found.findings))
        )
        console.print(f"{plural(len(found.examined), 'detector')}: {counts}", markup=False)
    for reason in dict.fromkeys(found.not_judged.values()):
        names = ", ".join(name for name, why in found.not_judged.items() if why == reason)
        console.print(f"not judged: {names}: {reason}", style="dim", markup=False, soft_wrap=True)


def _show_finding(run: Run, found: Examination, number: int, finding: Finding) -> None:
    label = (f"{number}. {finding.severity.value.upper()}", _STYLES[finding.severity])
    console.print(Text.assemble(label, "  ", (printable(finding.title), "bold")))
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    where = "" if finding.rank is None or len(run.ranks) < 2 else f", rank {finding.rank}"
    grid.add_row("   found by", Text(f"{finding.detector}{where}"))
    if finding.cost_s:
        share = f", {min(finding.cost_s / found.waiting_s, 1.0):.0%} of all" if found.waiting_s else ""
        grid.add_row("   costs", Text(f"{span(finding.cost_s)} of waiting{share}"))
    for place, evidence in enumerate(finding.evidence[:_SHOWN_EVIDENCE]):
        grid.add_row("   look at" if place == 0 else "", Text(printable(_evidence_words(evidence))))
    grid.add_row("   try", Text(finding.advice))
    for checked in finding.checked:
        grid.add_row("   checked" if checked.helps else "   no help", Text(printable(_checked_words(checked))))
    if finding.unchecked is not None:
        grid.add_row("   unchecked", Text(printable(finding.unchecked)))
    console.print(grid)
    command = _command(run, finding)
    if command is not None:
        console.print(Text(f"   {printable(command)}", style="dim"), soft_wrap=True)


def _evidence_words(evidence: Evidence) -> str:
    places = [f"pass {evidence.pass_number}"] if evidence.pass_number is not None else []
    places += [evidence.rid] if evidence.rid is not None else []
    return f"{', '.join(places)}: {evidence.words}" if places else evidence.words


def _checked_words(checked: Checked) -> str:
    return f"pass {checked.trial.pass_number} with {settings_words(checked.trial.settings)}: {checked.words}"


def _command(run: Run, finding: Finding) -> str | None:
    """What shows the pass, decided with what helps if anything does."""
    helps = next((each.trial for each in finding.checked if each.helps), None)
    if helps is not None:
        rank, number, words = helps.rank, helps.pass_number, f" {settings_words(helps.settings)}"
    else:
        place = next((each for each in finding.evidence if each.pass_number is not None), None)
        if place is None or place.pass_number is None:
            return None
        rank, number, words = place.rank, place.pass_number, ""
    of_rank = f" --rank {rank}" if rank else ""
    return f"schedscope replay pass {number}{of_rank} --run {shlex.quote(run.where)}{words}"


def _show_detectors(detectors: list[Detector], json: bool) -> None:
    if json:
        print_json(
            "schedscope.doctor-detectors/1",
            {
                "detectors": [
                    {"name": each.name, "needs": each.needs, "says": _says(each), "thresholds": thresholds(each)}
                    for each in detectors
                ]
            },
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("detector", "finds", "thresholds"):
        table.add_column(name, overflow="fold")
    for each in detectors:
        limits = " ".join(f"{name}={value}" for name, value in thresholds(each).items())
        table.add_row(each.name, Text(_says(each)), Text(limits))
    console.print(table)


def _says(detector: Detector) -> str:
    """The first paragraph of its docstring."""
    return " ".join((detector.look.__doc__ or "").strip().split("\n\n")[0].split())


def _json(run: Run, found: Examination) -> dict[str, Any]:
    return {
        "run": run.where,
        "status": run.status,
        "waiting_s": found.waiting_s,
        "lasts_s": found.lasts_s,
        "requests": found.requests,
        "worst": found.worst,
        "findings": [_finding_json(each) for each in found.findings],
        "examined": list(found.examined),
        "not_judged": dict(found.not_judged),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "detector": finding.detector,
        "severity": finding.severity,
        "rank": finding.rank,
        "title": finding.title,
        "cost_s": finding.cost_s,
        "evidence": [
            {"rank": each.rank, "pass": each.pass_number, "rid": each.rid, "words": each.words}
            for each in finding.evidence
        ],
        "advice": finding.advice,
        "checked": [
            {
                "rank": each.trial.rank,
                "pass": each.trial.pass_number,
                "settings": dict(each.trial.settings),
                "helps": each.helps,
                "words": each.words,
            }
            for each in finding.checked
        ],
        "unchecked": finding.unchecked,
    }
