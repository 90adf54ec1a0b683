"""A request while it lives: what changes from step to step. Only the state and the scheduler write it."""

from __future__ import annotations

from array import array

from schedscope.engine import tokens
from schedscope.engine.radix import Node, namespace
from schedscope.engine.request import Request
from schedscope.engine.view import Waiting


class Live:
    """A request that has arrived and not yet ended."""

    __slots__ = (
        "_tokens",
        "arrival_processed_tokens",
        "cached_tokens",
        "ends_between_chunks",
        "entry_time",
        "extend_end",
        "fill_len",
        "finished",
        "inserted_len",
        "kv_len",
        "lock",
        "matched",
        "output_len",
        "preemptions",
        "prefix_len",
        "priority",
        "prompt_len",
        "protected_len",
        "request",
        "retracted",
        "retractions",
        "rid",
        "row",
        "said",
        "space",
        "to_finish",
        "waiting",
    )

    def __init__(self, request: Request, priority: int) -> None:
        self.request = request
        self.rid = request.rid
        self.priority = priority
        self.space = namespace(request.extra_key, request.cache_salt)
        self._tokens = request.prompt
        self.said: array[int] = array("i")
        """Output tokens that are not in `tokens` yet: a long sequence isn't copied for each of them."""
        self.prompt_len = request.prompt_len
        self.output_len = 0
        self.entry_time = 0.0
        self.arrival_processed_tokens = 0
        self.retracted = False
        self.finished = False
        self.to_finish: str | None = None
        """Why it is to end with its next token: a client's abort."""
        self.ends_between_chunks = False
        """Taken back while its prompt was being chunked: it ends before its next chunk."""
        # last look at the cache
        self.prefix_len = 0
        self.matched = 0
        self.fill_len = 0
        self.waiting: Waiting | None = None
        """What the next view shows of it while it waits; None: to be made."""
        # KV pool
        self.row: array[int] = array("i")
        """Slot of every token held."""
        self.kv_len = 0
        """Tokens whose KV is computed or will be by the forward under way."""
        self.extend_end = 0
        self.protected_len = 0
        """Leading tokens whose slots belong to the cache."""
        self.inserted_len = 0
        self.lock: Node | None = None
        # for people
        self.cached_tokens = 0
        self.retractions = 0
        self.preemptions = 0

    @property
    def length(self) -> int:
        """Prompt and output, tokens."""
        return self.prompt_len + self.output_len

    @property
    def tokens(self) -> bytes:
        """Prompt and output, packed; the same object until it grows."""
        if self.said:
            self._tokens += tokens.encode(self.said)
            del self.said[:]
        return self._tokens

    @tokens.setter
    def tokens(self, sequence: bytes) -> None:
        self._tokens = sequence
        del self.said[:]

    def append(self, token: int) -> None:
        """Take one output token."""
        self.said.append(token)
        self.output_len += 1
