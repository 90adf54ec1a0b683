"""The layout of `--help`: on 80 columns and more no option's name is broken, so that it can be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

_SHARE, _MOST = 0.35, 0.55
"""Of the width, for names and their types; and what a long name may take."""


class HelpLayout:
    """cyclopts' own, but for the width of names. It is imported when help is asked for."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel of commands or parameters."""
        _formatter(_columns if panel.format == "parameter" else None)(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print how a command is called."""
        _formatter().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print what it does."""
        _formatter().render_description(console, options, description)


def _formatter(columns: Any = None) -> DefaultFormatter:
    from cyclopts.help import DefaultFormatter

    return DefaultFormatter(column_specs=columns)


def _columns(console: Console, _: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    from cyclopts.help import AsteriskRenderer, ColumnSpec, DescriptionRenderer, NameRenderer

    longest = max((len(name) for entry in entries for name in entry.all_options), default=0)
    width = int(max(console.width * _SHARE, min(longest + 2, console.width * _MOST)))
    required = ColumnSpec(renderer=AsteriskRenderer(), width=1, style="red bold")
    names = ColumnSpec(renderer=NameRenderer(width), max_width=width, no_wrap=True, style="cyclopts.name")
    meaning = ColumnSpec(renderer=DescriptionRenderer(), overflow="fold")
    return (required, names, meaning) if any(entry.required for entry in entries) else (names, meaning)
