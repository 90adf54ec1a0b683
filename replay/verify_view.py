"""Did a scheduler that is not ours decide as our core does? Each pass is decided again from what it was seen to read.

The outcome is compared with what was seen of its decision, column by column. What such a scheduler doesn't tell, the
core alone knows: sort keys, partners, reasons with operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan
from schedscope.recorder.decisions import Decisions
from schedscope.recorder.rows import pack_decision, pass_facts, pass_row
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES, to_arrow
from schedscope.replay.from_view import Observations, Seen
from schedscope.replay.moment import decide_again
from schedscope.replay.source import UNTOLD
from schedscope.replay.verdicts import Divergence, Verdict

_NOT_DECIDED = frozenset({"rank", "step", "seq", "now"})
PASS_COLUMNS = [name for name in TABLES["passes"].names if name not in UNTOLD["passes"] | _NOT_DECIDED]
DECISION_COLUMNS = [name for name in TABLES["decisions"].names if name not in UNTOLD["decisions"] | {"rank"}]

_BATCH = 256
"""Passes that are compared at once."""
_OPEN = 2**62


def verify_views(
    run: Run,
    rank: int,
    *,
    start_pass: int = 0,
    stop_pass: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Compare what a rank was seen to decide with what the core decides, up to the first difference.

    Raises RunNotFoundError, RunFormatError.
    """
    config = SchedulerConfig.from_dict(run.manifest.config_of(rank))
    parts = run.parts(rank)
    passes = decisions = 0
    batch: list[tuple[Seen, Plan]] = []
    found: Divergence | None = None

    def compare() -> Divergence | None:
        nonlocal passes, decisions
        divergence = _compare(run, rank, batch)
        counted = [
            plan for seen, plan in batch if divergence is None or seen.moment.number <= (divergence.pass_number or 0)
        ]
        passes += len(counted)
        decisions += sum(_rows(plan) for plan in counted)
        batch.clear()
        if progress is not None:
            progress(passes)
        return divergence

    for seen in Observations(config).read(parts):
        number = seen.moment.number
        if number < start_pass:
            continue
        if stop_pass is not None and number > stop_pass:
            break
        batch.append((seen, decide_again(seen.moment)))
        if len(batch) == _BATCH and (found := compare()) is not None:
            break
    if batch:
        found = compare()
    return Verdict(rank, passes, decisions, 0, found, start_pass, basis="view")


def _rows(plan: Plan) -> int:
    return 0 if plan.ordering is None else pack_decision(plan)[0]


def difference(seen: Seen, plan: Plan, rank: int, decisions: pa.Table) -> Divergence | None:
    """The first field in which a pass was not seen to be what the core decides.

    Args:
        decisions: its rows.
    """
    if plan.ordering is None:
        return _found(seen, rank, "passes", None, "gate", None, plan.gate)
    new_pass, new_rows = _replayed(seen, plan)
    for column in TABLES["decisions"].names:
        if column in DECISION_COLUMNS and decisions.column(column) != new_rows.column(column):
            old, new = decisions.column(column).to_pylist(), new_rows.column(column).to_pylist()
            if len(old) != len(new):
                return _found(seen, rank, "decisions", None, "rows", len(old), len(new))
            place = next(i for i, (was, now) in enumerate(zip(old, new, strict=True)) if was != now)
            whose = decisions.column("rid")[place].as_py()
            return _found(seen, rank, "decisions", whose, column, old[place], new[place])
    for column, value in new_pass.items():
        if seen.row[column] != value:
            return _found(seen, rank, "passes", None, column, seen.row[column], value)
    return None


def _found(seen: Seen, rank: int, table: str, rid: str | None, field: str, old: Any, new: Any) -> Divergence:
    return Divergence(rank, seen.moment.number, seen.row["step"], table, rid, field, old, new)


def _replayed(seen: Seen, plan: Plan) -> tuple[dict[str, Any], pa.Table]:
    facts = pass_facts(seen.moment.view, plan, seen.moment.random_state)
    row = dict(zip(TABLES["passes"].names[1:], pass_row(seen.moment.number, 0, 0, facts, "", 0), strict=False))
    rows = Decisions()
    rows.add(seen.moment.number, *pack_decision(plan))
    return {name: row[name] for name in PASS_COLUMNS}, to_arrow(TABLES["decisions"], 0, rows)


def _compare(run: Run, rank: int, batch: Sequence[tuple[Seen, Plan]]) -> Divergence | None:
    if not batch:
        return None
    first, last = batch[0][0].moment.number, batch[-1][0].moment.number
    table = run.table("decisions", rank, passes=(first, last)).combine_chunks()
    numbers = table.column("pass").to_pylist()
    begin = 0
    for seen, plan in batch:
        end = begin
        while end < len(numbers) and numbers[end] == seen.moment.number:
            end += 1
        found = difference(seen, plan, rank, table.slice(begin, end - begin))
        if found is not None:
            return found
        begin = end
    return None
