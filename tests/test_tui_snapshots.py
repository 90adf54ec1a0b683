"""Every screen of the terminal debugger, as it was when somebody last looked at it.

After a change that is meant to be seen: `pytest tests/test_tui_snapshots.py --snapshot-update`, and look at them again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from screens import TIGHT, app_of, pressing, queued, simulated

BUSY = 19
HELD_BACK = 51
WIDE, SMALL = (160, 45), (80, 24)

SnapCompare = Callable[..., bool]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A busy run."""
    return simulated(tmp_path_factory.mktemp("runs"))


SCREENS: dict[str, tuple[str, tuple[str, ...], tuple[int, int]]] = {
    "pass": (f"pass={BUSY}", (), WIDE),
    "pass_small": (f"pass={BUSY}", (), SMALL),
    "pass_held_back": (f"pass={HELD_BACK},rid=r67", (), WIDE),
    "pass_light": (f"pass={BUSY}", ("t",), WIDE),
    "timeline": (f"pass={BUSY},view=timeline", (), WIDE),
    "timeline_zoomed": (f"pass={BUSY}", ("plus", "plus", "plus"), WIDE),
    "timeline_small": (f"pass={BUSY},view=timeline", (), SMALL),
    "request": (f"pass={BUSY},view=request,rid=r19", (), WIDE),
    "request_small": (f"pass={BUSY},view=request,rid=r19", (), SMALL),
    "cache": (f"pass={BUSY},view=cache,rid=r22", (), WIDE),
    "cache_small": (f"pass={BUSY},view=cache,rid=r22", (), SMALL),
    "findings": (f"pass={BUSY},view=findings", (), WIDE),
    "sql": (f"pass={BUSY},view=sql", ("enter",), WIDE),
    "compare": ("pass=9", ("o", *"spf", "enter"), WIDE),
    "compare_small": ("pass=9", ("o", *"spf", "enter"), SMALL),
    "go_to": (f"pass={BUSY}", ("slash", "r", "2"), WIDE),
    "breakpoint": (f"pass={BUSY}", ("b",), SMALL),
    "help": (f"pass={BUSY}", ("question_mark",), WIDE),
    "help_small": (f"pass={BUSY}", ("question_mark",), SMALL),
}


@pytest.mark.parametrize("name", SCREENS)
def test_screen(snap_compare: SnapCompare, path: Path, name: str) -> None:
    at, keys, size = SCREENS[name]
    assert snap_compare(app_of(path, at), terminal_size=size, run_before=pressing(*keys))


def test_screen_of_names_in_other_scripts(snap_compare: SnapCompare, tmp_path: Path) -> None:
    rids = ["汉字漢字", "e\u0301\u0301combining", "[bold]markup[/]", "\x1b[2Jclear", "plain"]
    path = queued(tmp_path, rids, steps=2)
    app = app_of(path.rename(tmp_path / "names"), "pass=0")
    assert snap_compare(app, terminal_size=SMALL, run_before=pressing())


def test_screen_of_a_policy_that_looks_at_nothing(snap_compare: SnapCompare, tmp_path: Path) -> None:
    path = simulated(tmp_path, TIGHT.replace(schedule_policy="fcfs"))
    assert snap_compare(app_of(path, "pass=30"), terminal_size=WIDE, run_before=pressing())
