"""The mark that the batch is full: which pass set it, for whom, and how long it kept the queue shut."""

from __future__ import annotations

import pyarrow.compute as pc
from schedscope.engine.errors import RunNotFoundError
from schedscope.recorder.run import Run
from schedscope.replay.explanation import Ending, Mark, short_of
from schedscope.replay.ledger import Rows


def mark_before(run: Run, rank: int, rows: Rows) -> Mark | None:
    """The one under which a pass began.

    Args:
        rows: of that pass, as `Run.pass_rows` gives them.
    """
    set_in = _set_before(run, rank, rows)
    return Mark(set_in, *_cause_of_mark(run, rank, set_in, rows), rows["passes"][0]["pass"], None, None)


def mark_after(run: Run, rank: int, rows: Rows, ending: Ending, *, was_set: bool) -> Mark:
    """The one that a pass left.

    Args:
        rows: of that pass, as `Run.pass_rows` gives them.
        ending: how it came out.
        was_set: it was set when the pass began.
    """
    number = rows["passes"][0]["pass"]
    set_in = _set_before(run, rank, rows) if was_set else number
    try:
        following = run.pass_rows(rank, number + 1)["steps"]
    except RunNotFoundError:
        following = []
    steps = ns = None
    if following and rows["steps"]:
        steps = following[0]["step"] - rows["steps"][0]["step"] - 1
        ns = following[0]["start_ns"] - rows["steps"][0]["end_ns"]
    until = number + 1 if following else None
    if set_in == number:
        return Mark(number, ending.stop, ending.rid, ending.reason, short_of(ending), until, steps, ns)
    return Mark(set_in, *_cause_of_mark(run, rank, set_in, rows), until, steps, ns)


def _set_before(run: Run, rank: int, rows: Rows) -> int | None:
    """The pass that set the mark under which this one began: a step's row has the mark after it."""
    (row,) = rows["passes"]
    steps = run.table("steps", rank, ["step", "count", "batch_is_full_pass"], (row["pass"] - 1, row["pass"]))
    before = steps.filter(pc.equal(pc.add(steps["step"], steps["count"]), row["step"]))["batch_is_full_pass"]
    set_in: int | None = before[0].as_py() if len(before) else None
    return set_in


def _cause_of_mark(
    run: Run, rank: int, set_in: int | None, rows: Rows
) -> tuple[str | None, str | None, str | None, int | None]:
    """How the pass that set the mark ended: stop, who did not fit, why, and by how many tokens."""
    if set_in is None:
        return None, None, None, None
    if rows["passes"][0]["pass"] != set_in:
        try:
            rows = run.pass_rows(rank, set_in)
        except RunNotFoundError:
            return None, None, None, None
    looked = [row for row in rows["decisions"] if row["result"] is not None]
    stop = rows["passes"][0]["stop"]
    if stop not in {"NO_TOKEN", "OTHER"} or not looked:
        return stop, None, None, None
    last = max(looked, key=lambda row: -1 if row["place_after"] is None else row["place_after"])
    ending = Ending(stop, last["rid"], last["reason"], last["need"], last["have"], last["admitted"])
    return stop, ending.rid, ending.reason, short_of(ending)
