"""The run as a strip: lanes over time, a column per bucket. Loading and painting are plain functions over values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from schedscope.replay.palette import GATES, GREY, POLICIES, REASONS, SERIES, VERDICTS, Hue
from schedscope.replay.series import Timeline
from schedscope.replay.window import Window
from schedscope.tui.look import BLOCKS, HATCH, Look, seconds, short
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

LABEL = 20
"""Cells of a lane's name and value."""

Values = tuple[float | None, ...]


class Bucket(NamedTuple):
    """What most of a bucket was, in a band."""

    what: str
    share: float
    """Of the bucket, 0..1."""


class Chart(NamedTuple):
    """A lane of numbers."""

    name: str
    values: Values
    top: float
    """The largest, which reaches to the lane's top."""
    hue: Hue
    words: Callable[[float | None], str]


class Band(NamedTuple):
    """A lane of what prevailed."""

    name: str
    buckets: tuple[Bucket | None, ...]
    hue: Callable[[str], Hue]


class Lanes(NamedTuple):
    """A window of the run, ready to be painted."""

    window: Window
    charts: tuple[Chart, ...]
    bands: tuple[Band, ...]
    gaps: tuple[tuple[int, int], ...]
    """First and last bucket of each piece in which records are missing."""


def load_lanes(timeline: Timeline, window: Window) -> Lanes:
    """Ask the timeline what the strip shows of a window."""
    load = timeline.load(window)
    latency = timeline.latency(window)
    width_s = window.width_ns / 1e9

    def column(name: str) -> Values:
        return tuple((load if name in load.column_names else latency)[name].to_pylist())

    admitted = tuple((a or 0) + (b or 0) for a, b in zip(column("prompt_tokens"), column("again_tokens"), strict=True))
    charts = (
        _chart("queue", column("queue_max"), SERIES["queue"], short),
        Chart("hit rate", column("hit_rate"), 1.0, SERIES["hit_rate"], _percent),
        _chart("admitted tok", admitted, SERIES["admitted"], short),
        _chart("TTFT p99", column("ttft_p99"), SERIES["ttft_p99"], seconds),
    )

    def prevailing(of: str) -> tuple[Bucket | None, ...]:
        found: list[Bucket | None] = [None] * window.buckets
        totals = [0.0] * window.buckets
        most = [0.0] * window.buckets
        for row in timeline.shares(of, window).to_pylist():  # type: ignore[arg-type]
            bucket, weight = row["bucket"], row["seconds"] if of == "gate" else row["count"]
            totals[bucket] += weight
            if weight >= most[bucket]:
                most[bucket] = weight
                found[bucket] = Bucket(row["what"], 0.0)
        return tuple(
            bucket and bucket._replace(share=min(1.0, total / width_s) if of == "gate" else 1.0)
            for bucket, total in zip(found, totals, strict=True)
        )

    bands = (
        Band("policy", prevailing("policy"), policy_hue),
        Band("gates", prevailing("gate"), lambda what: GATES.get(what, GREY)),
        Band("refused", prevailing("refused"), lambda what: REASONS.get(what, GREY)),
    )
    last = window.buckets - 1
    gaps = tuple(
        (max(0, window.bucket_of(gap.begin_ns)), min(last, window.bucket_of(gap.end_ns)))
        for gap in timeline.stretches("gap", window).longest
    )
    return Lanes(window, charts, bands, gaps)


def policy_hue(what: str) -> Hue:
    """Of a policy, or of one with its fallback in brackets."""
    return VERDICTS["refused"] if "(" in what else POLICIES.get(what, GREY)


def _brief(what: str) -> str:
    """What prevailed, where there is little room: a fallback is told, its reason is not."""
    name, fell_back, _ = what.partition(" (")
    return f"{name} instead" if fell_back else name


def _chart(name: str, values: Values, hue: Hue, words: Callable[[float | None], str]) -> Chart:
    return Chart(name, values, max((v for v in values if v is not None), default=0.0) or 1.0, hue, words)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


