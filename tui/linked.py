"""Text whose values are links: pick one with the arrow keys or the mouse, and jump."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from schedscope.tui.cursor import Place
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

_LINK = "link"
"""Key of a style's metadata."""


class Link(NamedTuple):
    """Where a span leads."""

    place: Place | None = None
    command: str | None = None
    """An action of the app instead, such as `other('hrrn')`."""


class Span(NamedTuple):
    """A piece of a line."""

    text: str
    style: str = ""
    link: Link | None = None


Line = Sequence[Span]


class Linked(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines of spans, wrapped to its width."""

    DEFAULT_CSS = """
    Linked {
        scrollbar-size-horizontal: 0;
        scrollbar-size-vertical: 1;
        scrollbar-gutter: stable;
        & > .linked--link { color: $primary; text-style: underline; }
        & > .linked--chosen { background: $primary; color: $background; text-style: bold; }
    }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"linked--link", "linked--chosen"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "pick(-1)", "Link before", show=False),
        Binding("down,j", "pick(1)", "Next link", show=False),
        Binding("pageup", "scroll_by(-1)", "Up", show=False),
        Binding("pagedown", "scroll_by(1)", "Down", show=False),
        Binding("enter", "follow", "Jump", show=False),
    ]

    class Followed(Message):
        """A link was followed."""

        def __init__(self, link: Link) -> None:
            super().__init__()
            self.link = link

    def __init__(self, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.lines_: tuple[Line, ...] = ()
        self.chosen = 0
        self._links: list[Link] = []
        self._wrapped: list[Strip] = []
        self._where: list[int] = []
        """The line each link begins in, after wrapping."""

    @property
    def plain(self) -> str:
        """All of it as text."""
        return "\n".join("".join(span.text for span in line) for line in self.lines_)

    @property
    def links(self) -> tuple[Link, ...]:
        """In reading order."""
        return tuple(self._links)

    def show(self, lines: Sequence[Line]) -> None:
        """Show other lines; the first link is the chosen one."""
        if tuple(lines) == self.lines_:
            return
        self.lines_ = tuple(lines)
        self.chosen = 0
        self._wrap()
        self.scroll_to(y=0, animate=False, force=True)

    def on_resize(self) -> None:
        """Wrap anew."""
        self._wrap()

    def on_focus(self) -> None:
        """The chosen link is shown."""
        self._wrap()

    def on_blur(self) -> None:
        """It is not."""
        self._wrap()

    def notify_style_update(self) -> None:
        """Another theme."""
        super().notify_style_update()
        self._wrap()

    def action_pick(self, step: int) -> None:
        """Choose another link."""
        if not self._links:
            self.action_scroll_by(step)
            return
        self.chosen = max(0, min(self.chosen + step, len(self._links) - 1))
        self._wrap()
        line, top, height = self._where[self.chosen], self.scroll_offset.y, max(1, self.size.height)
        if not top <= line < top + height:
            self.scroll_to(y=max(0, line - height // 2), animate=False, force=True)

    def action_scroll_by(self, pages: int) -> None:
        """A page further."""
        self.scroll_to(y=self.scroll_offset.y + pages * max(1, self.size.height - 1), animate=False, force=True)

    def action_follow(self) -> None:
        """Jump to where the chosen link leads."""
        if self._links:
            self.post_message(self.Followed(self._links[self.chosen]))

    def on_click(self, event: events.Click) -> None:
        """Follow the link under the mouse."""
        place = event.style.meta.get(_LINK)
        if isinstance(place, int) and place < len(self._links):
            self.post_message(self.Followed(self._links[place]))

    def _wrap(self) -> None:
        if not self.size.width:
            return
        width = max(10, self.scrollable_content_region.width or self.size.width)
        self._links, self._where, self._wrapped = [], [], []
        link_style = self.get_component_rich_style("linked--link")
        chosen_style = self.get_component_rich_style("linked--chosen")
        for line in self.lines_:
            text = Text(end="")
            for span in line:
                style = Style.parse(span.style)
                if span.link is not None:
                    own = Style(color=style.color or link_style.color, underline=True)
                    if self.has_focus and len(self._links) == self.chosen:
                        own = chosen_style
                    style = style + own + Style(meta={_LINK: len(self._links)})
                    self._links.append(span.link)
                text.append(span.text, style)
            for wrapped in text.wrap(self.app.console, width) or [Text("")]:
                strip = Strip(wrapped.render(self.app.console), wrapped.cell_len)
                for segment in strip:
                    place = segment.style.meta.get(_LINK) if segment.style is not None else None
                    if place is not None and place == len(self._where):
                        self._where.append(len(self._wrapped))
                self._wrapped.append(strip)
        self._where += [0] * (len(self._links) - len(self._where))
        self.virtual_size = Size(width, len(self._wrapped))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of it."""
        width = self.scrollable_content_region.width
        place = y + self.scroll_offset.y
        if place >= len(self._wrapped):
            return Strip([Segment(" " * width, self.rich_style)], width)
        return self._wrapped[place].adjust_cell_length(width).apply_style(self.rich_style)
