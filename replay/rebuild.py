"""Rebuild a scheduler by feeding it again what it was fed, part by part.

The scheduler of the engine is a function of its stimuli: arrivals, aborts, step times, sampled tokens and why
requests ended. All of them are in the log.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from schedscope.engine.batch import Batch, DecodeBatch
from schedscope.engine.chance import as_state
from schedscope.engine.delayer import Report
from schedscope.engine.errors import RunFormatError
from schedscope.engine.request import Request, SamplingParams
from schedscope.engine.scheduler import Scheduler
from schedscope.engine.tracer import NOTHING_GIVEN, Given
from schedscope.replay.script import Outputs, Script, Stimulus, Turn, parse_json

_NAMED = ("priority", "routing_key", "extra_key", "cache_salt")
"""Of an arrival's facts those that are the request's own."""


class LostError(RunFormatError):
    """Records are missing, so what comes behind them can't be rebuilt."""

    def __init__(self, tick: int, step: int) -> None:
        super().__init__(f"records are missing behind step {step - 1}, so it can't be re-run from there on")
        self.tick = tick
        """Of the first thing that is missing."""


class Rebuild:
    """A scheduler on its way through a recording.

    Args:
        scheduler: fresh, or restored from a checkpoint.
        tick: of the last thing that is in its state. Between a stimulus and the step behind it, that of the stimulus.
    """

    def __init__(self, scheduler: Scheduler, tick: int = 0) -> None:
        self.scheduler = scheduler
        self.tick = tick

    def turns(self, script: Script) -> Iterator[Turn]:
        """The steps of a part that are still to come, each when everything before it was taken in.

        Hand each of them to `take` before going on. What came behind the last step is taken in at the end. Raises
        LostError where something is missing, RunFormatError where the recording can't be followed.
        """
        lost = self._first_missing(script)
        stimuli = iter([stimulus for stimulus in script.stimuli if stimulus.seq > self.tick])
        pending = next(stimuli, None)
        first = self.scheduler.steps
        for turn in script.turns:
            if turn.step < first:
                continue
            if turn.seq > lost:
                raise LostError(lost, self.scheduler.steps)
            while pending is not None and pending.seq < turn.seq and pending.step <= turn.step:
                self._stimulate(pending, script)
                pending = next(stimuli, None)
            yield turn
        if script.ticks and lost <= script.ticks[-1]:
            raise LostError(lost, self.scheduler.steps)
        while pending is not None:
            self._stimulate(pending, script)
            pending = next(stimuli, None)
        self.tick = max([self.tick, *script.ticks[-1:]])

    def _first_missing(self, script: Script) -> int:
        """The first tick behind what was taken in that the script doesn't have."""
        ticks = script.ticks[bisect_right(script.ticks, self.tick) :]
        expected = self.tick + 1
        place = bisect_left(range(len(ticks)), True, key=lambda i: ticks[i] != expected + i)
        return expected + place

    def take(self, turn: Turn, script: Script) -> None:
        """Re-run a step. Raises RunFormatError."""
        scheduler, now = self.scheduler, turn.now
        self.tick = max(self.tick, turn.seq)
        if turn.kind == "idle":
            scheduler.idle(now, turn.repeats)
            return
        due = scheduler.step(now, reports_of(turn), given_of(turn)).due
        if due is None:
            return
        scheduler.commit(due, _sampled(due, script.outputs.get(turn.step)), script.finishes.get(turn.step, {}), now)

    def _stimulate(self, stimulus: Stimulus, script: Script) -> None:
        self.tick = max(self.tick, stimulus.seq)
        match stimulus.kind:
            case "arrive":
                request, entry_time = _arrival(stimulus, script)
                self.scheduler.arrive(request, stimulus.time, entry_time)
            case "abort":
                assert stimulus.rid is not None
                self.scheduler.abort(stimulus.rid, stimulus.time)
            case "flush":
                self.scheduler.flush(stimulus.time)


def _sampled(batch: Batch, outputs: Outputs | None) -> Sequence[int | None]:
    """The tokens that were recorded for a batch, in its order."""
    if outputs is None:
        return [None] * len(batch)
    if isinstance(batch, DecodeBatch) and batch.running.rids == outputs.rids:
        return outputs.ids
    ids = dict(zip(outputs.rids, outputs.ids, strict=True))
    return [None if member.unfinished else ids.get(member.live.rid) for member in batch.members]


def reports_of(turn: Turn) -> tuple[Report, ...]:
    """What the other ranks told the prefill delayer. Raises RunFormatError."""
    if not turn.reports:
        return ()
    try:
        return tuple(Report(**report) for report in parse_json(turn.reports))
    except TypeError as error:
        raise RunFormatError(f"step {turn.step}: reports that are none: {error}") from None


def given_of(turn: Turn) -> Given:
    """What the step was told by the server that was followed. Raises RunFormatError."""
    if turn.given is None:
        return NOTHING_GIVEN
    given = parse_json(turn.given)
    try:
        return Given(given["entry_times"], as_state(given["random_state"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFormatError(f"step {turn.step}: what it was given can't be read: {error!r}") from None


def _arrival(stimulus: Stimulus, script: Script) -> tuple[Request, float | None]:
    prompt = script.prompts.get(stimulus.seq)
    if prompt is None:
        raise RunFormatError(f"the prompt of {stimulus.rid!r} was not recorded, so nothing behind it can be rebuilt")
    assert stimulus.rid is not None
    sampling, named, entry_time = _asked(stimulus.detail)
    return Request(rid=stimulus.rid, prompt=prompt, sampling=sampling, **named), entry_time


@lru_cache(maxsize=4096)
def _asked(detail: str | None) -> tuple[SamplingParams, Mapping[str, Any], float | None]:
    """What an arrival asks for. Many ask for the same."""
    facts = parse_json(detail)
    entry_time = facts.pop("entry_time", None)
    named = {name: facts.pop(name) for name in _NAMED}
    facts["stop"] = tuple(facts["stop"])
    facts["stop_token_ids"] = tuple(facts["stop_token_ids"])
    return SamplingParams(**facts), named, entry_time
