"""`schedscope replay pass N | all`: re-run what was recorded."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import msgspec
from cyclopts import App
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from schedscope.cli.options import LogDir, RunName, Settings, Switch, parse_settings
from schedscope.cli.output import console, errors, gap_words, print_json, say, show_pass
from schedscope.engine.errors import DivergenceError, RunFormatError, UsageError
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run
from schedscope.replay.describe import batch_words, plan_json, stop_words
from schedscope.replay.moment import decide_again
from schedscope.replay.redecide import Redecided, redecide
from schedscope.replay.replayer import Replayer
from schedscope.replay.source import is_observed
from schedscope.replay.verdicts import Divergence, Verdict
from schedscope.replay.verify import verify
from schedscope.replay.verify_view import verify_views

app = App(name="replay", help="Re-run recorded passes and compare them, or decide them differently.")

DIVERGENT = DivergenceError.exit_code
_PASSES_PER_JOB = 3_000
"""That make up for the start of a process."""


@app.command(name="pass")
def one_pass(
    number: int,
    /,
    *,
    run: RunName = None,
    log: LogDir = None,
    rank: int = 0,
    policy: str | None = None,
    setting: Settings = None,
    json: Switch = False,
) -> int:
    """Decide one recorded pass again and show it; exit code 3 if it comes out differently.

    Parameters
    ----------
    number
        Number of the pass, from 0.
    rank
        Which scheduler of the run.
    policy
        Decide it under this policy, and show who moves.
    setting
        `name=value`: decide it with this scheduler setting.
    json
        Print one JSON document instead of a table.
    """
    recorded = Run.open(resolve_run(run, log))
    moment = Replayer(recorded, rank).at(number)
    if policy is not None or setting:
        return _show_other(recorded, rank, redecide(moment, policy, parse_settings(setting or [])), json)
    plan = decide_again(moment)
    check = verify_views if is_observed(recorded.manifest) else verify
    verdict = check(recorded, rank, start_pass=number, stop_pass=number)
    if json:
        body = {**_where(recorded, rank), "pass": number, **plan_json(plan), **_verdict_json(verdict)}
        print_json("schedscope.replay-pass/1", body)
    else:
        show_pass(f"pass {number} of {recorded.path.name}, rank {rank}", plan)
        say("Stopped", f"{stop_words(plan)}.")
        _print_verdict(verdict)
    return DIVERGENT if verdict.divergence else 0


@app.command(name="all")
def every_pass(
    run: RunName = None, *, log: LogDir = None, rank: int | None = None, jobs: int | None = None, json: Switch = False
) -> int:
    """Re-run every recorded pass and compare every field; exit code 3 at the first difference.

    A server that was watched is re-run twice: each pass from what it was seen to read, and all of it from the start,
    with the cache rebuilt. Exit code 6 if nothing differs, but some passes can't be re-run: records are missing, or
    the state of a watched server can't be rebuilt.

    Parameters
    ----------
    rank
        Only this scheduler of the run.
    jobs
        Processes that share the work, which is split at checkpoints. Default: one per processor, fewer for a short
        run, and one while it is being recorded.
    json
        Print one JSON document instead of text.
    """
    if jobs is not None and jobs < 1:
        raise UsageError("--jobs: at least 1")
    recorded = Run.open(resolve_run(run, log))
    verdicts = verify_run(recorded, rank, jobs)
    if json:
        body = {
            "run": recorded.where,
            "passes": sum(verdict.passes for verdict in verdicts),
            "decisions": sum(verdict.decisions for verdict in verdicts),
            "identical": exit_code(verdicts) == 0,
            "ranks": [
                {"rank": v.rank, "basis": v.basis, "first_pass": v.first_pass, "passes": v.passes, **_verdict_json(v)}
                for v in verdicts
            ],
            "gaps": msgspec.to_builtins(recorded.gaps),
        }
        print_json("schedscope.replay-all/1", body)
    else:
        print_verdicts(recorded, verdicts)
    return exit_code(verdicts)


def exit_code(verdicts: list[Verdict]) -> int:
    """0: all that was recorded is what comes out; 3: something differs; 6: a part of it can't be re-run."""
    if any(verdict.divergence for verdict in verdicts if not _is_proof(verdict, verdicts)):
        return DIVERGENT
    return RunFormatError.exit_code if any(verdict.lost or verdict.divergence for verdict in verdicts) else 0


def _is_proof(verdict: Verdict, verdicts: list[Verdict]) -> bool:
    """Whether it only says how far the states of a watched server follow from what it was fed."""
    return verdict.basis == "start" and any(v.basis == "view" and v.rank == verdict.rank for v in verdicts)


