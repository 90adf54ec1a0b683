"""Every colour can be read, and everything has one."""

from __future__ import annotations

import pytest
from schedscope.engine.ordering import POLICIES
from schedscope.engine.verdict import Reason
from schedscope.replay import palette
from schedscope.replay.describe import GATES, STOPS

READABLE = 4.5
"""WCAG AA for text."""


@pytest.mark.parametrize("ground", ["dark", "light"])
def test_every_colour_can_be_read_on_its_ground(ground: palette.Ground) -> None:
    hues = {name: hue for name, hue in vars(palette).items() if isinstance(hue, palette.Hue)}
    assert hues
    for name, hue in hues.items():
        assert palette.contrast(hue.on(ground), palette.GROUNDS[ground]) >= READABLE, name


@pytest.mark.parametrize(
    ("coloured", "names"),
    [
        (palette.POLICIES, set(POLICIES)),
        (palette.REASONS, set(map(str, Reason))),
        (palette.GATES, set(GATES)),
        (palette.STOPS, {*STOPS, "NO_TOKEN", "OTHER"}),
    ],
)
def test_everything_has_a_colour(coloured: dict[str, palette.Hue], names: set[str]) -> None:
    assert set(coloured) == names


def test_what_is_unknown_is_grey() -> None:
    assert palette.colour(palette.POLICIES, "mine") == palette.GREY.dark
    assert palette.colour(palette.POLICIES, None, "light") == palette.GREY.light


def test_contrast_of_black_and_white() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21.0)
