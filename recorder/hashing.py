"""Keyed hashes in place of token ids: equal prefixes stay equal, and nothing else can be told.

A sequence is cut into blocks that matching can't tell apart from within. The last id of a whole block becomes a hash
of everything up to it, all others become 0. So two sequences agree on a block exactly if they agree on all tokens up to
its end, which is all that a radix cache of such pages ever asks, and any re-run decides as it did on the ids.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

from schedscope.engine import tokens
from schedscope.engine.tokens import MAX_TOKEN_ID, TOKEN_BYTES

KEY_BYTES = 32


def block_size(config: dict[str, Any]) -> int:
    """Tokens in a block under a scheduler's configuration: pages, and the heads of in-batch duplicates, are whole."""
    page = int(config.get("page_size") or 1)
    threshold = int(config.get("in_batch_prefix_caching_deprioritize_threshold") or 0)
    return math.gcd(page, max(threshold, 0))


class Hasher:
    """Hashes the growing sequence of one request.

    Args:
        key: up to 64 bytes; who has it can test guesses of a prompt, nobody else can.
        block: tokens, see `block_size`.
    """

    __slots__ = ("_block", "_chain", "_key", "_rest")

    def __init__(self, key: bytes, block: int) -> None:
        self._key = key
        self._block = block
        self._chain = b""
        self._rest = b""
        """The unfinished block."""

    def hash(self, ids: bytes) -> bytes:
        """What stands for the next ids of the sequence; both packed by `schedscope.engine.tokens`."""
        size = self._block * TOKEN_BYTES
        held = len(self._rest) // TOKEN_BYTES
        data = self._rest + ids
        whole = len(data) // size * size
        filler = [0] * (self._block - 1)
        made: list[int] = []
        for start in range(0, whole, size):
            self._chain = blake2b(self._chain + data[start : start + size], digest_size=16, key=self._key).digest()
            made += filler
            made.append(int.from_bytes(self._chain[:TOKEN_BYTES], "little") & MAX_TOKEN_ID)
        self._rest = data[whole:]
        made += [0] * (len(self._rest) // TOKEN_BYTES)
        return tokens.encode(made[held:])
