"""Every key, once: bindings, help and README are made of this."""

from __future__ import annotations

from typing import NamedTuple

from schedscope.tui.cursor import VIEWS


class Key(NamedTuple):
    """A key and what it does."""

    keys: str
    """As Textual names them, joined by commas."""
    action: str
    shown: str
    """As a person reads it."""
    words: str


GROUPS: dict[str, tuple[Key, ...]] = {
    "Views": tuple(
        Key(str(place), f"view('{name}')", str(place), words)
        for place, (name, words) in enumerate(
            zip(
                VIEWS,
                (
                    "timeline and what stands out",
                    "pass: queue, verdicts, budgets",
                    "request: its life over passes",
                    "cache: the prefix tree at this pass",
                    "findings: what the doctor says",
                    "SQL over the log",
                    "compare: another policy, another run",
                ),
                strict=True,
            ),
            1,
        )
    ),
    "Move": (
        Key("left,h", "step(-1)", "← h", "pass before"),
        Key("right,l", "step(1)", "→ l", "next pass"),
        Key("shift+left,H", "change(-1)", "H", "back to the last change of this request"),
        Key("shift+right,L", "change(1)", "L", "on to the next change of this request"),
        Key("full_stop", "candidate(1)", ".", "into the admission loop: next candidate"),
        Key("comma", "candidate(-1)", ",", "candidate before"),
        Key("n", "anomaly(1)", "n", "next thing that stands out"),
        Key("N", "anomaly(-1)", "N", "the one before"),
        Key("slash,g", "find", "/ g", "go to a pass, request, time or mark"),
        Key("left_square_bracket,backspace", "go_back", "[", "back to where you were"),
        Key("right_square_bracket", "go_forth", "]", "forth again"),
        Key("R", "rank", "R", "next rank"),
    ),
    "Ask": (
        Key("o", "policy", "o", "this pass under another policy, beside it"),
        Key("w", "why", "w", "into the why panel: ↑↓ a link, enter jumps"),
        Key("b", "breakpoint", "b", "stop where a condition holds"),
        Key("c", "hit(1)", "c", "continue to the next hit"),
        Key("C", "hit(-1)", "C", "back to the hit before"),
        Key("ctrl+o", "beside", "ctrl+o", "another run beside this one"),
    ),
    "Timeline": (
        Key("plus,equals_sign", "zoom(2.0)", "+", "closer"),
        Key("minus", "zoom(0.5)", "-", "further away"),
        Key("0", "zoom(0)", "0", "the whole run"),
        Key("less_than_sign", "pan(-1)", "<", "half a window back"),
        Key("greater_than_sign", "pan(1)", ">", "half a window on"),
    ),
    "Live": (
        Key("f", "follow", "f", "follow the run's end"),
        Key("space", "pause", "space", "pause, or follow again"),
    ),
    "Keep": (
        Key("m", "mark", "m", "mark this place, with a note"),
        Key("apostrophe", "marks", "'", "go to a mark"),
        Key("y", "copy_link", "y", "copy a command that comes back here"),
        Key("Y", "copy_text", "Y", "copy what the view shows"),
        Key("e", "export", "e", "export: SVG, CSV, scenario, link"),
    ),
    "Else": (
        Key("ctrl+r", "runs", "ctrl+r", "open another run"),
        Key("t", "theme", "t", "dark or light"),
        Key("tab", "app.focus_next", "tab", "next pane; shift+tab the one before"),
        Key("ctrl+p", "command_palette", "ctrl+p", "all commands by name"),
        Key("question_mark", "help", "?", "these keys"),
        Key("escape", "leave", "esc", "out of a pane, back to the pass"),
        Key("q", "quit", "q", "quit; so does ctrl+c"),
    ),
}
