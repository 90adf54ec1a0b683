"""The run's moments that stand out, under the tall strip."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from schedscope.replay.anomalies import Anomaly
from schedscope.replay.describe import printable
from schedscope.replay.palette import BLUE, GREY, ORANGE, PURPLE, VERMILION, YELLOW, Hue
from schedscope.tui.grid import Column, Grid
from schedscope.tui.look import Look, seconds
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

KINDS: dict[str, tuple[str, Hue]] = {
    "fallback": ("policy fell back", ORANGE),
    "gate": ("gate", BLUE),
    "gap": ("gap", GREY),
    "retraction": ("retraction", VERMILION),
    "preemption": ("preemption", YELLOW),
    "slow": ("slow first token", PURPLE),
}


class TimelineView(Vertical):
    """A list of anomalies; each leads to its pass."""

    DEFAULT_CSS = """
    TimelineView {
        & > #anomalies-title { height: 1; }
        & > Grid { height: 1fr; }
    }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look
        self.anomalies: tuple[Anomaly, ...] = ()
        self._first_ns = 0

    def compose(self) -> ComposeResult:
        """Title and list."""
        yield Static(id="anomalies-title")
        yield Grid(id="anomalies", empty="nothing stands out")

    def show(self, anomalies: Sequence[Anomaly], first_ns: int) -> None:
        """Show them, by time."""
        self.anomalies, self._first_ns = tuple(anomalies), first_ns
        title = f"What stands out: {len(self.anomalies)}   n and N go through them from anywhere"
        self.query_one("#anomalies-title", Static).update(Text(title, self.look_.hue(GREY)))
        columns = [
            Column("time", 8, right=True),
            Column("rank", 4, right=True),
            Column("pass", 8, right=True),
            Column("what", 16),
            Column("", 0),
        ]
        self.query_one(Grid).fill(columns, len(self.anomalies), self._cells)

    def select(self, anomaly: Anomaly) -> None:
        """Show where one is."""
        self.query_one(Grid).select(self.anomalies.index(anomaly))

    def _cells(self, row: int) -> Sequence[Text]:
        anomaly = self.anomalies[row]
        name, hue = KINDS[anomaly.kind]
        words = anomaly.words if anomaly.rid is None else f"{anomaly.words}: {printable(anomaly.rid)}"
        return [
            Text(seconds((anomaly.ns - self._first_ns) / 1e9)),
            Text(str(anomaly.rank)),
            Text("-" if anomaly.pass_number is None else str(anomaly.pass_number)),
            Text(name, self.look_.hue(hue)),
            Text(words),
        ]