def verify_run(run: Run, rank: int | None = None, jobs: int | None = None) -> list[Verdict]:
    """Verify one rank or all, with a progress bar on a terminal. Raises RunNotFoundError for a run without ranks.

    Args:
        jobs: processes; None: as many as are worth their start.
    """
    if rank is None:
        run.check_recorded()
    ranks = run.ranks if rank is None else [rank]
    verdicts = []
    with _progress() as progress:
        for each in ranks:
            total = run.passes(each).count if each in run.ranks else 0
            advance = partial(_advance, progress, progress.add_task(f"rank {each}", total=total))
            if is_observed(run.manifest):
                verdicts.append(verify_views(run, each, progress=advance))
            if not verdicts or verdicts[-1].divergence is None or verdicts[-1].basis == "start":
                verdicts.append(verify(run, each, jobs=jobs or _worth_starting(run, total), progress=advance))
    return verdicts


def _worth_starting(run: Run, passes: int) -> int:
    """Processes for so many passes; one while the run is recorded, whose oldest parts may go at any moment."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if run.status == "recording" else max(1, min(processors, passes // _PASSES_PER_JOB))


def print_verdicts(run: Run, verdicts: list[Verdict]) -> None:
    """The result of a verification, for people."""
    console.print(run.where, style="dim", markup=False, soft_wrap=True)
    for gap in run.gaps:
        console.print(f"gap: {gap_words(gap)}", style="yellow", markup=False, soft_wrap=True)
    for verdict in verdicts:
        since = f" from pass {verdict.first_pass} on" if verdict.first_pass else ""
        basis = " from what each pass could read" if verdict.basis == "view" else ""
        if _is_proof(verdict, verdicts):
            basis = " rebuilt from the start"
        what = f"rank {verdict.rank}{basis}: {verdict.passes:,} passes{since}, {verdict.decisions:,} decisions"
        console.print(what, end="\n" if verdict.lost else ": ")
        _print_verdict(verdict, _is_proof(verdict, verdicts))
    for unseen in run.manifest.source_gaps:
        console.print(f"not seen of the server: {unseen['feature']}: {unseen['effect']}", style="yellow", markup=False)


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


def _show_other(run: Run, rank: int, both: Redecided, json: bool) -> int:
    number = both.moment.number
    asked = ", ".join(f"{name}={value}" for name, value in both.changes().items()) or "nothing changed"
    if json:
        body = {
            **_where(run, rank),
            "pass": number,
            "recorded": plan_json(both.recorded),
            "other": plan_json(both.other),
            "moved": both.moves(),
        }
        print_json("schedscope.replay-other/1", body)
        return 0
    if both.other.ordering is None:
        say(f"pass {number} with {asked}", f"{stop_words(both.other)}.")
        return 0
    show_pass(f"pass {number} of {run.path.name}, rank {rank}, decided with {asked}", both.other, both.recorded)
    say("Admitted", f"{batch_words(both.other)}; {stop_words(both.other)}.")
    say("Recorded", f"{batch_words(both.recorded)}; {stop_words(both.recorded)}.")
    moved, waiting = len(both.moves()), len(both.moment.view.queue)
    say("Moved", f"{moved} of {waiting} requests stand elsewhere in the queue than recorded.")
    return 0


def _print_verdict(verdict: Verdict, is_proof: bool = False) -> None:
    for last, again in verdict.lost:
        until = "from there on" if again is None else f"up to pass {again}"
        console.print(f"records are missing behind pass {last}: nothing can be re-run {until}", style="yellow")
    if verdict.open_pass is not None:
        console.print(f"(pass {verdict.open_pass} is not among them: its step has not ended)", end=" ")
    if verdict.divergence is None and verdict.lost:
        console.print("[bold yellow]identical where it can be re-run[/]")
    elif verdict.divergence is None:
        console.print("[bold green]identical[/]")
    elif is_proof:
        console.print("[bold yellow]not provable behind that[/]")
        console.print(f"the rebuilt state differs: {verdict.divergence}", soft_wrap=True, markup=False)
    else:
        console.print("[bold red]divergent[/]")
        console.print(f"first difference: {verdict.divergence}", soft_wrap=True, markup=False)


def _where(run: Run, rank: int) -> dict[str, Any]:
    return {"run": run.where, "rank": rank}


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    found: Divergence | None = verdict.divergence
    lost = [{"after_pass": last, "again_from_pass": again} for last, again in verdict.lost]
    return {
        "identical": found is None and not lost,
        "divergence": None if found is None else found.to_json(),
        "open_pass": verdict.open_pass,
        "lost": lost,
    }
