"""The prefix cache: what it holds at a pass, how well it is reused, and what was evicted and then needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dash import html
from dash.development.base_component import Component
from schedscope.dashboard import figures, overview, parts, words
from schedscope.dashboard.chosen_pass import number_of
from schedscope.dashboard.desk import Desk, Page
from schedscope.dashboard.examine import Examined
from schedscope.dashboard.figures import Figure
from schedscope.dashboard.insight import examined, finding_row
from schedscope.dashboard.library import Pending
from schedscope.dashboard.links import pass_link, request_link
from schedscope.dashboard.parts import Column
from schedscope.dashboard.rebuilt import near
from schedscope.engine.errors import SchedscopeError
from schedscope.engine.radix import Node, RadixCache
from schedscope.replay.finding import plural
from schedscope.replay.palette import GREEN, NODES, SERIES, SKY
from schedscope.replay.provenance import CacheListener

_SHOWN = 500
"""Nodes of a tree; what is smaller is drawn together."""
_ABOUT_CACHE = {
    "apart_by_namespace",
    "cold_prefix_storm",
    "duplicate_prefill",
    "evicted_before_use",
    "held_back",
    "low_hit_rate",
    "thrashing_pool",
}
_FORGONE = 5
"""Requests that are named."""
_OLD = 0.5
"""Of all nodes by their last use, the older half."""


class Leaf(NamedTuple):
    """A node of the tree, as it is drawn."""

    name: str
    parent: str
    tokens: int
    """Of it and all below it."""
    own: int
    """Its own; 0: it stands for several small ones."""
    start: int
    locked: int
    """Requests that hold it."""
    hits: int
    age: float
    """Share of nodes that were used later, 0..1."""
    brought: str | None
    """rid of who brought it; None: longer ago than is known."""


class Tree(NamedTuple):
    """The cache before a pass."""

    leaves: tuple[Leaf, ...]
    nodes: int
    """All there are."""
    evictable: int
    protected: int
    policy: str
    """Eviction policy."""
    known_since: int
    """Pass from which on it is known who brought what."""


def layout(desk: Desk, draw: Callable[[str], Any]) -> list[Component]:
    """The page of the cache."""
    del desk
    return [
        parts.part("which", draw("which")),
        parts.chart(
            "tree",
            "The tree",
            draw("tree"),
            note="width is tokens; a prefix stands above what continues it",
            wide=True,
            tall=True,
        ),
        html.Div(
            [
                parts.chart("memory", "Residency", draw("memory"), note="share of the KV pool, most at any step"),
                parts.chart("reuse", "Reuse", draw("reuse"), note="prompt tokens at first admission"),
                parts.chart("evicted", "Evicted", draw("evicted"), note="tokens that left the cache"),
                parts.chart(
                    "again",
                    "Computed again",
                    draw("again"),
                    note="tokens of requests that lost their memory, at readmission",
                ),
                parts.chart(
                    "needed",
                    "Evicted, then needed",
                    draw("needed"),
                    note="tokens cached while their request waited, computed at its turn",
                ),
                parts.part("forgone", draw("forgone"), className="card"),
            ],
            className="grid",
        ),
        parts.part("missed", draw("missed")),
    ]


def tree_of(desk: Desk) -> Tree | Pending:
    """The tree before the chosen pass. Raises SchedscopeError."""
    rank, number = number_of(desk)
    run = desk.book.run

    def find() -> Tree:
        heard = CacheListener()
        (moment,) = near(run, rank, number).visit([number], heard)
        return _drawn(moment.view.cache, heard)

    return desk.later(("tree", rank, number), find)


def _drawn(cache: RadixCache, heard: CacheListener) -> Tree:
    nodes = list(cache.nodes())
    below = {id(node): len(node) for node in nodes}
    for node in reversed(nodes):
        if node.parent is not None and node.parent is not cache.root:
            below[id(node.parent)] += below[id(node)]
    order = {id(node): place for place, node in enumerate(sorted(nodes, key=lambda each: -each.last_access))}
    largest = {id(node) for node in sorted(nodes, key=lambda each: -below[id(each)])[:_SHOWN]}
    leaves: list[Leaf] = []
    small: dict[str, list[Node]] = {}
    for node in nodes:
        parent = "root" if node.parent is None or node.parent is cache.root else str(node.parent.id)
        if id(node) not in largest:
            # A child never holds more than its parent, so the parent of the largest of them is drawn.
            if node.parent is None or node.parent is cache.root or id(node.parent) in largest:
                small.setdefault(parent, []).append(node)
            continue
        brought = heard.insertions.get(node.id)
        leaves.append(
            Leaf(
                str(node.id),
                parent,
                below[id(node)],
                len(node),
                node.start,
                node.lock_ref,
                node.hit_count,
                order[id(node)] / max(len(nodes) - 1, 1),
                None if brought is None else brought.rid,
            )
        )
    for parent, group in small.items():
        tokens = sum(below[id(node)] for node in group)
        leaves.append(Leaf(f"{parent}…", parent, tokens, 0, group[0].start, 0, 0, 1.0, None))
    return Tree(tuple(leaves), len(nodes), cache.evictable, cache.protected, cache.eviction_policy, heard.known_since)


def tree(desk: Desk) -> Figure:
    """The tree as an icicle."""
    found = tree_of(desk)
    if isinstance(found, Pending):
        figure = figures.blank(desk.theme, "rebuilding the cache as it was before this pass…")
        figure["layout"]["meta"]["pending"] = True
        return figure
    if not found.leaves:
        return figures.blank(desk.theme, "the cache was empty")
    total = sum(leaf.tokens for leaf in found.leaves if leaf.parent == "root")
    shades = {name: hue.on(desk.theme) for name, hue in NODES.items()}
    ids, parents_, values, labels, colours, said = (
        ["root"],
        [""],
        [total],
        [f"{total:,} tokens"],
        ["rgba(128,128,128,0.15)"],
        ["everything that is cached"],
    )
    for leaf in found.leaves:
        state = "locked" if leaf.locked else "old" if leaf.age > _OLD else "recent"
        ids.append(leaf.name)
        parents_.append(leaf.parent)
        values.append(leaf.tokens)
        labels.append(f"{leaf.own:,}" if leaf.own else "…")
        colours.append(figures.faint(shades[state], 0.85 if state == "locked" else 0.75 - 0.45 * leaf.age))
        if not leaf.own:
            said.append(f"smaller nodes, {leaf.tokens:,} tokens together")
            continue
        lines = [
            f"tokens {leaf.start:,} to {leaf.start + leaf.own:,} of its sequences",
            f"{leaf.tokens:,} tokens with all that continues it",
            f"held by {leaf.locked:,} running" if leaf.locked else "held by nobody",
            f"used more recently than {1 - leaf.age:.0%} of the nodes",
            f"brought by {words.in_chart(leaf.brought, 40)}"
            if leaf.brought is not None
            else f"brought before pass {found.known_since:,}",
        ]
        said.append("<br>".join(lines))
    layout = figures.base(desk.theme)
    return {
        "data": [
            {
                "type": "icicle",
                "ids": ids,
                "parents": parents_,
                "values": values,
                "labels": labels,
                "branchvalues": "total",
                "customdata": said,
                "hovertemplate": "%{customdata}<extra></extra>",
                "marker": {"colors": colours, "line": {"width": 1, "color": layout["paper_bgcolor"]}},
                "tiling": {"orientation": "v", "pad": 1},
                "textfont": {"size": 12, "color": "#e6edf3" if desk.theme == "dark" else "#17202b"},
                "pathbar": {"visible": False},
                "sort": True,
                "root": {"color": "rgba(128,128,128,0.15)"},
            }
        ],
        "layout": {
            **layout,
            "margin": {"l": 4, "r": 4, "t": 4, "b": 4},
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "meta": {},
        },
    }


def which(desk: Desk) -> Component:
    """Which pass this is, the ways to others, and the cache in numbers."""
    rank, number = number_of(desk)
    extent = next(each for each in desk.timeline.extent.ranks if each.rank == rank)
    first, last = extent.first_pass or 0, max(extent.last_pass or 0, number)
    ways = []
    for step in (-100, -10, -1, 1, 10, 100):
        target = min(max(number + step, first), last)
        label = f"{'−' if step < 0 else '+'}{abs(step)}"
        href = desk.cursor.href("/cache", rank=rank, pass_number=target)
        ways.append(
            parts.link(label, href, className="action")
            if target != number
            else html.Span(label, className="action off")
        )
    ways.append(parts.link("this pass", desk.cursor.href("/pass", rank=rank, pass_number=number), className="action"))
    title = html.Div(
        [
            html.H2(f"The cache before pass {number:,} of rank {rank}"),
            html.Nav(ways, className="ways", **{"aria-label": "Passes"}),
        ],
        className="title",
    )
    try:
        found = tree_of(desk)
    except SchedscopeError as error:
        return html.Section(
            [title, html.P(f"It can't be rebuilt: {words.name(str(error), 400)}")], className="card wide lead"
        )
    if isinstance(found, Pending):
        return html.Section([title, parts.working("Rebuilding the cache as it was…")], className="card wide lead")
    keys = [("locked", "held by running requests"), ("recent", "used recently"), ("old", "used long ago")]
    said = f"{found.nodes:,} nodes; {found.protected:,} tokens held, {found.evictable:,} evictable, by {found.policy}"
    legend = html.P([parts.chip(label, NODES[name], desk.theme) for name, label in keys], className="legend")
    return html.Section([title, html.P(said), legend], className="card wide lead")


def reuse(desk: Desk) -> Figure:
    """What was found of prompts, and what had to be computed."""
    return overview.admitted(desk)


def evicted(desk: Desk) -> Figure:
    """What left the cache."""
    load: dict[str, list[Any]] = desk.table("load", desk.window()).to_pydict()
    if load["evicted_tokens"][0] is None:
        return figures.blank(desk.theme, "evictions are not recorded: --level full")
    span = desk.span()
    return figures.over_time(
        span, [figures.bars(span, "evicted", load["evicted_tokens"], SERIES["evicted"], desk.theme)], desk.theme
    )


def again(desk: Desk) -> Figure:
    """What requests that had lost their memory found of themselves."""
    load: dict[str, list[Any]] = desk.table("load", desk.window()).to_pydict()
    if load["again"][0] is None:
        return figures.blank(desk.theme, "readmissions are not recorded: --level decisions")
    if not any(load["again"]):
        return figures.blank(desk.theme, "no request lost its memory in this time")
    span = desk.span()
    lost = [tokens - cached for tokens, cached in zip(load["again_tokens"], load["again_cached"], strict=True)]
    shown = [
        figures.bars(span, "found again", load["again_cached"], GREEN, desk.theme),
        figures.bars(span, "computed again", lost, SKY, desk.theme),
    ]
    return figures.over_time(span, shown, desk.theme)


def needed(desk: Desk) -> Figure:
    """What was evicted while its request waited."""
    load: dict[str, list[Any]] = desk.table("load", desk.window()).to_pydict()
    if load["needed"][0] is None:
        return figures.blank(desk.theme, "decisions are not recorded: --level decisions")
    if not any(load["needed"]):
        return figures.blank(desk.theme, "no request lost a cached prefix while it waited, as far as passes looked")
    span = desk.span()
    return figures.over_time(
        span, [figures.bars(span, "computed again", load["needed_tokens"], SERIES["evicted"], desk.theme)], desk.theme
    )


def forgone(desk: Desk) -> list[Component]:
    """The requests whose prefixes were evicted before their turn."""
    load, cursor, window = desk.load(), desk.cursor, desk.whole()
    title = html.H3("Evicted before their turn")
    if not load["needed"]:
        said = (
            "No request that was admitted in this time lost a cached prefix while it waited, as far as passes looked."
        )
        return [html.Header([title]), html.P(said, className="hint")]
    rows = [
        [
            request_link(cursor, each.rank, each.rid, 20),
            words.count(each.best),
            pass_link(cursor, each.rank, each.had_pass),
            words.count(each.cached),
            pass_link(cursor, each.rank, each.admit_pass),
            words.count(each.lost),
            words.seconds(each.waited_s),
        ]
        for each in desk.once(("forgone", window), lambda: desk.timeline.forgone(window, most=_FORGONE))
    ]
    columns = [
        Column("request"),
        Column("had", True, "tokens that were cached while it waited, at most"),
        Column("last in pass"),
        Column("found", True, "tokens that were cached at its turn"),
        Column("in pass"),
        Column("computed again", True, "tokens"),
        Column("queue", True),
    ]
    note = f"{plural(load['needed'], 'request')}, {words.count(load['needed_tokens'])} tokens; those that lost most"
    table = parts.table(
        columns, rows, caption="Requests whose prefix was evicted before their turn", id="forgone-table"
    )
    return [html.Header([title, html.Span(note, className="note")]), table]


def missed(desk: Desk) -> Component:
    """What the doctor says about the cache: what it lost that was needed, what repeats and was not found."""
    title = "Findings about the cache"
    try:
        found = examined(desk)
    except SchedscopeError as error:
        return parts.card(title, html.P(str(error)), wide=True)
    if isinstance(found, Pending):
        return parts.card(title, parts.working("Examining the run…"), wide=True)
    mine = [each for each in found.examination.findings if each.detector in _ABOUT_CACHE]
    rows = [finding_row(desk, each) for each in mine]
    listed = (
        html.Ul(rows, className="findings")
        if rows
        else html.P("No detector found that the cache lost what was needed, or missed what repeats.")
    )
    return parts.card(title, *bounds(found), listed, wide=True)


def bounds(found: Examined) -> list[Component]:
    """What a cache that never forgets would have found."""
    return [
        html.P(
            f"Rank {rank}: of {known.prompts:,} prompts in a row, {known.rate:.1%} of the tokens came before in the "
            f"same namespace, and {known.found:.1%} were found; what is cached stays "
            f"{words.seconds(known.stays_s) if known.stays_s else 'for good'}."
        )
        for rank, known in found.bounds.items()
    ]


PAGE = Page(
    path="/cache",
    title="Cache",
    layout=layout,
    charts={
        "tree": tree,
        "memory": overview.memory,
        "reuse": reuse,
        "evicted": evicted,
        "again": again,
        "needed": needed,
    },
    parts={"which": which, "forgone": forgone, "missed": missed},
)
