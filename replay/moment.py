"""A scheduler just before a recorded pass: what its decision could read."""

from __future__ import annotations

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
