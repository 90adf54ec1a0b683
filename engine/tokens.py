"""Token sequences as bytes: four bytes an id, little-endian.

A prefix test is then one `memcmp` and a slice one `memcpy`, whatever the length; a Python list of ids would
cost a comparison per token. Everything that matches, inserts or records tokens uses this form; offsets in this
package are in tokens, and only this module and the radix cache multiply by `TOKEN_BYTES`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1

assert array("i").itemsize == TOKEN_BYTES


def encode(ids: Iterable[int]) -> bytes:
    """Pack token ids, each in 0..2**31-1. Raises OverflowError for larger or smaller ones."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode(tokens: bytes) -> list[int]:
    """Unpack what `encode` packed."""
    unpacked = array("i")
    unpacked.frombytes(tokens)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def length(tokens: bytes) -> int:
    """Number of tokens."""
    return len(tokens) // TOKEN_BYTES


def common_prefix(left: bytes, right: bytes, left_start: int = 0, right_start: int = 0) -> int:
    """Number of leading tokens that `left[left_start:]` and `right[right_start:]` share.

    Doubles a window until it differs, then halves: O(shared) bytes compared, O(log shared) Python steps.
    """
    a, b = left_start * TOKEN_BYTES, right_start * TOKEN_BYTES
    limit = min(len(left) - a, len(right) - b)
    if left[a : a + limit] == right[b : b + limit]:
        return limit // TOKEN_BYTES
    low, window = 0, 64 * TOKEN_BYTES
    while left[a + low : a + low + window] == right[b + low : b + low + window]:
        low += window
        window *= 2
    high = min(low + window, limit)
    while high - low > TOKEN_BYTES:
        middle = low + (high - low) // (2 * TOKEN_BYTES) * TOKEN_BYTES
        if left[a + low : a + middle] == right[b + low : b + middle]:
            low = middle
        else:
            high = middle
    return low // TOKEN_BYTES
