"""The KV pool: which slots hold no token. Slots come in pages; a page belongs to one holder."""

from __future__ import annotations

from array import array

from schedscope.engine.errors import SchedscopeError


class PoolExhaustedError(SchedscopeError):
    """Admission promised memory that is not there. SGLang's server stops here; ours aborts the request."""


class KVPool:
    """Free slots of a pool of `num_pages` pages of `page_size` tokens.

    Page 0..n-1 holds the slots `page * page_size ..`. Freed pages are taken again last in, first out.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = array("i", range(num_pages - 1, -1, -1))

    @property
    def size(self) -> int:
        """Tokens in all."""
        return self.num_pages * self.page_size

    @property
    def available(self) -> int:
        """Free tokens, whole pages."""
        return len(self._free) * self.page_size

    def extend(self, row: array[int], end: int) -> None:
        """Append slots to `row` until it holds `end`; fills its last page first. Raises PoolExhaustedError."""
        page = self.page_size
        missing = end - len(row)
        spare = min(-len(row) % page, missing)
        pages = -(-(missing - spare) // page)
        if pages > len(self._free):
            raise PoolExhaustedError(
                f"the KV pool has {self.available} free tokens, {pages * page} are needed"
            )
        if spare > 0:
            last = row[-1]
            row.extend(range(last + 1, last + 1 + spare))
        taken = self._free[len(self._free) - pages :]
        del self._free[len(self._free) - pages :]
        taken.reverse()
        if page == 1:
            row.extend(taken)
            return
        for number in taken:
            row.extend(range(number * page, number * page + page))
        del row[end:]

    def free(self, slots: array[int]) -> None:
        """Give back whole pages; `slots` starts on a page boundary of its holder's row."""
        page = self.page_size
        pages = slots[::page] if page == 1 else array("i", (slot // page for slot in slots[::page]))
        pages.reverse()
        self._free.extend(pages)

    def shrink(self, available: int) -> None:
        """Give up free pages until at most `available` tokens, whole pages, are free."""
        keep = available // self.page_size
        surplus = max(len(self._free) - keep, 0)
        del self._free[:surplus]
        self.num_pages -= surplus

    def snapshot(self) -> list[int]:
        """The free pages, next to be taken last."""
        return self._free.tolist()

    def restore(self, free: list[int]) -> None:
        """Undo `snapshot`."""
        self._free = array("i", free)
