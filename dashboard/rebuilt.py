"""Passes that are rebuilt and decided again: behind the scenes, and only as far as nobody waits for it too long."""

from __future__ import annotations

from typing import NamedTuple

from schedscope.dashboard.desk import Desk
from schedscope.dashboard.library import Pending
from schedscope.engine.errors import ConfigError, UsageError
from schedscope.engine.ordering import POLICIES
from schedscope.recorder.run import Run
from schedscope.replay.explain_pass import explain_pass
from schedscope.replay.explain_request import explain_request
from schedscope.replay.explanation import PassExplanation, RequestExplanation
from schedscope.replay.moment import Moment
from schedscope.replay.redecide import Redecided, redecide
from schedscope.replay.replayer import Replayer

_FAR = 4_000
"""Passes to re-run, from which on that is not done."""


class Alternative(NamedTuple):
    """A pass under another policy."""

    policy: str
    again: Redecided | None
    problem: str | None
    """Why it can't run with this configuration."""


def near(run: Run, rank: int, number: int) -> Replayer:
    """A replayer that gets to a pass soon. Raises UsageError if it would not, RunFormatError, RunNotFoundError."""
    replayer = Replayer(run, rank)
    start = replayer.start_before(number)
    if number - start.pass_number > _FAR:
        raise UsageError(
            f"{number - start.pass_number:,} passes would have to be re-run to get to it, since there is no checkpoint "
            f"before it. In a terminal: schedscope replay pass {number} --rank {rank} --run {run.path.name}"
        )
    return replayer


def alternatives(desk: Desk, rank: int, number: int) -> tuple[Alternative, ...] | Pending:
    """A pass under every policy. Raises SchedscopeError where it can't be rebuilt."""
    run = desk.book.run

    def find() -> tuple[Alternative, ...]:
        moment = near(run, rank, number).at(number)
        return tuple(_alternative(moment, policy) for policy in POLICIES)

    return desk.later(("alternatives", rank, number), find)


def _alternative(moment: Moment, policy: str) -> Alternative:
    try:
        return Alternative(policy, redecide(moment, policy, {}), None)
    except (ConfigError, UsageError) as error:
        return Alternative(policy, None, str(error))


def explained_pass(desk: Desk, rank: int, number: int) -> PassExplanation | Pending:
    """Why a pass came out as it did. Raises SchedscopeError."""
    run = desk.book.run

    def find() -> PassExplanation:
        near(run, rank, number)
        return explain_pass(run, rank, number)

    return desk.later(("explained pass", rank, number), find)


def explained_request(desk: Desk, rank: int, rid: str) -> RequestExplanation | Pending:
    """Why a request waited. Raises SchedscopeError."""
    run = desk.book.run
    return desk.later(("explained request", rank, rid), lambda: explain_request(run, rid, rank))
