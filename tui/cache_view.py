"""The prefix cache at a pass, as a tree. Looking never touches: a copy is asked what would be evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text
from schedscope.engine.radix import Node, RadixCache
from schedscope.engine.view import View
from schedscope.replay.describe import number
from schedscope.replay.palette import GREY, NODES
from schedscope.tui.grid import Column, Grid
from schedscope.tui.look import Look, bar, short, whose
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

_NAMED = 3
"""Waiting requests that a row names."""


class Branch(NamedTuple):
    """A node of the tree, as a row."""

    node: int
    """Its id."""
    depth: int
    start: int
    """First token of its piece, counted from the root."""
    end: int
    below: int
    """Tokens in it and everything below."""
    locks: int
    hits: int
    age: int
    """Among all nodes by last access: 0 is the most recent."""
    waiters: tuple[str, ...]
    """Waiting requests whose match ends in it."""
    evict: int | None
    """Its turn when leaves are evicted one after the other, from 0; None: it is held."""
    children: int
    space: bool
    """It is the first of a namespace."""

    @property
    def tokens(self) -> int:
        """Of its own piece."""
        return self.end - self.start


class Tree(NamedTuple):
    """The cache, parents before children, the largest branch first."""

    branches: tuple[Branch, ...]
    evictable: int
    protected: int
    available: int
    policy: str
    page_size: int
    matches: dict[str, tuple[int, int]]
    """Of each waiting request: the node in which its match ends, and its length."""

    def path(self, rid: str | None) -> frozenset[int]:
        """Ids of the nodes that a request matches."""
        if rid not in self.matches:
            return frozenset()
        end = self.matches[rid][0]
        found: set[int] = set()
        depth = -1
        for branch in reversed(self.branches[: self.row(end) + 1]):
            if branch.node == end or branch.depth == depth:
                found.add(branch.node)
                depth = branch.depth - 1
        return frozenset(found)

    def row(self, node: int) -> int:
        """The row of a node; -1: the root, or not there."""
        return next((i for i, branch in enumerate(self.branches) if branch.node == node), -1)


def tree_of(view: View) -> Tree:
    """The cache of a view as rows. Reads it, and evicts from a copy."""
    cache = view.cache
    matches: dict[str, tuple[int, int]] = {}
    waiters: dict[int, list[str]] = {}
    for request in view.queue:
        found = cache.match(request.tokens, request.space)
        if found.length:
            node = cache.resolve(found)
            matches[request.rid] = node.id, found.length
            waiters.setdefault(node.id, []).append(request.rid)
    nodes = list(cache.nodes())
    recent = {node.id: age for age, node in enumerate(sorted(nodes, key=_last_access, reverse=True))}
    turns = _turns(cache)
    below = Counter({node.id: len(node) for node in nodes})
    for node in reversed(nodes):
        if node.parent is not None and node.parent.parent is not None:
            below[node.parent.id] += below[node.id]
    branches: list[Branch] = []
    stack = [(node, 0) for node in _by_size(cache.root, below)]
    while stack:
        node, depth = stack.pop()
        branches.append(
            Branch(
                node=node.id,
                depth=depth,
                start=node.start,
                end=node.end,
                below=below[node.id],
                locks=node.lock_ref,
                hits=node.hit_count,
                age=recent[node.id],
                waiters=tuple(waiters.get(node.id, ())),
                evict=turns.get(node.id),
                children=len(node.children),
                space=depth == 0 and len(node.edge) > cache.page_size * 4,
            )
        )
        stack.extend((child, depth + 1) for child in _by_size(node, below))
    return Tree(
        tuple(branches),
        cache.evictable,
        cache.protected,
        view.available,
        cache.eviction_policy,
        cache.page_size,
        matches,
    )


def _by_size(node: Node, below: Counter[int]) -> list[Node]:
    """Its children, the smallest first: the stack turns them round."""
    return sorted(node.children.values(), key=lambda child: (below[child.id], -child.id))


def _last_access(node: Node) -> int:
    """As recent as the most recent below it."""
    return node.last_access


def _turns(cache: RadixCache) -> dict[int, int]:
    """In which order a copy of the cache gives up everything it may."""
    copy, _ = cache.fork()
    return {evicted.node.id: turn for turn, evicted in enumerate(copy.evict(copy.evictable))}


class CacheView(Vertical):
    """The tree, with where the selected request's match ends."""

    DEFAULT_CSS = """
    CacheView {
        & > #pool { height: 3; }
        & > Grid { height: 1fr; }
    }
    """

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look_ = look
        self.tree_: Tree | None = None
        self._rid: str | None = None
        self._path: frozenset[int] = frozenset()

    def compose(self) -> ComposeResult:
        """The pool as a bar, the tree."""
        yield Static("re-running up to this pass …", id="pool")
        yield Grid(id="tree", empty="the cache is empty")

    def say(self, words: str) -> None:
        """There is no tree to show, and why."""
        self.tree_ = None
        self.query_one("#pool", Static).update(Text(words))
        self.query_one(Grid).fill([Column("", 0)], 0, lambda _: ())

    def show(self, tree: Tree, rid: str | None) -> None:
        """Show a tree and where a request matches."""
        moved = tree is not self.tree_ or rid != self._rid
        self.tree_, self._rid = tree, rid
        if not moved:
            return
        self._path = tree.path(rid)
        self.query_one("#pool", Static).update(self._pool(tree))
        row = tree.row(tree.matches[rid][0]) if rid is not None and rid in tree.matches else None
        grid = self.query_one(Grid)
        wide = self.size.width >= 100
        columns = [
            Column("prefix, tokens from … to", 0),
            Column("tokens", 7, right=True),
            Column("with all below", 24 if wide else 14),
            Column("locks", 5, right=True),
            *([Column("hits", 5, right=True)] if wide else []),
            Column("recent", 7, right=True),
            Column("evicted", 8, right=True),
            Column("who waits on it", 34 if wide else 12),
        ]
        grid.fill(columns, len(tree.branches), lambda i: self._cells(i, wide), row)

    def on_resize(self) -> None:
        """Bars get another length."""
        if self.tree_ is not None:
            tree, self.tree_ = self.tree_, None
            self.show(tree, self._rid)

    def _pool(self, tree: Tree) -> Text:
        look, width = self.look_, max(40, self.size.width)
        total = max(1, tree.evictable + tree.protected + tree.available)
        locked = round(tree.protected / total * width)
        kept = round(tree.evictable / total * width)
        text = Text(no_wrap=True)
        text.append("█" * locked, look.of(NODES, "locked"))
        text.append("▓" * kept, look.of(NODES, "recent"))
        text.append("░" * max(0, width - locked - kept), look.hue(GREY))
        text.append(f"\n█ {number(tree.protected)} locked by running requests", look.of(NODES, "locked"))
        text.append(f"   ▓ {number(tree.evictable)} evictable, {tree.policy}", look.of(NODES, "recent"))
        text.append(f"   ░ {number(tree.available)} free", look.hue(GREY))
        if self._rid is not None:
            text.append("\n")
            text.append_text(whose(self._rid, f"bold {look.of(NODES, 'selected')}"))
            found = tree.matches.get(self._rid)
            where = f" matches {found[1]:,} tokens, marked with ▶" if found else " matches nothing here"
            text.append(where, look.of(NODES, "selected"))
        return text

    def _cells(self, row: int, wide: bool) -> Sequence[Text]:
        tree, look = self.tree_, self.look_
        assert tree is not None
        branch = tree.branches[row]
        on_path = branch.node in self._path
        kind = "locked" if branch.locks else "next" if branch.evict is not None and branch.evict < 3 else "recent"
        if kind == "recent" and branch.age > len(tree.branches) // 2:
            kind = "old"
        colour = look.of(NODES, kind)
        mark = Text("▶ " if on_path else "  ", look.of(NODES, "selected"))
        name = Text.assemble(
            mark,
            ("│ " * branch.depth, look.hue(GREY)),
            (f"{branch.start:,} … {branch.end:,}", colour),
            (" own namespace" if branch.space else "", look.hue(GREY)),
        )
        largest = max(1, tree.branches[0].below)
        evicted = "held" if branch.locks else "-" if branch.evict is None else str(branch.evict + 1)
        if branch.evict == 0:
            evicted = "next"
        room = 16 if wide else 7
        waiters = Text(f"{len(branch.waiters)}: " if branch.waiters else "")
        for place, rid in enumerate(branch.waiters[:_NAMED]):
            waiters.append(", " if place else "")
            waiters.append_text(whose(rid, look.of(NODES, "selected") if rid == self._rid else ""))
        if len(branch.waiters) > _NAMED:
            waiters.append(" …")
        return [
            name,
            Text(short(branch.tokens)),
            Text.assemble((bar(branch.below / largest, room), colour), f" {short(branch.below):>6}"),
            Text(str(branch.locks or ""), look.of(NODES, "locked")),
            *([Text(str(branch.hits))] if wide else []),
            Text(f"{branch.age + 1}"),
            Text(evicted, look.of(NODES, "next") if branch.evict == 0 else ""),
            waiters,
        ]
