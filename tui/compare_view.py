"""Two decisions side by side: a pass under another policy, or beside one of another run."""

from __future__ import annotations

from rich.text import Text
from schedscope.replay.page import Page
from schedscope.replay.palette import GREY, VERDICTS
from schedscope.tui.look import Look, whose
from schedscope.tui.pass_view import QueueGrid, headline
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static


class CompareView(Vertical):
    """Left what was recorded, right the other; both select the same request."""

    DEFAULT_CSS = """
    CompareView {
        & > #verdict { height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
        & > Horizontal { height: 1fr; }
        & > Horizontal > Vertical { width: 1fr; padding: 0 1 0 0; }
        & > Horizontal > Vertical > Static { height: 2; }
        & > Horizontal > Vertical > QueueGrid { height: 1fr; }
    }
    .-narrow CompareView > Horizontal { layout: vertical; }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look

    def compose(self) -> ComposeResult:
        """Two passes."""
        yield Static("press o to choose another policy, or ctrl+o to open another run beside this one", id="verdict")
        with Horizontal():
            for side in ("left", "right"):
                with Vertical():
                    yield Static(id=f"{side}-head")
                    yield QueueGrid(self.look_, id=f"{side}-queue")

    @property
    def left(self) -> QueueGrid:
        """The recorded pass."""
        return self.query_one("#left-queue", QueueGrid)

    @property
    def right(self) -> QueueGrid:
        """The other one."""
        return self.query_one("#right-queue", QueueGrid)

    def say(self, words: str) -> None:
        """Why there is nothing to compare."""
        self.query_one("#verdict", Static).update(Text(words))

    def show(self, name: str, page: Page, other_name: str, other: Page, rid: str | None) -> None:
        """Show two passes, with the same request selected in both."""
        look = self.look_
        for side, title, shown, compared in (("left", name, page, None), ("right", other_name, other, page)):
            bold = Text(title)
            bold.truncate(self.app.size.width // 2 - 2, overflow="ellipsis")
            head = Text.assemble((bold.plain, "bold"), "\n").append_text(headline(shown, look))
            self.query_one(f"#{side}-head", Static).update(head)
            self.query_one(f"#{side}-queue", QueueGrid).show(shown, rid, compared)
        self.query_one("#verdict", Static).update(difference(page, other, rid, look))


def difference(page: Page, other: Page, rid: str | None, look: Look) -> Text:
    """What is other, in a line, and what that means for a request."""
    admitted = {verdict.rid for verdict in page.admitted}
    instead = {verdict.rid for verdict in other.admitted}
    moved = sum(other.places.get(c.rid, c.after) != c.after for c in page.candidates)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(
        f"{moved} of {len(page.candidates)} stand elsewhere; admitted {len(instead)} instead of {len(admitted)}"
    )
    for words, whom, fate in (
        ("only there", instead - admitted, "admitted"),
        ("no more", admitted - instead, "refused"),
    ):
        if whom:
            text.append(f"; {words}: ", look.hue(GREY))
            for place, each in enumerate(sorted(whom)[:4]):
                text.append(", " if place else "")
                text.append_text(whose(each, look.of(VERDICTS, fate)))
            text.append(f" and {len(whom) - 4} more" if len(whom) > 4 else "")
    here, there = page.find(rid), other.find(rid)
    if rid is not None and here is not None and there is not None:
        text.append("\n")
        text.append_text(whose(rid, "bold"))
        text.append(f": place {here.after} here, {there.after} there; ")
        text.append("admitted" if here.fate == "admitted" else "not admitted", look.of(VERDICTS, here.fate))
        text.append(" here, ")
        text.append("admitted" if there.fate == "admitted" else "not admitted", look.of(VERDICTS, there.fate))
        text.append(" there")
    return text
