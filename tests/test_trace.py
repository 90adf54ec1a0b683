"""Traces: reading, scaling and prompts, as properties."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedscope.engine import tokens
from schedscope.engine.errors import ScenarioError, UsageError
from schedscope.engine.trace import (
    BLOCK_TOKENS,
    FIRST_TOKEN_ID,
    TraceRow,
    block_tokens,
    prompt_tokens,
    read_trace,
    scale_row,
)

GOOD = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}

hash_ids = st.integers(0, 2**64 - 1)
factors = st.floats(1 / 64, 2)


@st.composite
def trace_rows(draw: st.DrawFn, shared: tuple[int, ...] = ()) -> TraceRow:
    ids = (*shared, *draw(st.lists(hash_ids, min_size=0 if shared else 1, max_size=6)))
    partial = draw(st.integers(1, BLOCK_TOKENS))
    return TraceRow(
        timestamp=0,
        input_length=(len(ids) - 1) * BLOCK_TOKENS + partial,
        output_length=draw(st.integers(0, 3000)),
        hash_ids=ids,
    )


def write(path: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_rows_are_read_in_file_order(tmp_path: Path, name: str) -> None:
    earlier = GOOD | {"timestamp": 1.5, "input_length": 512, "hash_ids": [2**64 - 1]}
    rows = read_trace(write(tmp_path / name, GOOD, "", earlier | {"session": "ignored", "priority": -2}))
    assert [row.timestamp for row in rows] == [3000, 1.5]
    assert rows[0] == TraceRow(timestamp=3000, input_length=700, output_length=5, hash_ids=(0, 7))
    assert rows[1].hash_ids == (2**64 - 1,)
    assert [row.priority for row in rows] == [None, -2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        pytest.param('{"deep": ' + "[" * 100_000, "not valid JSON", id="deep"),
        ("[]", "Expected `object`"),
        ({k: v for k, v in GOOD.items() if k != "output_length"}, "output_length"),
        (GOOD | {"timestamp": "now"}, "timestamp: Expected `float`, got `str`"),
        (GOOD | {"timestamp": -1}, "timestamp: Expected `float` >= 0"),
        (GOOD | {"input_length": 0}, "input_length: Expected `int` >= 1"),
        (GOOD | {"input_length": True}, "input_length: Expected `int`, got `bool`"),
        (GOOD | {"output_length": -1}, "output_length: Expected `int` >= 0"),
        (GOOD | {"priority": "high"}, "priority: Expected `int | null`, got `str`"),
        (GOOD | {"hash_ids": [0, "x"]}, "hash_ids[1]: Expected `int`, got `str`"),
        (GOOD | {"hash_ids": [0]}, "hash_ids: 700 tokens in blocks of 512 are 2 ids, this row has 1"),
        (GOOD | {"hash_ids": [0, -1]}, "hash_ids[1]: -1 is not an unsigned 64-bit number"),
        (GOOD | {"hash_ids": [0, 2**64]}, "hash_ids[1]"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, "", line)
    with pytest.raises(ScenarioError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


def _cut_gzip(path: Path) -> None:
    write(path, GOOD, GOOD)
    path.write_bytes(path.read_bytes()[:-12])


@pytest.mark.parametrize(
    ("name", "prepare", "message"),
    [
        ("absent.jsonl", str, "no such file"),
        ("empty.jsonl", lambda path: path.write_text("\n\n"), "no request"),
        ("folder.jsonl", lambda path: path.mkdir(), "can't be read"),
        ("plain.jsonl.gz", lambda path: path.write_text("{}"), "can't be read"),
        ("cut.jsonl.gz", _cut_gzip, "can't be read"),
    ],
)
def test_a_file_that_cant_be_read(tmp_path: Path, name: str, prepare: Callable[[Path], object], message: str) -> None:
    prepare(tmp_path / name)
    with pytest.raises(ScenarioError, match=message):
        read_trace(tmp_path / name)


@given(trace_rows(), factors)
def test_scaling_keeps_ids_and_the_shape_of_the_row(row: TraceRow, factor: float) -> None:
    scaled = scale_row(row, factor)
    assert scaled.hash_ids == row.hash_ids
    assert -(-scaled.input_length // scaled.block) == len(row.hash_ids)
    assert (row.input_length % row.block == 0) <= (scaled.input_length % scaled.block == 0)
    assert (scaled.output_length == 0) == (row.output_length == 0)
    assert abs(scaled.input_length - row.input_length * scaled.block / row.block) < 1


@given(trace_rows())
def test_scaling_by_one_changes_nothing(row: TraceRow) -> None:
    assert scale_row(row, 1) == row


@given(st.data(), st.lists(hash_ids, min_size=1, max_size=4).map(tuple), factors, st.integers(500, 200_000))
def test_sharing_survives_scaling(data: st.DataObject, shared: tuple[int, ...], factor: float, vocab_size: int) -> None:
    left, right = (scale_row(data.draw(trace_rows(shared)), factor) for _ in range(2))
    a, b = prompt_tokens(left, vocab_size), prompt_tokens(right, vocab_size)
    assert tokens.length(a) == left.input_length
    assert tokens.length(b) == right.input_length
    same = 0
    for one, other in zip(left.hash_ids, right.hash_ids, strict=False):
        if one != other:
            break
        same += 1
    found = tokens.common_prefix(a, b)
    shorter = min(left.input_length, right.input_length)
    assert found >= min(same * left.block, shorter)
    assert found < (same + 1) * left.block or found == shorter


@given(hash_ids, st.integers(8, 600), st.integers(1000, 300_000))
def test_block_tokens_stay_in_the_vocabulary(hash_id: int, block: int, vocab_size: int) -> None:
    ids = tokens.decode(block_tokens(hash_id, block, vocab_size))
    assert len(ids) == block
    assert all(FIRST_TOKEN_ID <= token < vocab_size for token in ids)


@given(hash_ids, hash_ids, st.integers(8, 64))
def test_different_ids_are_different_blocks(left: int, right: int, block: int) -> None:
    same = block_tokens(left, block, 1000) == block_tokens(right, block, 1000)
    assert same == (left == right)


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**32 - 1), st.integers(8, 64))
def test_ids_that_differ_above_bit_31_only(low: int, high: int, block: int) -> None:
    assert block_tokens(low, block, 32_000) != block_tokens(low + (high << 32), block, 32_000)


def test_blocks_are_the_same_in_every_process() -> None:
    """A recorded run is compared with a later one: these bytes are part of the format."""
    assert tokens.decode(block_tokens(0, 8, 1000)) == [3] * 7 + [119]
    assert tokens.decode(block_tokens(104_140, 10, 1000)) == [455, 107, 3, 3, 3, 3, 3, 779, 207, 783]


def test_a_block_too_short_for_its_ids_is_refused() -> None:
    row = scale_row(TraceRow(timestamp=0, input_length=512, output_length=1, hash_ids=(104_140,)), 1 / BLOCK_TOKENS)
    assert prompt_tokens(row, 150_000) == tokens.encode([104_143])
    with pytest.raises(ScenarioError, match="scale the trace down less"):
        prompt_tokens(row, 1000)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_factor_must_be_positive(factor: float) -> None:
    row = TraceRow(timestamp=0, input_length=1, output_length=1, hash_ids=(1,))
    with pytest.raises(UsageError, match="positive"):
        scale_row(row, factor)


def test_a_vocabulary_must_hold_words() -> None:
    with pytest.raises(UsageError, match="too small"):
        block_tokens(1, 16, 4)
