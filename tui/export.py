"""What is shown, as files: a picture, a table, a link."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from schedscope.engine.errors import UsageError
from schedscope.replay.scenario_of import scenario_of
from schedscope.tui.cursor import Cursor
from schedscope.tui.pick import Choice
from schedscope.tui.session import Scene


class Shown(Protocol):
    """What exports ask the app."""

    cursor: Cursor
    view: str
    scene: Scene | None

    @property
    def link(self) -> str:
        """The command that comes back here."""

    def export_screenshot(self, *, title: str | None = None) -> str:
        """The screen as SVG."""

    def shown_cells(self) -> list[list[str]]:
        """The view's grid, the header first."""


Export = Callable[[Shown], str]
"""Writes a file into the working directory; says which one. Raises UsageError."""


def export_choices() -> list[Choice]:
    """What there is to export."""
    return [
        Choice("SVG", "the screen as a picture", export_svg),
        Choice("CSV", "the table that is shown", export_csv),
        Choice("scenario", "this pass as a file to play with: schedscope scenario run FILE", export_scenario),
        Choice("link", "a command that comes back here, in a file", export_link),
    ]


def export_svg(shown: Shown) -> str:
    """The screen as a picture."""
    return _write(_path(shown, "svg"), shown.export_screenshot(title="schedscope"))


def export_csv(shown: Shown) -> str:
    """The table that is shown."""
    path = _path(shown, "csv")
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(shown.shown_cells())
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from None
    return str(path)


def export_scenario(shown: Shown) -> str:
    """The pass as a scenario. Raises UsageError while it is not re-run."""
    if shown.scene is None:
        raise UsageError("this pass is not re-run (yet), and a scenario is made of what it could read")
    cursor = shown.cursor
    made = scenario_of(shown.scene.visited.moment, f"rank{cursor.rank}-pass{cursor.number}")
    path = _write(_path(shown, "yaml"), made.to_yaml())
    return path if made.differs is None else f"{path}, which differs: {made.differs}"


def export_link(shown: Shown) -> str:
    """A command that comes back here."""
    return _write(_path(shown, "sh"), shown.link + "\n")


def _path(shown: Shown, ending: str) -> Path:
    cursor = shown.cursor
    name = f"schedscope-{shown.view}-rank{cursor.rank}-pass{cursor.number}"
    path = Path(f"{name}.{ending}")
    number = 2
    while path.exists():
        path = Path(f"{name}-{number}.{ending}")
        number += 1
    return path.absolute()


def _write(path: Path, text: str) -> str:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from None
    return str(path)
