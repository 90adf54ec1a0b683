"""Moments of a rank for somebody who goes from pass to pass."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from schedscope.engine.errors import SchedscopeError
from schedscope.recorder.run import Run
from schedscope.replay.moment import Moment, detached
from schedscope.replay.provenance import CacheListener
from schedscope.replay.replayer import Replayer
from schedscope.replay.source import is_observed

MOMENTS = 6
"""That are kept for another look."""
_BEHIND = 4
"""Passes before the one that is asked for that are kept, for somebody who steps back."""


_BREATH_S = 1e-4
"""Between two steps: for threads that have something to paint."""


class OvertakenError(SchedscopeError):
    """Nobody wants the moment any more."""


class Visited(NamedTuple):
    """A moment that stays as it is."""

    moment: Moment
    heard: CacheListener
    """What happened in its cache on the way there, and maybe further on, which tells nothing new about this cache."""
    replayer: Replayer


class Walker:
    """A re-run that waits where it was looked at last: the next pass costs one pass, not the way from a checkpoint.

    Moments that it gives stay as they are. Not for several threads at a time.

    Args:
        keep: moments to keep for another look.
    """

    def __init__(self, run: Run, rank: int, keep: int = MOMENTS) -> None:
        self.run = run
        self.rank = rank
        self._keep = keep
        self._kept: OrderedDict[int, Visited] = OrderedDict()
        self._replayer: Replayer | None = None
        self._walk: Iterator[Moment] = iter(())
        self._heard = CacheListener()
        self._wanted: Callable[[], bool] = lambda: True
        self._next: int | None = None
        """The pass that the walk comes to next."""

    def at(self, number: int, wanted: Callable[[], bool] = lambda: True) -> Visited:
        """The scheduler just before a pass. Raises RunNotFoundError, RunFormatError.

        Args:
            wanted: asked after every step on the way; once it isn't, OvertakenError is raised.
        """
        self._wanted = wanted
        found = self._kept.get(number)
        if found is None:
            found = self._find(number)
        self._kept[number] = found
        self._kept.move_to_end(number)
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return found

    def _breathe(self) -> None:
        if not self._wanted():
            self._next = None
            raise OvertakenError("overtaken")
        time.sleep(_BREATH_S)

    def _find(self, number: int) -> Visited:
        if is_observed(self.run.manifest):
            return self._visit(number)
        replayer = self._replayer
        if replayer is None:
            replayer = self._replayer = Replayer(self.run, self.rank)
        start = replayer.start_before(number).pass_number
        if self._next is None or not start <= self._next <= number:
            back = number if self._next is None or not 0 < self._next - number <= _BEHIND else number - _BEHIND
            self._next = max(back, min(start, number))
            self._heard = CacheListener()
            self._walk = replayer.walk(self._next, self._heard, self._breathe)
        for moment in self._walk:
            self._next = moment.number + 1
            if moment.number >= number - _BEHIND:
                kept = self._kept[moment.number] = Visited(detached(moment), _told(self._heard), replayer)
                if moment.number == number:
                    return kept
        # The log has grown since, or the pass's step has not ended, or there is no such pass.
        self._replayer, self._next = None, None
        return self._visit(number)

    def _visit(self, number: int) -> Visited:
        replayer, heard = Replayer(self.run, self.rank), CacheListener()
        moment = next(replayer.visit([number], heard))
        return Visited(detached(moment), _told(heard), replayer)


def _told(heard: CacheListener) -> CacheListener:
    """What a listener has heard, without the scheduler that it listens to and all its memory."""
    heard.catch_up()
    told = CacheListener()
    told.known_since, told.insertions, told.evictions = heard.known_since, heard.insertions, heard.evictions
    return told
