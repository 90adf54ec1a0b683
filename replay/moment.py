"""A scheduler just before a recorded pass: what its decision could read."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from schedscope.engine.chance import RandomState
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.decision import Plan, decide
from schedscope.engine.view import View


class Moment(NamedTuple):
    """Give it to `decide`, and the pass is decided again."""

    number: int
    """Of the pass."""
    view: View
    random_state: RandomState | None
    config: SchedulerConfig


def decide_again(moment: Moment) -> Plan:
    """The recorded decision, made again."""
    return decide(moment.view, moment.config, moment.random_state)


def detached(moment: Moment) -> Moment:
    """The same with a cache of its own: it stays as it is while the re-run goes on."""
    cache, twins = moment.view.cache.fork()
    running = tuple(r if r.lock is None else r._replace(lock=twins[r.lock.id]) for r in moment.view.running)
    return moment._replace(view=replace(moment.view, cache=cache, running=running))
