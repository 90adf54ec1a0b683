"""What a prefill pass may still spend. Frozen: every charge gives a new budget."""

from __future__ import annotations

from typing import NamedTuple


class Remaining(NamedTuple):
    """The four budgets as SGLang shows them; None: no chunking."""

    total: float
    """Tokens of memory, with what is reserved for outputs taken off."""
    current: float
    """Tokens of memory, with only this pass's allocations taken off."""
    input: int
    """Prefill tokens, of `max_prefill_tokens`."""
    chunk: int | None
    """Prefill tokens, of `chunked_prefill_size`."""


class Budget(NamedTuple):
    """Reservations of one pass. The memory that is there is not part of it: pinning and preempting change that."""

    page_size: int
    input: int
    chunk: int | None
    total_offset: float = 0
    current_offset: int = 0

    def ceil_to_page(self, count: int) -> int:
        """Tokens, rounded up to whole pages."""
        return -(-count // self.page_size) * self.page_size

    def remaining(self, memory: int) -> Remaining:
        """What is left when `memory` tokens are free or evictable."""
        return Remaining(memory - self.total_offset, memory - self.current_offset, self.input, self.chunk)

    def charge(self, extend_len: int, max_new_tokens: int) -> Budget:
        """Admit a request: whole pages, one page for the allocator's rounding, and its output."""
        paged = self.ceil_to_page(extend_len)
        immediate = paged + self.page_size
        return self._replace(
            input=self.input - paged,
            chunk=None if self.chunk is None else self.chunk - paged,
            total_offset=self.total_offset + (immediate + max_new_tokens),
            current_offset=self.current_offset + immediate,
        )

    def release(self, output_reserve: float) -> Budget:
        """A running request is gone, and with it what was reserved for its output."""
        return self._replace(total_offset=self.total_offset - output_reserve)
