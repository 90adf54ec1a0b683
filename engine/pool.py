"""The KV pool: which slots hold no token. Slots come in pages; a page belongs to one holder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from schedscope.engine.errors import SchedscopeError


class PoolExhaustedError(SchedscopeError):
    """Admission promised memory that is not there. SGLang's server stops here; ours ends the batch's requests."""


class KVPool:
    """Free slots of a pool of `num_pages` pages of `page_size` tokens.

    Page n holds the slots `n * page_size ..`. Freed pages are taken again, last in, first out, before fresh ones.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._fresh = 0
        """The first page that was never taken."""
        self._freed = array("i")

    @property
    def size(self) -> int:
        """Tokens in all."""
        return self.num_pages * self.page_size

    @property
    def available(self) -> int:
        """Free tokens, whole pages."""
        return (len(self._freed) + self.num_pages - self._fresh) * self.page_size

    def whole(self, count: int) -> int:
        """Tokens of the pages that hold `count` tokens of one holder."""
        return -(-count // self.page_size) * self.page_size

    def extend(self, row: array[int], end: int) -> None:
        """Append slots to `row` until it holds `end`; fills its last page first. Raises PoolExhaustedError."""
        page = self.page_size
        missing = end - len(row)
        spare = min(-len(row) % page, missing)
        count = -(-(missing - spare) // page)
        self._check(count * page)
        if spare > 0:
            following = row[-1] + 1
            row.extend(range(following, following + spare))
        pages = self._take(count)
        if page == 1:
            row.extend(pages)
            return
        for number in pages:
            row.extend(range(number * page, number * page + page))
        del row[end:]

    def take(self, count: int) -> array[int]:
        """So many slots, each for a holder of its own; only with pages of one token. Raises PoolExhaustedError."""
        self._check(count)
        return self._take(count)

    def extend_each(self, rows: Sequence[array[int]]) -> None:
        """Append one slot to each row, as `extend` would one after the other. Raises PoolExhaustedError first."""
        page = self.page_size
        fresh = rows if page == 1 else [row for row in rows if len(row) % page == 0]
        self._check(len(fresh) * page)
        pages = self._take(len(fresh))
        if page > 1:
            for row in rows:
                if len(row) % page:
                    row.append(row[-1] + 1)
        for row, number in zip(fresh, pages, strict=True):
            row.append(number * page)

    def _check(self, needed: int) -> None:
        if needed > self.available:
            raise PoolExhaustedError(f"the KV pool has {self.available} free tokens, {needed} are needed")

    def _take(self, count: int) -> array[int]:
        used = min(count, len(self._freed))
        keep = len(self._freed) - used
        pages = self._freed[keep:]
        pages.reverse()
        del self._freed[keep:]
        fresh = count - used
        pages.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        return pages

    def free(self, slots: array[int]) -> None:
        """Give back whole pages; `slots` starts on a page boundary of its holder's row."""
        page = self.page_size
        pages = slots[::page] if page == 1 else array("i", (slot // page for slot in slots[::page]))
        pages.reverse()
        self._freed.extend(pages)

    def shrink(self, available: int) -> None:
        """Give up free pages until at most `available` tokens, whole pages, are free."""
        surplus = max(self.available - available, 0)
        self.num_pages -= -(-surplus // self.page_size)

    def set_aside(self, available: int) -> None:
        """Take free pages out of use, as if someone held them, until at most `available` tokens are free."""
        surplus = max(self.available - available, 0)
        self._take(-(-surplus // self.page_size))
