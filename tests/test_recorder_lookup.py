"""Finding a pass or a request: everything about it and nothing else, wherever it is, and never a damaged byte."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import stamp
from schedscope.engine.config import SchedulerConfig
from schedscope.engine.errors import RunFormatError, RunNotFoundError
from schedscope.recorder import journal, mentions, rids
from schedscope.recorder.compact import MergeLimits, tidy
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.frame import encode, written
from schedscope.recorder.journal import JournalTail, JournalWriter, read_journal
from schedscope.recorder.mentions import Mentions
from schedscope.recorder.open_files import OpenFiles
from schedscope.recorder.rank_files import list_segments
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.rids import RidIndex, RidSpans
from schedscope.recorder.run import Run
from schedscope.recorder.schema import TABLES, to_arrow
from schedscope.recorder.segment import Segment, write_segment
from simulation import record as simulate
from test_recorder_run import pass_frame, record, row, run_dir

__all__ = ["run_dir"]

BY_REQUEST = ("decisions", "events", "requests")
BY_PASS = ("passes", "decisions", "steps", "events")


def check_everything(run: Run) -> None:
    """Compare every look-up with a look through whole tables."""
    rows = {name: list(run.rows(name, 0)) for name in TABLES}
    for number in {each["pass"] for each in rows["passes"]}:
        assert run.pass_rows(0, number) == {name: [r for r in rows[name] if r["pass"] == number] for name in BY_PASS}
    for rid in {each["rid"] for name in BY_REQUEST for each in rows[name]} - {None}:
        assert run.request_rows(rid) == {name: [r for r in rows[name] if r["rid"] == rid] for name in BY_REQUEST}


@pytest.mark.parametrize("merged", [False, True])
def test_every_pass_and_request_is_found_whole(tmp_path: Path, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("decisions", 40), ("passes", 3), ("steps", 7), ("events", 16), ("requests", 5)):
        monkeypatch.setitem(TABLES, name, replace(TABLES[name], row_group=size))
    config = SchedulerConfig(schedule_policy="lpm", max_total_tokens=600)
    path = simulate(tmp_path, config, seed=9, requests=60, limits=Limits(passes=15))
    if merged:
        tidy(path / "rank=0", MergeLimits(), 0.0, final=True)
    run = Run.open(path)
    assert (len(list_segments(path, 0)) == 1) == merged
    assert sum(len(segment.index.files["decisions"].groups) for segment in list_segments(path, 0)) > 5
    check_everything(run)
    check_everything(Run.open(path))


def test_readers_on_many_threads_share_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decisions", "passes", "steps", "events"):
        monkeypatch.setitem(TABLES, name, replace(TABLES[name], row_group=16))
    path = simulate(tmp_path, SchedulerConfig(schedule_policy="lpm", max_total_tokens=600), seed=9, requests=60)
    run = Run.open(path)
    wanted = {number: run.pass_rows(0, number) for number in range(run.passes(0).count)}
    files = OpenFiles(files=3, size=5_000)

    def read(seed: int) -> None:
        mine = run.again(files)
        for number in random.Random(seed).sample(sorted(wanted), len(wanted)):
            assert mine.pass_rows(0, number) == wanted[number]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert len(files._files) == 3
    for recent in files._groups.values():
        kept = [size for _, size in recent._kept.values()]
        assert 0 < sum(kept) == recent._size <= 5_000


def test_passes_and_requests_are_found_in_segments_and_journals_alike(run_dir: Path) -> None:
    sinks = [record(run_dir, range(35), rank) for rank in (0, 1)]
    run = Run.open(run_dir)
    found = run.request_rows("r31-0")
    assert [(r["rank"], r["pass"]) for r in found["decisions"]] == [(0, 31), (1, 31)]
    assert [r["prompt_tokens"] for r in found["requests"]] == [31, 31]
    assert [r["rank"] for r in run.request_rows("r7-1", 1)["decisions"]] == [1]
    for sink in sinks:
        sink.close()
    assert run.request_rows("r31-0") == found
    with pytest.raises(RunNotFoundError, match=r"no request 'r99-0' in run"):
        run.request_rows("r99-0")
    with pytest.raises(RunNotFoundError, match=r"no request 'r99-0' in rank 1 of run"):
        run.request_rows("r99-0", 1)
    with pytest.raises(RunNotFoundError, match=r"no rank 5"):
        run.request_rows("r7-1", 5)


def test_a_pass_bigger_than_a_row_group(run_dir: Path) -> None:
    sink = DirectSink(run_dir, 0)
    for number, size in enumerate((3, 50_000, 7)):
        decisions = [row("decisions", rid=f"{number}-{i}", **{"pass": number}) for i in range(size)]
        sink.write(encode({"passes": [row("passes", **{"pass": number})], "decisions": decisions}))
    sink.close()
    run = Run.open(run_dir)
    assert [len(run.pass_rows(0, number)["decisions"]) for number in range(3)] == [3, 50_000, 7]
    assert [r["pass"] for r in run.request_rows("1-49999")["decisions"]] == [1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.text(max_size=12), min_size=1, max_size=30, unique=True), missing=st.text(max_size=12))
def test_any_unicode_is_a_rid(tmp_path: Path, names: list[str], missing: str) -> None:
    path = tmp_path / "rank=0" / "00000000.journal"
    if path.parent.exists():
        for each in path.parent.iterdir():
            for file in each.iterdir():
                file.unlink()
            each.rmdir()
    else:
        path.parent.mkdir()
    writer = JournalWriter(path.parent, 0, 0, 0)
    writer.append(stamp(encode({"decisions": [row("decisions", rid=r, **{"pass": 1}) for r in names]}), 0), 0)
    writer.close()
    write_segment(read_journal(path))
    (segment,) = list_segments(tmp_path, 0)
    for rid in names:
        assert [r["rid"] for r in segment.read_request(written(rid))["decisions"]] == [written(rid)]
    if written(missing) not in map(written, names):
        assert segment.read_request(written(missing)) == {}


@given(st.lists(st.tuples(st.integers(0, 3_000), st.sampled_from(BY_REQUEST), st.integers(0, 50)), max_size=300))
def test_the_index_of_requests_finds_every_row_group(tmp_path_factory: Any, mentions: Any) -> None:
    spans = RidSpans()
    for number, name, group in sorted(mentions, key=lambda mention: mention[2]):
        spans.note(name, group, to_arrow(TABLES[name], 0, [row(name, rid=f"r{number}")]))
    path = tmp_path_factory.getbasetemp() / "rids.index"
    path.write_bytes(spans.pack())
    index = RidIndex(str(path))
    for number in {number for number, _, _ in mentions}:
        found = index.find(f"r{number}")
        for name in BY_REQUEST:
            groups = [group for n, t, group in mentions if n == number and t == name]
            assert (name in found) == bool(groups)
            assert not groups or found[name] == (min(groups), max(groups))
    assert index.find("someone else") == {}


def test_two_requests_of_one_hash_are_both_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rids, "hash_of", lambda rid: rid[:1].encode() * 4)
    spans = RidSpans()
    for number in range(2_000):
        name = f"{'abc'[number % 3]}{number}"
        spans.note("decisions", number // 100, to_arrow(TABLES["decisions"], 0, [row("decisions", rid=name)]))
    path = tmp_path / "rids.index"
    path.write_bytes(spans.pack())
    assert RidIndex(str(path)).find("b")["decisions"] == (0, 19)
    assert RidIndex(str(path)).find("x") == {}


# ---- many small segments -----------------------------------------------------------------------------------------


def seal_index(directory: Path, numbers: set[int]) -> str:
    """Make a segment that has nothing but an index of these requests; its name."""
    place = sum(path.is_dir() for path in directory.iterdir())
    name = f"{place:08d}.p{place}-{place}"
    spans = RidSpans()
    spans.note("events", 0, to_arrow(TABLES["events"], 0, [row("events", rid=f"r{number}") for number in numbers]))
    (directory / name).mkdir()
    (directory / name / rids.NAME).write_bytes(spans.pack())
    return name


@settings(max_examples=40, deadline=None)
@given(
    mentioned=st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=20), min_size=1, max_size=12),
    later=st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=5), max_size=3),
    gone=st.integers(0, 3),
)
def test_the_file_about_all_segments_leaves_out_those_that_do_not_mention_a_request(
    tmp_path_factory: pytest.TempPathFactory, mentioned: list[set[int]], later: list[set[int]], gone: int
) -> None:
    directory = tmp_path_factory.mktemp("mentions")
    seal = partial(seal_index, directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mentions, "_FEW", 1)
        listed = list(map(seal, mentioned))
        known = Mentions(directory)
        assert known.candidates("r1", listed) == listed, "nothing is known yet"
        for unlisted in ([], list(map(seal, later))):
            mentions.update(directory)
            names = [*listed, *unlisted][gone:]
            for number in range(41):
                found = [name for name, each in zip(listed, mentioned, strict=True) if number in each]
                found += [name for name, each in zip(unlisted, later, strict=False) if number in each]
                assert known.candidates(f"r{number}", names) == [name for name in found if name in names]
        unknown = seal({1})
        assert known.candidates("nobody", [*names, unknown]) == [unknown], "it is not listed yet"


def test_a_damaged_file_about_all_segments_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mentions, "_FEW", 1)
    names = [seal_index(tmp_path, numbers) for numbers in ({1, 2}, {2}, {3})]
    mentions.update(tmp_path)
    file = tmp_path / rids.NAME
    data = file.read_bytes()
    assert Mentions(tmp_path).candidates("r1", names) == names[:1]
    for place in range(len(data)):
        for damaged in (data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
            file.write_bytes(damaged)
            assert Mentions(tmp_path).candidates("r1", names) == names
    mentions.update(tmp_path)
    assert file.read_bytes() == data


def test_requests_are_found_in_many_segments_with_the_file_about_them(run_dir: Path) -> None:
    directory = run_dir / "rank=0"
    sink = record(run_dir, range(40), limits=Limits(passes=1))
    before = Run.open(run_dir)
    check_everything(before)
    mentions.update(directory)
    assert (directory / rids.NAME).is_file()
    for run in (before, Run.open(run_dir)):
        check_everything(run)
    for number in range(40, 50):
        sink.write(pass_frame(number))
    check_everything(before)
    sink.close()
    check_everything(before)
    (segment,) = [each for each in list_segments(run_dir, 0) if each.has_pass(20)]
    (segment.path / rids.NAME).unlink()
    assert before.request_rows("r19-0"), "a segment that doesn't mention it is not looked at"
    with pytest.raises(RunFormatError, match=rids.NAME):
        Run.open(run_dir).request_rows("r20-0")


def test_the_file_about_all_goes_when_few_are_left(run_dir: Path) -> None:
    directory = run_dir / "rank=0"
    record(run_dir, range(40), limits=Limits(passes=1)).close()
    mentions.update(directory)
    assert (directory / rids.NAME).is_file()
    tidy(directory, MergeLimits(), 0.0, final=True)
    check_everything(Run.open(run_dir))
    mentions.update(directory)
    assert not (directory / rids.NAME).exists()
    check_everything(Run.open(run_dir))


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    config = SchedulerConfig(schedule_policy="hrrn", max_total_tokens=300)
    path = simulate(tmp_path_factory.mktemp("damaged"), config, seed=3, requests=12, checkpoint_every=8)
    return path, _all(path)


def _all(path: Path) -> dict[str, Any]:
    run = Run.open(path)
    found: dict[str, Any] = {name: run.table(name).to_pylist() for name in TABLES}
    found |= {f"pass {number}": run.pass_rows(0, number) for number in range(0, run.passes(0).count, 5)}
    return found | {f"request {i}": run.request_rows(f"r{i}") for i in range(1, 12, 3)}


def _files(path: Path) -> list[Path]:
    (segment,) = list_segments(path, 0)
    return sorted(segment.path.iterdir())


def test_a_truncated_file_is_never_read(simulated: tuple[Path, dict[str, Any]]) -> None:
    path, _ = simulated
    for file in _files(path):
        whole = file.read_bytes()
        try:
            for size in range(len(whole) - 1, -1, -1):
                os.truncate(file, size)
                with pytest.raises(RunFormatError, match=file.name):
                    _touch(file)
        finally:
            file.write_bytes(whole)


def _touch(file: Path) -> None:
    segment = Segment.named(file.parent)
    assert segment is not None
    if file.suffix == ".index":
        segment.read_request("r3")
    else:
        segment.read(TABLES[file.stem if file.stem in TABLES else "passes"])


def test_a_flipped_bit_is_never_read(simulated: tuple[Path, dict[str, Any]]) -> None:
    path, expected = simulated
    chance = random.Random(5)
    for file in _files(path):
        whole = file.read_bytes()
        try:
            for place in chance.sample(range(8 * len(whole)), 60):
                data = bytearray(whole)
                data[place // 8] ^= 1 << place % 8
                file.write_bytes(data)
                try:
                    found = _all(path)
                except RunFormatError as error:
                    assert file.name in str(error)  # noqa: PT017
                else:
                    assert found == expected, f"{file.name}: bit {place} changes what is read"
                    assert file.name in {"index.json", "rids.index"}
        finally:
            file.write_bytes(whole)


# ---- journals that grow ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_growing_journal_is_read_as_if_at_once(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("growing") / "rank=0"
    directory.mkdir()
    writer = JournalWriter(directory, 0, 0, 0)
    ordinal = 0
    for number in range(12):
        ordinal += data.draw(st.sampled_from([0, 0, 0, 0, 1]))
        writer.append(stamp(pass_frame(number), ordinal), 1)
        ordinal += 1
    writer.close()
    whole = bytearray(writer.path.read_bytes())
    if data.draw(st.booleans()):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1
    tail = JournalTail(writer.path)
    seen = []
    for size in [*sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8))), len(whole)]:
        writer.path.write_bytes(whole[:size])
        try:
            expected = read_journal(writer.path)
        except RunFormatError:
            with pytest.raises(RunFormatError):
                tail.look()
            continue
        assert tail.look() == tail.look() == expected
        seen.append((tail.look(), {name: list(rows) for name, rows in tail.look().rows.items()}))
    for look, rows in seen:
        assert look.rows == rows, "what was returned must not grow"


def test_a_live_run_decodes_each_frame_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = journal.decode
    sink = DirectSink(run_dir, 0, limits=Limits(passes=1000))
    run = Run.open(run_dir)
    monkeypatch.setattr(journal, "decode", lambda payload: decoded.append(1) or real(payload))
    for number in range(50):
        sink.write(pass_frame(number))
        assert run.passes(0).count == number + 1
        assert len(run.pass_rows(0, number)["steps"]) == 1
    assert len(decoded) == 50
    sink.close()


def test_sql_never_sees_a_damaged_byte(tmp_path: Path) -> None:
    path = simulate(tmp_path, SchedulerConfig(max_total_tokens=600), seed=2, requests=20)
    (file,) = path.glob("rank=0/*.p*/passes.parquet")
    data = bytearray(file.read_bytes())
    for position in range(4, len(data), 37):
        damaged = bytearray(data)
        damaged[position] ^= 16
        file.write_bytes(damaged)
        with pytest.raises(RunFormatError, match=r"passes\.parquet: damaged"):
            Run.open(path).connect()
    file.write_bytes(data)
    with Run.open(path).connect() as connection:
        assert connection.execute("select count(*) from passes").fetchall()[0][0] > 0
