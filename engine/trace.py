"""Request traces in Mooncake's format: when a request came, how long it was, and what it shared.

A row has no text. Its prompt is a chain of blocks, each named by a hash id; equal ids mean equal tokens after
an equal prefix. `prompt_tokens` turns ids into token ids as a pure function, so that two processes, or a run
and its replay, build the same prompts and the same sharing from the same file.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
from schedscope.engine import tokens
from schedscope.engine.errors import ScenarioError, UsageError

MAX_SCALE = 1_000.0
BLOCK_TOKENS = 512
"""Tokens that one hash id of a published Mooncake trace stands for."""

FIRST_TOKEN_ID = 3
"""Ids below are padding, begin and end of text in most vocabularies; prompts avoid them."""

_MAX_HASH_ID = 2**64 - 1
_CACHED_BLOCKS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    timestamp: float
    """Arrival in milliseconds; only differences within a trace mean anything."""
    input_length: int
    """Prompt tokens, at least 1."""
    output_length: int
    """Tokens to generate."""
    hash_ids: tuple[int, ...]
    """One id per block of the prompt, unsigned 64-bit; the last block may be partial."""
    block: int = BLOCK_TOKENS
    """Tokens of a whole block."""
    priority: int | None = None
    """For priority scheduling; Mooncake's own traces have none."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]
    priority: int | None = None


def read_trace(path: str | Path, block: int = BLOCK_TOKENS) -> list[TraceRow]:
    """All rows of a `.jsonl` or `.jsonl.gz` file, in file order; blank lines are skipped.

    `block` is the number of tokens per hash id. Raises ScenarioError, with file, line and field, for a row
    that doesn't follow the format, and for a file that can't be read or holds no row.
    """
    decoder = msgspec.json.Decoder(_Line)
    rows = []
    for number, line in _lines(Path(path)):
        try:
            rows.append(_row(decoder.decode(line), block))
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise ScenarioError(f"{path}:{number}: {_reason(error)}") from None
    if not rows:
        raise ScenarioError(f"{path}: no request in this trace")
    return rows


def scale_row(row: TraceRow, factor: float) -> TraceRow:
    """The same request for a smaller (or larger) model, with its sharing kept exactly.

    Blocks are scaled first, to `round(factor * block)` tokens, and both lengths by the resulting ratio. So
    a row keeps its number of blocks and its hash ids: requests that shared k whole blocks still share k whole
    blocks, and a partial last block stays the prefix of its whole. Partial blocks are rounded up, output
    lengths to the nearest, neither to 0. Raises UsageError for a factor that isn't a positive number.
    """
    if not 0 < factor <= MAX_SCALE:
        raise UsageError(f"trace scale must be a positive number up to {MAX_SCALE:g}, not {factor}")
    block = max(1, round(row.block * factor))
    whole = len(row.hash_ids) - 1
    partial = row.input_length - whole * row.block
    return replace(
        row,
        input_length=whole * block + -(-partial * block // row.block),
        output_length=max(min(row.output_length, 1), round(row.output_length * block / row.block)),
        block=block,
    )


def prompt_tokens(row: TraceRow, vocab_size: int) -> bytes:
    """The prompt, packed as in `schedscope.engine.tokens`; ids are in FIRST_TOKEN_ID..vocab_size-1.

    Different hash ids give different whole blocks. Raises ScenarioError where a block is too short to tell
    the row's ids apart: sharing would then be invented.
    """
    blocks = [block_tokens(hash_id, row.block, vocab_size) for hash_id in row.hash_ids]
    return b"".join(blocks)[: row.input_length * tokens.TOKEN_BYTES]


@lru_cache(maxsize=_CACHED_BLOCKS)
def block_tokens(hash_id: int, block: int, vocab_size: int) -> bytes:
    """The tokens of one whole block, a pure function of its arguments.

    It starts with the hash id written in base `vocab_size - FIRST_TOKEN_ID`, lowest digit first and in a
    fixed number of digits: that makes blocks unique whatever the id's width, and neighbouring ids, which
    traces give to siblings, differ in their very first token. A hash of the id fills the rest.
    """
    base = vocab_size - FIRST_TOKEN_ID
    if base < 2:
        raise UsageError(f"a vocabulary of {vocab_size} is too small to write prompts in")
    width = min(block, _digits(base))
    rest, head = hash_id, []
    for _ in range(width):
        rest, digit = divmod(rest, base)
        head.append(digit)
    if rest:
        raise ScenarioError(
            f"blocks of {block} tokens over {vocab_size} token ids can't tell hash id {hash_id} from others; "
            "scale the trace down less"
        )
    filling = hashlib.shake_128(struct.pack("<Q", hash_id)).digest(tokens.TOKEN_BYTES * (block - width))
    tail = (word % base for word in struct.unpack(f"<{block - width}I", filling))
    return tokens.encode(FIRST_TOKEN_ID + digit for digit in (*head, *tail))


def _digits(base: int) -> int:
    """Digits that any 64-bit number fits in."""
    count, reach = 0, 1
    while reach <= _MAX_HASH_ID:
        count, reach = count + 1, reach * base
    return count


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise ScenarioError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ScenarioError(f"{path}: can't be read: {error}") from None


def _row(line: _Line, block: int) -> TraceRow:
    expected = -(-line.input_length // block)
    if len(line.hash_ids) != expected:
        raise ValueError(
            f"hash_ids: {line.input_length} tokens in blocks of {block} are {expected} ids, "
            f"this row has {len(line.hash_ids)}"
        )
    for index, hash_id in enumerate(line.hash_ids):
        if not 0 <= hash_id <= _MAX_HASH_ID:
            raise ValueError(f"hash_ids[{index}]: {hash_id} is not an unsigned 64-bit number")
    return TraceRow(
        timestamp=line.timestamp,
        input_length=line.input_length,
        output_length=line.output_length,
        hash_ids=tuple(line.hash_ids),
        block=block,
        priority=line.priority,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        text, _, path = str(error).partition(" - at `$")
        return f"{path.strip('.`')}: {text}" if path else text
    if isinstance(error, msgspec.DecodeError | RecursionError):
        return f"not valid JSON: {error}"
    return str(error)
