"""How to record: what `schedscope record` can be told."""

from __future__ import annotations

from typing import Literal, NamedTuple

from schedscope.recorder.hello import Detail, OnFull
from schedscope.recorder.keep import Keep
from schedscope.recorder.rank_log import LIMITS, Limits
from schedscope.recorder.ring import CAPACITY
from schedscope.recorder.trigger import Watch

Durability = Literal["process", "power"]


class Options(NamedTuple):
    """How to record."""

    detail: Detail = Detail()
    key: bytes = b""
    """Of hashed tokens; it is not kept."""
    on_full: OnFull = "drop"
    """What a scheduler does whose ring is full: `drop` frames, which shows as a gap, or `block`."""
    buffer: int = CAPACITY
    """Size of a rank's ring, bytes."""
    durability: Durability = "process"
    """What a frame that was handed over survives: that all processes are killed, or a loss of power after 0.1 s."""
    limits: Limits = LIMITS
    keep: Keep | None = None
    """What a flight recorder holds on to; None: everything."""
    triggers: tuple[Watch, ...] = ()
    before_s: float = 60.0
    """How much is kept around a moment."""
    after_s: float = 10.0
    most_kept: int = 20
    """Moments that are kept; later ones are not."""
    grace_s: float = 2.0
    """How long `stop` waits for processes that are still connected."""

    @property
    def is_flight_recorder(self) -> bool:
        """Whether it lets go of old segments, or may have to tell some apart: then they stay small."""
        return self.keep is not None or bool(self.triggers)


OPTIONS = Options()
