"""Is the recording what the scheduler really decides? Re-run it and compare every recorded field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from schedscope.recorder.rows import decision_hash, decision_rows, pass_row
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES
from schedscope.replay.replayer import Replayed, Replayer

_DECISION_FIELDS = tuple(column.name for column in TABLES["decisions"].columns[1:])
_PASS_FIELDS = tuple(column.name for column in TABLES["passes"].columns[1:])
_MEASURED = frozenset({"decide_ns", "seq"})
"""What is measured or counted by the recorder, not decided."""


class Divergence(NamedTuple):
    """The first field of a rank that a re-run does not reproduce."""

    rank: int
    pass_number: int | None
    step: int
    table: str
    rid: str | None
    field: str
    recorded: Any
    replayed: Any

    def to_json(self) -> dict[str, Any]:
        """All fields, with `pass` for `pass_number`."""
        facts = self._asdict()
        return {"pass": facts.pop("pass_number"), **facts}

    def __str__(self) -> str:
        where = f"pass {self.pass_number}" if self.pass_number is not None else f"step {self.step}"
        whose = f", request {self.rid}" if self.rid is not None else ""
        return (
            f"rank {self.rank}, {where}{whose}: {self.table}.{self.field}: "
            f"recorded {self.recorded!r}, replayed {self.replayed!r}"
        )


class Verdict(NamedTuple):
    """What a verification found on one rank."""

    rank: int
    passes: int
    """Passes that were compared."""
    decisions: int
    steps: int
    divergence: Divergence | None


def verify(
    run: Run,
    rank: int,
    *,
    start_pass: int = 0,
    stop_pass: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Compare all recorded passes of a rank, up to the first difference.

    Args:
        start_pass: where to begin; the state comes from the checkpoint before it.
        stop_pass: the last pass to compare.
        progress: called with the number of passes compared so far.
    """
    replayer = Replayer(run, rank)
    recorded_passes = {row["pass"]: row for row in run.rows("passes", rank)}
    recorded_decisions = _Grouped(run, rank)
    passes = decisions = steps = 0
    for replayed in replayer.replay(start_pass):
        number = replayed.recorded["pass"]
        steps += 1
        found = None
        if number is not None and number >= start_pass:
            rows = decision_rows(number, replayed.plan) if replayed.plan is not None else []
            # What caused a difference comes before what followed from it.
            found = recorded_decisions.compare(rank, replayed, rows)
            found = found or _compare_pass(rank, replayed, recorded_passes.get(number), rows)
            passes += 1
            decisions += len(rows)
            if progress is not None:
                progress(passes)
        found = found or _compare_step(rank, replayed)
        if found is not None:
            return Verdict(rank, passes, decisions, steps, found)
        if stop_pass is not None and number is not None and number >= stop_pass:
            break
    return Verdict(rank, passes, decisions, steps, None)


def _compare_step(rank: int, replayed: Replayed) -> Divergence | None:
    """The state that a step leaves: if the cache, the pool or the queue went another way, it shows here."""
    record, recorded = replayed.record, replayed.recorded
    made = {
        "step": record.step,
        "pass": record.pass_number,
        "kind": record.kind,
        "gate": record.gate,
        "retracted": list(record.retracted),
        "batch_tokens": 0 if record.batch is None else sum(m.end - m.start for m in record.batch.members),
        **replayed.facts,
    }
    for field, value in made.items():
        if recorded[field] != value:
            return Divergence(rank, recorded["pass"], recorded["step"], "steps", None, field, recorded[field], value)
    return None


def _compare_pass(
    rank: int, replayed: Replayed, recorded: dict[str, Any] | None, rows: list[tuple[Any, ...]]
) -> Divergence | None:
    number, step = replayed.recorded["pass"], replayed.recorded["step"]
    if replayed.plan is None or replayed.view is None:
        return Divergence(rank, number, step, "steps", None, "pass", number, None)
    if recorded is None:
        return Divergence(rank, number, step, "passes", None, "pass", None, number)
    made = pass_row(number, step, 0, replayed.view, replayed.plan, replayed.random_state, decision_hash(rows), 0)
    for field, value in zip(_PASS_FIELDS, made, strict=True):
        if field not in _MEASURED and recorded[field] != value:
            return Divergence(rank, number, step, "passes", None, field, recorded[field], value)
    return None


class _Grouped:
    """The recorded decisions, pass by pass."""

    def __init__(self, run: Run, rank: int) -> None:
        self._rows = self._by_pass(run, rank)
        self._next: tuple[int, list[tuple[Any, ...]]] | None = next(self._rows, None)

    @staticmethod
    def _by_pass(run: Run, rank: int) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
        table = run.table("decisions", rank, columns=_DECISION_FIELDS)
        columns = [column.to_pylist() for column in table.columns]
        group: list[tuple[Any, ...]] = []
        for row in zip(*columns, strict=True):
            if group and group[0][0] != row[0]:
                yield group[0][0], group
                group = []
            group.append(row)
        if group:
            yield group[0][0], group

    def compare(self, rank: int, replayed: Replayed, made: list[tuple[Any, ...]]) -> Divergence | None:
        number, step = replayed.recorded["pass"], replayed.recorded["step"]
        while self._next is not None and self._next[0] < number:
            self._next = next(self._rows, None)
        recorded = self._next[1] if self._next is not None and self._next[0] == number else []
        if recorded == made:
            return None
        for old, new in zip(recorded, made, strict=False):
            for field, was, now in zip(_DECISION_FIELDS, old, new, strict=True):
                if was != now:
                    return Divergence(rank, number, step, "decisions", old[1], field, was, now)
        return Divergence(rank, number, step, "decisions", None, "rows", len(recorded), len(made))