class TimelineStrip(Widget, can_focus=True):
    """The strip. It is told the moment that is looked at, and says where somebody clicked."""

    DEFAULT_CSS = """
    TimelineStrip {
        height: 6;
        & > .strip--label { color: $foreground 75%; }
        & > .strip--cursor { background: $accent 45%; }
        & > .strip--note { color: $foreground 60%; }
    }
    TimelineStrip:focus > .strip--label { color: $primary; text-style: bold; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"strip--label", "strip--cursor", "strip--note"}

    class Picked(Message):
        """A moment was clicked."""

        def __init__(self, ns: int) -> None:
            super().__init__()
            self.ns = ns

    class Resized(Message):
        """It has room for another number of buckets."""

        def can_replace(self, message: Message) -> bool:
            """Only the last size counts."""
            return isinstance(message, TimelineStrip.Resized)

    class Scrolled(Message):
        """The wheel was turned: closer, or further away."""

        def __init__(self, closer: bool) -> None:
            super().__init__()
            self.closer = closer

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.note = "reading the run's timeline …"
        """What is shown while there is nothing."""
        self.lanes: Lanes | None = None
        self.first_ns = 0
        """The run's begin, from which times are counted."""
        self.at_ns: int | None = None
        self.marks: tuple[tuple[int, str], ...] = ()
        """Moments with a letter each, for the ruler."""
        self.look = Look()
        self._painted: dict[int, list[Strip]] = {}

    @property
    def buckets(self) -> int:
        """Columns there is room for."""
        return max(1, self.size.width - LABEL)

    def show(self, lanes: Lanes, first_ns: int) -> None:
        """Show a window."""
        self.lanes, self.first_ns = lanes, first_ns
        self._forget()

    def point_at(self, ns: int | None) -> None:
        """Move the cursor."""
        self.at_ns = ns
        self.refresh()

    def _forget(self) -> None:
        self._painted.clear()
        self.refresh()

    def notify_style_update(self) -> None:
        """Another theme."""
        super().notify_style_update()
        self._forget()

    def on_resize(self) -> None:
        """Another number of buckets."""
        self._forget()
        self.post_message(self.Resized())

    def on_click(self, event: events.Click) -> None:
        """Go to the moment."""
        lanes = self.lanes
        bucket = event.x - LABEL
        if lanes is not None and 0 <= bucket < lanes.window.buckets:
            self.post_message(self.Picked(lanes.window.begin_ns + bucket * lanes.window.width_ns))

    def on_mouse_scroll_up(self) -> None:
        """Closer."""
        self.post_message(self.Scrolled(closer=True))

    def on_mouse_scroll_down(self) -> None:
        """Further away."""
        self.post_message(self.Scrolled(closer=False))

    # ---- painting ------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """One line of it."""
        lanes, width = self.lanes, self.size.width
        if lanes is None:
            words = self.note if y == 0 else ""
            note = Strip([Segment(words, self.get_component_rich_style("strip--note"))], len(words))
            return note.adjust_cell_length(width, self.rich_style)
        height = self.size.height
        lines = self._painted.get(height)
        if lines is None:
            lines = self._painted[height] = self._paint(lanes, height)
        line = lines[y] if y < len(lines) else Strip.blank(width)
        bucket = self._cursor(lanes)
        if y == height - 1:
            line = self._ruler(lanes, bucket)
        elif bucket is not None:
            line = self._with_cursor(lanes, line, y, bucket)
        return line.adjust_cell_length(width).apply_style(self.rich_style)

    def _cursor(self, lanes: Lanes) -> int | None:
        if self.at_ns is None or not lanes.window.begin_ns <= self.at_ns < lanes.window.end_ns:
            return None
        return lanes.window.bucket_of(self.at_ns)

    def _with_cursor(self, lanes: Lanes, line: Strip, y: int, bucket: int) -> Strip:
        style = Style(bgcolor=self.get_component_rich_style("strip--cursor").bgcolor)
        x = LABEL + bucket
        label = self._label(*self._value(lanes, y, bucket))
        return Strip.join([label, line.crop(LABEL, x), line.crop(x, x + 1).apply_style(style), line.crop(x + 1)])

    def _layout(self, lanes: Lanes, height: int) -> list[tuple[Chart | Band, int]]:
        """Lanes and how many lines each has: charts share what bands and the ruler leave."""
        room = max(1, height - 1)
        bands = lanes.bands if room >= 8 else lanes.bands[:1] if room >= 5 else ()
        if room == 4:
            bands = lanes.bands[:1]
        charts = lanes.charts[: max(1, room - len(bands))]
        if room - len(bands) < len(lanes.charts):
            charts = tuple(chart for chart in lanes.charts if chart.name != "admitted tok")[: room - len(bands)]
        each, more = divmod(room - len(bands), max(1, len(charts)))
        sized: list[tuple[Chart | Band, int]] = [(chart, each + (i < more)) for i, chart in enumerate(charts)]
        return sized + [(band, 1) for band in bands]

    def _value(self, lanes: Lanes, y: int, bucket: int) -> tuple[str, str]:
        """What a line's label says with the cursor in a bucket."""
        line = 0
        for lane, lines in self._layout(lanes, self.size.height):
            if y == line:
                if isinstance(lane, Chart):
                    return lane.name, lane.words(lane.values[bucket])
                found = lane.buckets[bucket]
                return lane.name, "" if found is None else _brief(found.what)
            if y < line + lines:
                top = isinstance(lane, Chart) and y == line + 1
                return "", f"of {lane.words(lane.top)}" if top and isinstance(lane, Chart) else ""
            line += lines
        return "", ""

    def _label(self, name: str, value: str) -> Strip:
        room = LABEL - 1 - len(name) - bool(name)
        text = f"{name} {value[: max(0, room)]:>{max(0, room)}} " if name else f"{value:>{LABEL - 1}} "
        style = self.get_component_rich_style("strip--label")
        return Strip([Segment(text, Style(color=style.color, bold=style.bold))], len(text)).adjust_cell_length(LABEL)

    def _paint(self, lanes: Lanes, height: int) -> list[Strip]:
        lines: list[Strip] = []
        for lane, count in self._layout(lanes, height):
            if isinstance(lane, Chart):
                for line in range(count):
                    value = f"max {lane.words(lane.top)}" if line == 0 else ""
                    label = self._label(lane.name if line == 0 else "", value)
                    lines.append(Strip.join([label, self._chart_line(lanes, lane, count - 1 - line, count)]))
            else:
                lines.append(Strip.join([self._label(lane.name, ""), self._band_line(lanes, lane)]))
        return lines

    def _chart_line(self, lanes: Lanes, chart: Chart, level: int, levels: int) -> Strip:
        """A line of a chart, `level` lines above its foot."""
        style = Style(color=self.look.hue(chart.hue))
        glyphs = []
        for value in chart.values:
            eighths = 0 if value is None else round(min(value / chart.top, 1.0) * levels * 8)
            if value and not eighths:
                eighths = 1
            glyphs.append(BLOCKS[min(8, max(0, eighths - 8 * level))])
        return self._hatched(lanes, [(glyph, style) for glyph in glyphs])

    def _band_line(self, lanes: Lanes, band: Band) -> Strip:
        cells: list[tuple[str, Style | None]] = []
        names = self._names(band)
        for place, bucket in enumerate(band.buckets):
            if bucket is None:
                cells.append((" ", None))
                continue
            style = Style(color=self.look.hue(band.hue(bucket.what)))
            glyph = names.get(place) or ("░" if bucket.share < 0.34 else "▒" if bucket.share < 0.67 else "▬")
            cells.append((glyph, style))
        return self._hatched(lanes, cells)

    @staticmethod
    def _names(band: Band) -> dict[int, str]:
        """Letters that name stretches which are long enough, so that colour isn't needed to tell them apart."""
        letters: dict[int, str] = {}
        begin = 0
        whats = [None if bucket is None else bucket.what for bucket in band.buckets]
        for place in range(1, len(whats) + 1):
            if place < len(whats) and whats[place] == whats[begin]:
                continue
            what = whats[begin]
            if what is not None and place - begin >= len(what) + 2:
                letters |= {begin + i: letter for i, letter in enumerate(f"{what} ")}
            elif what is not None and place - begin >= 5:
                letters |= {begin + i: letter for i, letter in enumerate(f"{what[: place - begin - 2]}… ")}
            begin = place
        return letters

    def _hatched(self, lanes: Lanes, cells: Sequence[tuple[str, Style | None]]) -> Strip:
        hatch = Style(color=self.look.hue(GREY))
        painted = list(cells)
        for first, last in lanes.gaps:
            for bucket in range(first, last + 1):
                if 0 <= bucket < len(painted) and painted[bucket][0] == " ":
                    painted[bucket] = (HATCH, hatch)
        segments: list[Segment] = []
        for glyph, style in painted:
            if segments and segments[-1].style == style:
                segments[-1] = Segment(segments[-1].text + glyph, style)
            else:
                segments.append(Segment(glyph, style))
        return Strip(segments, len(painted))

    def _ruler(self, lanes: Lanes, bucket: int | None) -> Strip:
        """Begin, end and the moment looked at; marks above their moments."""
        window = lanes.window
        cells = [" "] * window.buckets

        def write(place: int, words: str) -> None:
            place = max(0, min(place, len(cells) - len(words)))
            cells[place : place + len(words)] = list(words)[: len(cells)]

        begin, end = (seconds((ns - self.first_ns) / 1e9) for ns in (window.begin_ns, window.end_ns - 1))
        write(0, f"├ {begin}")
        write(len(cells), f"{end} ┤")
        for ns, letter in self.marks:
            if window.begin_ns <= ns < window.end_ns:
                write(window.bucket_of(ns), letter)
        if bucket is not None and self.at_ns is not None:
            moment = seconds((self.at_ns - self.first_ns) / 1e9)
            if bucket + len(moment) + 2 <= len(cells):
                write(bucket, f"▲ {moment}")
            else:
                write(bucket - len(moment) - 1, f"{moment} ▲")
        style = self.get_component_rich_style("strip--label")
        words = "".join(cells)
        return Strip.join(
            [self._label("since begin", ""), Strip([Segment(words, Style(color=style.color))], len(words))]
        )
