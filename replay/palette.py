"""One colour per thing, for every screen: a policy, a verdict, a reason, a cause has the same one everywhere.

The hues are Okabe and Ito's, which people with any kind of colour vision can tell apart; what is related shares a hue,
and what must never be confused differs in brightness, too. A screen still never tells anything by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Ground = Literal["dark", "light"]
"""What it is painted on."""


class Hue(NamedTuple):
    """A colour in two shades, as `#rrggbb`: each has a contrast of at least 4.5 on its ground."""

    dark: str
    """On a dark ground."""
    light: str
    """On a light one."""

    def on(self, ground: Ground) -> str:
        """The shade for a ground."""
        return self.dark if ground == "dark" else self.light


GREEN = Hue("#2fbf8f", "#00704f")
ORANGE = Hue("#e69f00", "#8a5a00")
SKY = Hue("#56b4e9", "#1b6ca8")
BLUE = Hue("#7a9dff", "#0a4fb3")
YELLOW = Hue("#f0e442", "#6b6300")
VERMILION = Hue("#ff7f4d", "#b34700")
PURPLE = Hue("#dd92bd", "#94447a")
GREY = Hue("#9a9a9a", "#666666")
PALE = Hue("#cfcfcf", "#444444")
GROUNDS = {"dark": "#121212", "light": "#ffffff"}
"""What the contrasts are measured against."""

VERDICTS: Mapping[str, Hue] = {
    "admitted": GREEN,
    "chunk": SKY,
    "refused": VERMILION,
    "held_back": PURPLE,
    "waiting": GREY,
}
"""What became of a request in a pass; `waiting`: it was not looked at."""

REASONS: Mapping[str, Hue] = {
    "admitted": GREEN,
    "chunk_continued": SKY,
    "memory": VERMILION,
    "memory_ignore_eos": VERMILION,
    "memory_future": VERMILION,
    "input_budget": ORANGE,
    "chunk_budget": ORANGE,
    "chunk_too_small": ORANGE,
    "chunk_taken": ORANGE,
    "prefill_max_requests": BLUE,
    "delayed": YELLOW,
    "total_spent": VERMILION,
    "current_spent": VERMILION,
    "input_spent": ORANGE,
    "chunk_spent": ORANGE,
    "unknown": GREY,
}
"""See `schedscope.engine.verdict.Reason`."""

CAUSES: Mapping[str, Hue] = {
    "longer_match": SKY,
    "priority": BLUE,
    "order": PALE,
    "held_back": PURPLE,
    "memory": VERMILION,
    "blocked_head": VERMILION,
    "memory_spent": VERMILION,
    "input_budget": ORANGE,
    "chunk_budget": ORANGE,
    "prefill_max_requests": BLUE,
    "no_slot": BLUE,
    "batch_full": BLUE,
    "min_free_slots_delay": BLUE,
    "delayer": YELLOW,
    "step_in_progress": GREY,
    "deciding": GREEN,
    "gap": GREY,
    "unrecorded": GREY,
}
"""What a request's time in the queue is charged to."""

POLICIES: Mapping[str, Hue] = {
    "lpm": SKY,
    "dfs-weight": BLUE,
    "hrrn": GREEN,
    "shortest-prefill-first": YELLOW,
    "fcfs": ORANGE,
    "lof": PURPLE,
    "random": GREY,
    "routing-key": VERMILION,
    "priority": PALE,
}

GATES: Mapping[str, Hue] = {
    "batch_is_full": BLUE,
    "no_slot": BLUE,
    "min_free_slots_delay": YELLOW,
    "queue_empty": GREY,
}

STOPS: Mapping[str, Hue] = {
    "queue_end": GREEN,
    "NO_TOKEN": VERMILION,
    "OTHER": ORANGE,
    "budget": ORANGE,
    "no_slot": BLUE,
    "preempt_failed": BLUE,
}

SERIES: Mapping[str, Hue] = {
    "queue": ORANGE,
    "running": BLUE,
    "hit_rate": GREEN,
    "admitted": SKY,
    "computed": PALE,
    "evicted": VERMILION,
    "ttft_p50": PURPLE,
    "ttft_p99": PURPLE,
    "waited": ORANGE,
    "prefill": SKY,
    "scheduling": GREY,
    "gap": GREY,
}
"""Lines and areas over time."""

NODES: Mapping[str, Hue] = {
    "locked": BLUE,
    "recent": GREEN,
    "old": GREY,
    "next": VERMILION,
    "selected": YELLOW,
}
"""Of the prefix cache; `next`: what the next eviction takes."""

SEVERITIES: Mapping[str, Hue] = {"critical": VERMILION, "warning": ORANGE, "note": SKY}


def colour(names: Mapping[str, Hue], name: str | None, ground: Ground = "dark") -> str:
    """The colour of a name as `#rrggbb`; what is not listed, or is nothing, is grey."""
    return (names.get(name, GREY) if name is not None else GREY).on(ground)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours, 1 to 21."""
    bright, dim = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
