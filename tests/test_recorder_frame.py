"""Frames and journals: what is whole is read, what isn't is noticed."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import stamp
from schedscope.engine.budget import Remaining
from schedscope.engine.errors import RunFormatError
from schedscope.recorder import frame as frames
from schedscope.recorder.frame import (
    DECIDED,
    WIDE_PROMPTS,
    Body,
    Damage,
    Frame,
    FrameReader,
    Kind,
    MalformedRowsError,
    Rows,
    decode,
    encode,
    pack,
    scan,
)
from schedscope.recorder.journal import JournalWriter, read_journal
from schedscope.recorder.rows import PassFacts
from schedscope.recorder.schema import TABLES, Column, to_arrow
from schedscope.recorder.segment import write_segment

text = st.text(max_size=12)
int32s = st.integers(-(2**31), 2**31 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int32": int32s,
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": text,
    "binary": st.binary(max_size=12),
    "list<item: string>": st.lists(text, max_size=3),
    "list<item: int32>": st.lists(int32s, max_size=3),
}


def values(column: Column) -> st.SearchStrategy[Any]:
    some = VALUES[str(column.type)]
    return some if column.null is None else st.none() | some


table_rows = {
    name: st.lists(st.tuples(*(values(column) for column in table.row)), min_size=1, max_size=3)
    for name, table in TABLES.items()
}
any_rows: st.SearchStrategy[Rows] = st.fixed_dictionaries({}, optional=table_rows)


LEFT = Remaining(1, 1, 1, None)
PASS = PassFacts(
    now=0.0,
    configured="fcfs",
    active="fcfs",
    fallback=None,
    queue_len=0,
    running=0,
    chunked_in=None,
    chunked_out=None,
    chunk_limit=None,
    stop="queue_end",
    before=LEFT,
    after=LEFT,
    batch_is_full_before=False,
    batch_is_full=False,
    new_token_ratio=0.5,
    processed_tokens=0,
    refresh_calls=0,
    random_state=None,
    negotiation=None,
    admitted=0,
    preempted=(),
)


def token_row(seq: int, rid: str = "r") -> tuple[Any, ...]:
    return (seq, seq, rid, 0, [1, 2, 3])


def pass_row(number: int) -> tuple[Any, ...]:
    filling: dict[str, Any] = {"int32": 0, "int64": 0, "double": 0.0, "bool": False, "string": "", "list": []}
    defaults = [None if c.null else filling[str(c.type).partition("<")[0]] for c in TABLES["passes"].row]
    return (number, *defaults[1:])


def write_journal(directory: Path, bodies: list[Body], first: int = 0, number: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    writer = JournalWriter(directory, 0, number, first)
    for i, body in enumerate(bodies):
        writer.append(stamp(body, first + i), 0)
    writer.close()
    return writer.path


@settings(max_examples=60, deadline=None)
@given(any_rows)
def test_rows_survive_a_frame(rows: Rows) -> None:
    (frame,) = scan(stamp(encode(rows), 7))
    assert isinstance(frame, Frame)
    assert (frame.kind, frame.ordinal) == (Kind.ROWS, 7)
    assert decode(frame.payload) == rows
    assert frame.passes == len(rows.get("passes", ()))


@settings(max_examples=30, deadline=None)
@given(any_rows, st.integers(0, 2**31 - 1))
def test_rows_survive_parquet(tmp_path_factory: pytest.TempPathFactory, rows: Rows, rank: int) -> None:
    directory = tmp_path_factory.mktemp("run") / f"rank={rank}"
    path = write_journal(directory, [encode(rows)])
    journal = read_journal(path)
    journal.rank = rank
    segment = write_segment(journal)
    assert not path.exists()
    for name, table in TABLES.items():
        expected = [dict(zip(table.names, (rank, *row), strict=True)) for row in rows.get(name, [])]
        found = segment.read(table)
        assert ([] if found is None else found.to_pylist()) == expected


@given(st.text(alphabet=st.characters(categories=["Cs", "L"]), min_size=1, max_size=6))
def test_rids_that_are_no_unicode_are_spelled_out(rid: str) -> None:
    (frame,) = scan(stamp(encode({"tokens": [token_row(1, rid)]}), 0))
    assert isinstance(frame, Frame)
    written = decode(frame.payload)["tokens"][0][2]
    assert written.encode() == rid.encode(errors="backslashreplace")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"tokens": [(1, 1, None, 0, [])]}, "tokens.rid: Expected `str`, got `None`"),
        ({"tokens": [(1, 1, "r", 0, [2**31])]}, "tokens.ids: Expected `int` <= 2147483647"),
        ({"tokens": [(1, 1, "r", 0)]}, "tokens: Expected `array` of length 5, got 4"),
        ({"tokens": [(1, 2**63, "r", 0, [])]}, "tokens.step: Expected `int` <= 9223372036854775807"),
        ({"tokens": [(1, True, "r", 0, [])]}, "tokens.step: Expected `int`, got `bool`"),
        ({"nonsense": []}, "Object contains unknown field `nonsense`"),
    ],
)
def test_rows_that_do_not_follow_the_schema_are_named(rows: Rows, message: str) -> None:
    (frame,) = scan(stamp(encode(rows), 0))
    assert isinstance(frame, Frame)
    with pytest.raises(MalformedRowsError) as caught:
        decode(frame.payload)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"queue_len": 2**31}, "passes.queue_len: "),
        ({"processed_tokens": 2**63}, "passes.processed_tokens: "),
        ({"before": Remaining(1, 1, 2**63, None)}, "passes.rem_input: "),
    ],
)
def test_a_pass_that_was_told_is_checked_as_its_row_is(wrong: dict[str, Any], message: str) -> None:
    told = (0, 0, 1, 5, msgspec.structs.replace(PASS, **wrong), "digest", 0, None)
    payload = encode({DECIDED: [told]}).payload
    with pytest.raises(MalformedRowsError, match=message):
        decode(payload)


@pytest.mark.parametrize("ids", [[], [5, 2**31 - 1, 0]])
def test_prompts_of_wide_integers_are_narrowed_by_who_reads(ids: list[int]) -> None:
    payload = encode({WIDE_PROMPTS: [(7, 2, "r1", 0, array("q", ids).tobytes())]}).payload
    assert decode(payload) == {"tokens": [(7, 2, "r1", 0, ids)]}


@pytest.mark.parametrize("packed", [array("q", [1, -1]).tobytes(), array("q", [2**31]).tobytes(), b"odd"])
def test_prompts_that_hold_no_token_ids_are_malformed(packed: bytes) -> None:
    with pytest.raises(MalformedRowsError, match="tokens: "):
        decode(encode({WIDE_PROMPTS: [(7, 2, "r1", 0, packed)]}).payload)


def test_frames_may_be_packed_into_the_same_memory() -> None:
    memory = bytearray()
    rows = [{"tokens": [token_row(i) for i in range(count)]} for count in (50, 1, 90, 0)]
    for number, each in enumerate(rows):
        made = bytes(frames.stamp(encode(each, memory), number))
        assert made == stamp(encode(each), number)


def test_oversized_frames_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 100)
    with pytest.raises(ValueError, match="at most 100 fit"):
        stamp(encode({"tokens": [token_row(i) for i in range(100)]}), 0)
    monkeypatch.undo()
    big = pack(Kind.ROWS, b"x" * 200)
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 100)
    with pytest.raises(ValueError, match="at most 100 are allowed"):
        FrameReader().feed(big)


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_a_stream_gives_the_same_frames_however_it_is_cut(payloads: list[bytes], data: st.DataObject) -> None:
    sent = [pack(Kind.ROWS, payload, i) for i, payload in enumerate(payloads)]
    stream = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += [frame for _, frame in reader.feed(stream[start:end])]
    assert received == sent
    assert reader.pending == 0


@given(st.binary(min_size=frames.HEADER_BYTES, max_size=200))
def test_a_stream_of_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no frame starts here"):
        FrameReader().feed(data)


@given(st.binary(max_size=300), st.lists(st.binary(max_size=20), max_size=3))
def test_scanning_covers_everything_in_order(noise: bytes, payloads: list[bytes]) -> None:
    data = noise + b"".join(pack(Kind.ROWS, payload, i) for i, payload in enumerate(payloads))
    items = list(scan(data))
    assert [item.start for item in items] + [len(data)] == [0, *(item.end for item in items)]
    assert [item.payload for item in items if isinstance(item, Frame)] == payloads
    assert not any(isinstance(item, Damage) and item.torn for item in items[:-1])


# ---- journals ------------------------------------------------------------------------------------------------


def test_a_journal_cut_at_any_byte_keeps_what_is_whole(tmp_path: Path) -> None:
    bodies = [encode({"passes": [pass_row(i)], "tokens": [token_row(i)]}) for i in range(3)]
    path = write_journal(tmp_path / "rank=0", bodies)
    data = path.read_bytes()
    sizes = [len(stamp(body, 0)) for body in bodies]
    head = len(data) - sum(sizes)
    ends = [head + sum(sizes[:i]) for i in range(4)]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        journal = read_journal(path)
        whole = sum(end <= cut for end in ends[1:])
        assert [row[0] for row in journal.rows.get("passes", [])] == list(range(whole))
        assert len(journal.rows.get("tokens", [])) == whole
        assert journal.next_frame == whole
        assert journal.gaps == []
        at_an_end = cut in (0, *ends)
        assert journal.torn == (0 if at_an_end else cut - max(end for end in (0, *ends) if end < cut))
        gap = journal.torn_gap()
        assert gap is None if at_an_end else gap is not None and gap.reason == "torn"


def test_a_flipped_bit_anywhere_costs_one_frame_and_shows(tmp_path: Path) -> None:
    bodies = [encode({"passes": [pass_row(i)]}) for i in range(4)]
    path = write_journal(tmp_path / "rank=0", bodies)
    with path.open("ab") as file:
        file.write(pack(Kind.END, b"", len(bodies)))
    data = path.read_bytes()
    chance = random.Random(1)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        journal = read_journal(path)
        read = [row[0] for row in journal.rows.get("passes", [])]
        lost = [n for n in range(4) if n not in read]
        assert read == sorted(set(range(4)) - set(lost))
        assert len(lost) <= 1
        shown = [gap for gap in journal.gaps if gap.reason == "corrupt"]
        for number in lost:
            if number == 0 and journal.first_frame == 1:
                continue  # the numbering shows it, see test_recorder_run
            (gap,) = shown
            assert (gap.frame, gap.frames) == (number, 1)
            assert gap.after_pass == (number - 1 if number else None)
            assert gap.before_pass == (number + 1 if number < 3 else None)
        assert lost or not shown or not journal.ended


def test_missing_numbers_are_gaps(tmp_path: Path) -> None:
    (tmp_path / "rank=0").mkdir()
    writer = JournalWriter(tmp_path / "rank=0", 0, 3, 10)
    for ordinal, number in ((12, 50), (13, 51), (17, 60)):
        writer.append(stamp(encode({"passes": [pass_row(number)]}), ordinal), 1)
    writer.append(pack(Kind.END, b"", 20), 0)
    writer.close()
    journal = read_journal(writer.path)
    assert [(g.reason, g.frame, g.frames, g.after_pass, g.before_pass) for g in journal.gaps] == [
        ("lost", 10, 2, None, 50),
        ("lost", 14, 3, 51, 60),
        ("lost", 18, 2, 60, None),
    ]
    assert (journal.next_frame, journal.ended) == (20, True)
    assert journal.pass_range == (50, 60)


def test_malformed_rows_are_a_gap_that_says_why(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "rank=0", [encode({"tokens": [(1,)]}), encode({"tokens": [token_row(2)]})])
    journal = read_journal(path)
    assert journal.rows == {"tokens": [token_row(2)]}
    (gap,) = journal.gaps
    assert (gap.reason, gap.frame, gap.detail) == ("malformed", 0, "tokens: Expected `array` of length 5, got 1")


def test_foreign_and_newer_files_are_refused_by_name(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "rank=0", [])
    path.write_bytes(b"PAR1 something else")
    with pytest.raises(RunFormatError, match=r"00000000\.journal: not a schedscope journal"):
        read_journal(path)
    head = {
        "schema": "schedscope.journal",
        "version": 99,
        "schedscope": "9.1",
        "rank": 0,
        "number": 0,
        "first_frame": 0,
    }
    path.write_bytes(pack(Kind.HEAD, msgspec.msgpack.encode(head)))
    with pytest.raises(RunFormatError, match=r"upgrade to schedscope>=9\.1"):
        read_journal(path)
    path.write_bytes(pack(Kind.HEAD, b"\x90"))
    with pytest.raises(RunFormatError, match="not a schedscope journal"):
        read_journal(path)


def test_a_failed_write_leaves_the_journal_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank=0").mkdir()
    writer = JournalWriter(tmp_path / "rank=0", 0, 0, 0)
    real = os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) > 30:
            return real(fd, data[:30])
        raise OSError(28, "No space left on device")

    body = encode({"tokens": [token_row(1)]})
    writer.append(stamp(body, 0), 0)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.append(stamp(body, 1), 0)
    monkeypatch.undo()
    writer.append(stamp(body, 2), 0)
    writer.close()
    journal = read_journal(writer.path)
    assert len(journal.rows["tokens"]) == 2
    assert [(g.frame, g.frames) for g in journal.gaps] == [(1, 1)]


def test_arrow_tables_have_the_schema_even_when_empty() -> None:
    for table in TABLES.values():
        empty = to_arrow(table, 3, [])
        assert isinstance(empty, pa.Table)
        assert empty.schema.equals(table.arrow)
