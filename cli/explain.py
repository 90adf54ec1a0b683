"""`schedscope explain REQUEST | pass N | run`: why a request waited, and why a pass came out as it did."""

from __future__ import annotations

import shlex

from cyclopts import App
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from schedscope.cli.options import LogDir, RunName, Switch
from schedscope.cli.output import console, print_json
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run
from schedscope.replay.describe import printable
from schedscope.replay.explain_json import pass_json, request_json, run_json
from schedscope.replay.explain_pass import explain_pass
from schedscope.replay.explain_request import explain_request
from schedscope.replay.explain_words import (
    change_words,
    count,
    duration,
    elsewhere_words,
    flip_words,
    ledger_rows,
    look_lines,
    look_title,
    mark_words,
    pass_policy,
    pass_rows,
    pass_sentence,
    pool_words,
    request_sentence,
    run_sentence,
    stay_words,
    total_words,
)
from schedscope.replay.explanation import PassExplanation, RequestExplanation
from schedscope.replay.ledger import CAUSES, RunLedger, run_ledger

app = App(name="explain", help="Say why a request waited, or why a pass came out as it did.")


@app.default
def request(
    request: str,
    /,
    *,
    run: RunName = None,
    log: LogDir = None,
    rank: int | None = None,
    json: Switch = False,
) -> int:
    """Say what a request waited for: each nanosecond in the queue, by cause and by name.

    Then shows the passes that tell most about it, decided again, and how little would have changed them.

    Parameters
    ----------
    request
        Its rid.
    rank
        Only on this scheduler of the run.
    json
        Print one JSON document instead of text.
    """
    recorded = Run.open(resolve_run(run, log))
    found = explain_request(recorded, request, rank)
    if json:
        print_json("schedscope.explain-request/1", {"run": recorded.where, **request_json(found)})
    else:
        _show_request(found)
    return 0


@app.command(name="pass")
def one_pass(
    number: int,
    /,
    *,
    run: RunName = None,
    log: LogDir = None,
    rank: int = 0,
    request: str | None = None,
    json: Switch = False,
) -> int:
    """Say why each request stood where it stood in a pass, and what became of it.

    Parameters
    ----------
    number
        Number of the pass, from 0.
    rank
        Which scheduler of the run.
    request
        Search what would have been otherwise for this rid alone.
    json
        Print one JSON document instead of text.
    """
    recorded = Run.open(resolve_run(run, log))
    found = explain_pass(recorded, rank, number, request)
    if json:
        print_json("schedscope.explain-pass/1", {"run": recorded.where, **pass_json(found)})
    else:
        _show_pass(found)
    return 0


@app.command(name="run")
def whole_run(run: RunName = None, *, log: LogDir = None, most: int = 10, json: Switch = False) -> int:
    """Say what all requests of a run waited for, and which requests cost others most.

    Parameters
    ----------
    most
        How many requests to name.
    json
        Print one JSON document instead of text.
    """
    recorded = Run.open(resolve_run(run, log))
    ledger = run_ledger(recorded, most)
    if json:
        print_json("schedscope.explain-run/1", {"run": recorded.where, **run_json(ledger)})
    else:
        _show_run(ledger, recorded.where)
    return 0


def _line(text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _item(text: str) -> None:
    console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def _show_unmeasured(stays: int) -> None:
    if stays:
        words = count(stays, "stay")
        _line(f"{words} after retractions or preemptions were not recorded: that needs --level decisions.", "yellow")


def _show_request(found: RequestExplanation) -> None:
    ledger = found.ledger
    _line(request_sentence(ledger), "bold")
    if ledger.lives > 1:
        _line(f"It is the last of {ledger.lives} requests of this name.", "dim")
    for span in ledger.spans[1:]:
        _line(f"It was {stay_words(span)}.")
    _show_unmeasured(ledger.unmeasured)
    if ledger.parts:
        console.print()
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        for name in ("waited for", "charged to", "where"):
            table.add_column(name, overflow="fold")
        for row in ledger_rows(ledger):
            table.add_row(*map(Text, row))
        console.print(table)
        _line(f"{ledger.queued_ns:,} ns in all, each charged once.", "dim")
    for look in found.looks:
        console.print()
        _line(look_title(look), "bold")
        for line in look_lines(look):
            _item(line)
    if found.changes:
        console.print()
        _line("Its cached prefix", "bold")
        for change in found.changes:
            _item(change_words(change))
    console.print()
    if found.unseen is not None:
        _line(f"Passes could not be decided again: {found.unseen}", "yellow")
    elif found.looks:
        looked = count(len(found.looks), "pass", "passes")
        checked = count(found.checked, "claim")
        _line(
            f"Looked at {looked} of the {found.passes:,} that it waited in; {checked} checked by deciding again.", "dim"
        )


def _show_pass(found: PassExplanation) -> None:
    _line(pass_sentence(found), "bold")
    _line(pass_policy(found))
    _line(f"pool of {pool_words(found.pool)}")
    for mark in (found.mark_before, found.mark_after):
        if mark is not None:
            _line(mark_words(mark))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("place", justify="right", no_wrap=True)
    for name in ("request", "why there", "cached", "what became of it"):
        table.add_column(name, overflow="fold")
    for row in pass_rows(found):
        table.add_row(*map(Text, row))
    console.print(table)
    flipped = [place for place in found.places if place.flips or place.ahead]
    for place in flipped:
        console.print()
        _line(f"{printable(place.rid)}, place {place.place}", "bold")
        for flip in place.flips:
            _item(flip_words(flip))
        for flip in place.ahead:
            _item(flip_words(flip))
        words = elsewhere_words(place, found.active)
        if words is not None:
            _item(words)
    if found.checked:
        console.print()
        _line(f"{count(found.checked, 'claim')} checked by deciding again.", "dim")


def _show_run(ledger: RunLedger, where: str) -> None:
    _line(run_sentence(ledger), "bold")
    _show_unmeasured(ledger.unmeasured)
    if not ledger.causes:
        return
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("time", "share", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("waited for", "hit hardest"):
        table.add_column(name, overflow="fold")
    shown = [each for each in ledger.causes if each.ns * 200 >= ledger.queued_ns]
    for each in shown:
        hit = f"{printable(each.worst_rid)} {duration(each.worst_ns)}"
        table.add_row(
            duration(each.ns), f"{each.ns / ledger.queued_ns:.0%}", f"{each.requests:,}", total_words(each), Text(hit)
        )
    rest = ledger.causes[len(shown) :]
    if rest:
        ns = sum(each.ns for each in rest)
        table.add_row(duration(ns), f"{ns / ledger.queued_ns:.0%}", "", f"{len(rest)} others", "")
    console.print(table)
    _line(f"{ledger.queued_ns:,} ns in all, each charged once.", "dim")
    if ledger.blamed:
        console.print()
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("cost others", justify="right", no_wrap=True)
        table.add_column("request", overflow="fold")
        table.add_column("by", overflow="fold")
        table.add_column("others", justify="right", no_wrap=True)
        table.add_column("most in pass", justify="right", no_wrap=True)
        for blame in ledger.blamed:
            worst = "" if blame.worst_pass is None else str(blame.worst_pass)
            who = Text(printable(blame.rid))
            table.add_row(duration(blame.ns), who, CAUSES[blame.cause], f"{blame.requests:,}", worst)
        console.print(table)
    rank, rid, ns = ledger.waited[0]
    console.print()
    words = ["schedscope", "explain", rid, *(["--rank", str(rank)] if rank else []), "--run", where]
    _line(f"Who waited longest, {duration(ns)}: {printable(shlex.join(words))}")
