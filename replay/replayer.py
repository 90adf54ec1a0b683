"""Re-run a recording: feed a fresh scheduler what the recorded one was fed, and look at every decision.

The scheduler of the engine is a function of its stimuli: arrivals, aborts, step times, sampled tokens and why
requests ended. All of them are in the log, so this rebuilds every state of the run, from its start or from the
checkpoint before the pass that is asked for.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from schedscope.engine import tokens
from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.delayer import Report
from schedscope.engine.errors import RunFormatError, RunNotFoundError
from schedscope.engine.live import Live
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Finish, Scheduler
from schedscope.engine.snapshot import restore_snapshot
from schedscope.engine.tracer import Tracer
from schedscope.engine.view import View
from schedscope.recorder.frame import Body, unpack
from schedscope.recorder.hello import Detail
from schedscope.recorder.rows import Row
from schedscope.recorder.run import Run
from schedscope.recorder.tracer import RunTracer

STIMULI = ("arrive", "abort", "flush")


class Moment(NamedTuple):
    """A scheduler just before a recorded pass."""

    number: int
    view: View
    random_state: RandomState | None
    config: SchedulerConfig


class Replayed(NamedTuple):
    """A step that was re-run."""

    recorded: dict[str, Any]
    """The row of `steps`."""
    rows: dict[str, list[Row]]
    """What the recorder would write of it and of the arrivals before it, by table; clocks are 0."""


class _Recollection(RunTracer):
    """Records the re-run into memory: what comes of it can then be held against the log, table by table."""

    def __init__(self, detail: Detail) -> None:
        super().__init__(_Nowhere(detail), checkpoint_every=sys.maxsize, clock_ns=lambda: 0)
        self._kept: defaultdict[str, list[Row]] = defaultdict(list)

    def _hand_over(self, rows: dict[str, list[Any]]) -> None:
        for table, made in unpack(rows).items():
            self._kept[table] += made

    def on_prompt(self, live: Live) -> None:
        """Tokens are what the re-run was given; they are not compared."""

    def on_outputs(self, lives: Sequence[Live], sampled: Sequence[int]) -> None:
        """As above."""

    def take(self) -> dict[str, list[Row]]:
        """What was recorded since the last call."""
        self._flush()
        kept, self._kept = self._kept, defaultdict(list)
        return kept


class _Nowhere:
    """A sink for a recorder that hands nothing over."""

    attached = True
    dropped = 0
    key = b""

    def __init__(self, detail: Detail) -> None:
        self.detail = detail

    def write(self, body: Body) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Replayer:
    """One rank of a run, ready to be re-run.

    Args:
        run: the recording.
        rank: which of its schedulers. Raises RunNotFoundError if there is none of that number.
    """

    def __init__(self, run: Run, rank: int = 0) -> None:
        if rank not in run.ranks:
            known = ", ".join(str(r) for r in run.ranks) or "none"
            raise RunNotFoundError(f"{run.path}: no rank {rank} in this run; ranks: {known}")
        self.run = run
        self.rank = rank
        self.config = SchedulerConfig.from_dict(run.manifest.config_of(rank))
        self._steps = list(run.rows("steps", rank))
        self._prompts: dict[int, bytes] = {}
        self._outputs: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for row in run.rows("tokens", rank):
            if row["position"] == 0:
                self._prompts[row["seq"]] = tokens.encode(row["ids"])
            else:
                self._outputs[row["step"]].extend((row["rid"], token) for token in row["ids"])
        self._stimuli: list[dict[str, Any]] = []
        self._finishes: dict[int, dict[str, Finish]] = defaultdict(dict)
        for row in run.rows("events", rank):
            if row["kind"] in STIMULI:
                self._stimuli.append(row)
            elif row["kind"] == "finish":
                detail = self._json(row["detail"])
                self._finishes[row["step"]][row["rid"]] = Finish(detail["kind"], detail["detail"])

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return len(self._steps)

    # ---- the iterator --------------------------------------------------------------------------------------

    def replay(self, start_pass: int = 0, visit: Callable[[Moment], None] | None = None) -> Iterator[Replayed]:
        """Re-run from the checkpoint before `start_pass`; yields every step from there on.

        Args:
            visit: called before each pass is decided, while its view still stands.
        """
        recollection = _Recollection(self.run.manifest.detail)
        scheduler, seq, step = self._start(start_pass, recollection)
        recollection.attach(scheduler)
        stimuli = iter([row for row in self._stimuli if row["seq"] > seq])
        pending = next(stimuli, None)
        for row in self._steps:
            if row["step"] < step:
                continue
            while pending is not None and pending["seq"] < row["seq"] and pending["step"] <= row["step"]:
                self._stimulate(scheduler, pending)
                pending = next(stimuli, None)
            self._turn(scheduler, row, visit)
            yield Replayed(row, recollection.take())

    def at(self, number: int) -> Moment:
        """The scheduler just before pass `number`. Raises RunNotFoundError if it was not recorded."""
        row = next((row for row in self._steps if row["pass"] == number), None)
        if row is None:
            numbers = [r["pass"] for r in self._steps if r["pass"] is not None]
            known = f"passes {numbers[0]} to {numbers[-1]}" if numbers else "no pass"
            raise RunNotFoundError(f"{self.run.path}: no pass {number} on rank {self.rank}; it has {known}")
        found: list[Moment] = []

        def keep(moment: Moment) -> None:
            if moment.number == number:
                found.append(moment)
                raise _Arrived

        try:
            for _ in self.replay(number, keep):
                pass
        except _Arrived:
            return found[0]
        raise RunFormatError(f"{self.run.path}: pass {number} can't be rebuilt: the replay took another way")

    # ---- inner ---------------------------------------------------------------------------------------------

    def _start(self, number: int, tracer: Tracer) -> tuple[Scheduler, int, int]:
        """A scheduler to go on from, the last tick it has seen, and the step that comes next."""
        marks = self.run.table("checkpoints", self.rank, columns=("seq", "step", "pass")).to_pylist()
        marks = [mark for mark in marks if mark["pass"] <= number]
        if not marks:
            return Scheduler(self.config, tracer), 0, 0
        best = max(marks, key=lambda mark: int(mark["pass"]))
        for row in self.run.rows("checkpoints", self.rank):
            if row["seq"] == best["seq"]:
                snapshot = msgspec.msgpack.decode(row["state"])
                return restore_snapshot(snapshot, self.config, tracer), row["seq"], row["step"] + 1
        raise RunFormatError(f"{self.run.path}: a checkpoint of rank {self.rank} is missing")

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (TypeError, ValueError):
            raise RunFormatError(f"{self.run.path}: rank {self.rank}: not JSON where it should be: {text!r}") from None

    def _stimulate(self, scheduler: Scheduler, row: dict[str, Any]) -> None:
        match row["kind"]:
            case "arrive":
                scheduler.arrive(self._request(row), row["time"])
            case "abort":
                scheduler.abort(row["rid"], row["time"])
            case "flush":
                scheduler.flush(row["time"])

    def _request(self, row: dict[str, Any]) -> Request:
        prompt = self._prompts.get(row["seq"])
        if prompt is None:
            raise RunFormatError(
                f"{self.run.path}: the prompt of {row['rid']!r} was not recorded, so rank {self.rank} "
                "can't be rebuilt from its start"
            )
        facts = self._json(row["detail"])
        request = {name: facts.pop(name) for name in ("priority", "routing_key", "extra_key", "cache_salt")}
        facts["stop"] = tuple(facts["stop"])
        facts["stop_token_ids"] = tuple(facts["stop_token_ids"])
        return Request(rid=row["rid"], prompt=prompt, sampling=SamplingParams(**facts), **request)

    def _turn(self, scheduler: Scheduler, row: dict[str, Any], visit: Callable[[Moment], None] | None) -> None:
        now = row["now"]
        if row["kind"] == "idle":
            scheduler.idle(now)
            return
        reports = tuple(Report(**report) for report in self._json(row["reports"] or "[]"))
        if visit is not None and row["pass"] is not None:
            view = scheduler.look(now, reports)
            visit(Moment(row["pass"], view, scheduler.state.random_state, self.config))
        step = scheduler.step(now, reports)
        if step.batch is None:
            return
        outputs = defaultdict(list)
        for rid, token in self._outputs.get(row["step"], ()):
            outputs[rid].append(token)
        sampled: list[int | None] = []
        for member in step.batch.members:
            made = outputs.get(member.live.rid)
            sampled.append(made.pop(0) if made and not member.unfinished else None)
        scheduler.commit(step.batch, sampled, self._finishes.get(row["step"], {}), now)


class _Arrived(Exception):
    """The pass that was asked for is reached."""
