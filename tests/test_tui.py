"""The terminal debugger, from keys alone: what a person asks, in how many keystrokes, and what they read."""

from __future__ import annotations

import csv
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
from schedscope.engine.ordering import POLICIES
from schedscope.recorder.hello import Detail
from schedscope.recorder.run import Run
from schedscope.replay.redecide import redecide
from schedscope.replay.replayer import Replayer
from schedscope.tui.base import SWEEP_S
from schedscope.tui.compare_view import CompareView
from schedscope.tui.cursor import Cursor
from schedscope.tui.marks import read_marks
from schedscope.tui.pass_view import PassView
from schedscope.tui.request_view import RequestView
from schedscope.tui.sql_view import SqlView
from schedscope.tui.strip import TimelineStrip
from screens import TIGHT, app_of, press, queued, settle, simulated
from simulation import record
from textual.pilot import Pilot

pytestmark = pytest.mark.asyncio

MOST_KEYS = 5
BUSY = 19
"""A pass with many waiting requests."""
SIZE = (140, 44)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A busy run."""
    return simulated(tmp_path_factory.mktemp("runs"))


def why(pilot: Pilot[Any]) -> str:
    """What the why panel says."""
    app: Any = pilot.app
    return str(app._why.plain)


def shown(pilot: Pilot[Any]) -> list[list[str]]:
    """The grid of the view."""
    app: Any = pilot.app
    cells: list[list[str]] = app.shown_cells()
    return cells


async def asked(pilot: Pilot[Any], *keys: str) -> str:
    """Press few keys, and read."""
    assert len(keys) <= MOST_KEYS
    await settle(pilot)
    await press(pilot, keys)
    return why(pilot)


# ---- the questions -----------------------------------------------------------------------------------------------


async def test_why_is_it_at_this_place(path: Path) -> None:
    decided = {row["rid"]: row for row in Run.open(path).pass_rows(0, BUSY)["decisions"]}
    place = decided["r25"]["place_after"]
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        words = await asked(pilot, *"/r25", "enter")
        assert words.startswith(f"○ r25 waits at place {place} of {len(decided)}; the pass ended before it")
        assert "✓ re-run, identical" in words
        assert "behind   r" in words
        assert "no single change of those tried would have let it in" in words
        await press(pilot, ["up"] * 7)
        assert "r13" in why(pilot).splitlines()[0]
        assert "176 more tokens of free memory (175 would not do) would have let it in" in why(pilot)


async def test_why_was_it_refused(path: Path) -> None:
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        # Nobody is asked for, so it begins with the one that ended the pass.
        words = await asked(pilot)
        assert words.startswith("✗ r19, at place 0 of 54, was refused: needs 121 tokens, 97.01 are left.")


async def test_who_overtook_it(path: Path) -> None:
    async with app_of(path, f"pass={BUSY},rid=r16").run_test(size=SIZE) as pilot:
        words = await asked(pilot)
        part = next(line for line in words.splitlines() if "overtaken" in line)
        overtaken = {row["rid"] for row in Run.open(path).rows("decisions") if row["admitted"]}
        named = part.split(": ")[1].split(", most in pass ")
        assert set(named[0].partition(" and ")[0].split(", ")) <= overtaken
        assert named[1].isdigit()


async def test_what_would_hrrn_do(path: Path) -> None:
    run = Run.open(path)
    number = next(row["pass"] for row in run.rows("passes") if row["fallback"] is None and row["queue_len"] > 5)
    both = redecide(Replayer(run, 0).at(number), "hrrn", {})
    assert both.other.ordering is not None
    expected = [place.request.rid for place in both.other.ordering.ranked]
    async with app_of(path, f"pass={number}").run_test(size=SIZE) as pilot:
        await asked(pilot, "o", "h", "r", "r", "enter")
        app: Any = pilot.app
        assert app.view == "compare"
        page = app._part(CompareView).right.page
        assert [candidate.rid for candidate in page.candidates] == expected


async def test_its_place_under_every_policy_is_what_deciding_again_gives(path: Path) -> None:
    run = Run.open(path)
    number = next(row["pass"] for row in run.rows("passes") if row["fallback"] is None and row["queue_len"] > 5)
    moment = Replayer(run, 0).at(number)
    async with app_of(path, f"pass={number}").run_test(size=SIZE) as pilot:
        words = await asked(pilot)
        app: Any = pilot.app
        row = words[words.index("under another policy") :].splitlines()[1]
        for policy in ("hrrn", "shortest-prefill-first", "dfs-weight"):
            ordering = redecide(moment, policy, {}).other.ordering
            assert ordering is not None
            place = [ranked.request.rid for ranked in ordering.ranked].index(app.cursor.rid)
            assert f"{policy} {place}" in row
        assert set(POLICIES) >= {word for word in row.split() if "-" in word}


async def test_a_link_leads_on_and_back_again(path: Path) -> None:
    async with app_of(path, f"pass={BUSY},rid=r25").run_test(size=SIZE) as pilot:
        await asked(pilot, "w", "enter")
        app: Any = pilot.app
        assert app.cursor.rid not in {None, "r25"}
        await press(pilot, ["["])
        assert app.cursor == Cursor(0, BUSY, "r25")
        await press(pilot, ["]"])
        assert app.cursor.rid != "r25"


# ---- passes and requests -----------------------------------------------------------------------------------------


async def test_every_pass_shows_what_was_recorded(path: Path) -> None:
    run = Run.open(path)
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        for number in range(run.passes(0).count):
            assert app.page.facts.number == number
            decided = [d for d in run.pass_rows(0, number)["decisions"] if d["place_after"] is not None]
            assert [c.rid for c in app.page.candidates] == [
                d["rid"] for d in sorted(decided, key=lambda d: d["place_after"])
            ]
            assert app.scene.identical, number
            await press(pilot, ["right"])


async def test_the_admission_loop_is_walked_candidate_by_candidate(path: Path) -> None:
    run = Run.open(path)
    looked = [(d["pass"], d["rid"]) for d in run.rows("decisions") if d["result"] is not None]
    begin = next(i for i, (number, _) in enumerate(looked) if number == 30)
    async with app_of(path, f"pass=30,rid={looked[begin][1]}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        for number, rid in looked[begin : begin + 12]:
            assert (app.cursor.number, app.cursor.rid) == (number, rid)
            await press(pilot, ["full_stop"])
        await press(pilot, ["comma"])
        assert (app.cursor.number, app.cursor.rid) == looked[begin + 11]


async def test_a_step_goes_to_the_next_change_of_the_request(path: Path) -> None:
    async with app_of(path, "pass=10,rid=r19").run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        numbers = []
        for _ in range(4):
            await press(pilot, ["L"])
            numbers.append(app.cursor.number)
        assert numbers == sorted(set(numbers))
        rows = [
            r for r in Run.open(path).request_rows("r19", 0)["decisions"] if r["pass"] in {numbers[0] - 1, numbers[0]}
        ]
        assert rows[0]["place_after"] != rows[1]["place_after"] or rows[0]["reason"] != rows[1]["reason"]
        await press(pilot, ["H"])
        assert app.cursor.number == numbers[-2]


async def test_a_life_from_arrival_to_end(path: Path) -> None:
    rows = Run.open(path).request_rows("r19", 0)["decisions"]
    async with app_of(path, f"pass={BUSY},rid=r19").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["3"])
        cells = shown(pilot)
        assert [row[0] for row in cells[1:]] == [str(row["pass"]) for row in rows]
        assert cells[-1][-1].startswith("admitted:")
        await press(pilot, ["end", "enter"])
        app: Any = pilot.app
        assert (app.view, app.cursor.number) == ("pass", rows[-1]["pass"])


async def test_the_tree_is_read_and_not_touched(path: Path) -> None:
    moment = Replayer(Run.open(path), 0).at(BUSY)
    before = [(n.id, n.start, n.end, n.lock_ref, n.last_access) for n in moment.view.cache.nodes()]
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["4"])
        app: Any = pilot.app
        assert len(shown(pilot)) - 1 == len(before)
        cache = app.scene.visited.moment.view.cache
        assert [(n.id, n.start, n.end, n.lock_ref, n.last_access) for n in cache.nodes()] == before
        tree = app.tree_
        assert sum(branch.tokens for branch in tree.branches) == tree.evictable + tree.protected
        first = next(branch for branch in tree.branches if branch.evict == 0)
        copy, _ = moment.view.cache.fork()
        assert copy.evict(1)[0].node.id == first.node


# ---- the run -----------------------------------------------------------------------------------------------------


async def test_it_begins_where_the_queue_was_longest(path: Path) -> None:
    longest = max(Run.open(path).rows("passes"), key=lambda row: (row["queue_len"], -row["pass"]))
    async with app_of(path).run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        assert app.cursor.number == longest["pass"]


async def test_anomalies_one_after_the_other(path: Path) -> None:
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        wanted = sorted({a.pass_number for a in app.anomalies if a.pass_number})
        seen = []
        for _ in wanted:
            await press(pilot, ["n"])
            seen.append(app.cursor.number)
        assert seen == wanted
        await press(pilot, ["N"])
        assert app.cursor.number == wanted[-2]


async def test_zoom_keeps_the_cursor_in_the_window(path: Path) -> None:
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        whole = app.strip.lanes.window
        await press(pilot, ["plus", "plus"])
        near = app.strip.lanes.window
        assert near.end_ns - near.begin_ns <= (whole.end_ns - whole.begin_ns) // 3
        assert near.begin_ns <= app.page.facts.begin_ns < near.end_ns
        await press(pilot, ["right"] * 12)
        assert app.strip.lanes.window.begin_ns <= app.page.facts.begin_ns < app.strip.lanes.window.end_ns
        await press(pilot, ["0"])
        assert app.strip.lanes.window == whole


async def test_a_click_on_the_strip_goes_to_that_moment(path: Path) -> None:
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        await pilot.click(TimelineStrip, offset=(100, 1))
        await settle(pilot)
        window = app.strip.lanes.window
        begin = window.begin_ns + (100 - 21) * window.width_ns
        assert app.cursor.number > 0
        assert abs(app.page.facts.begin_ns - begin) < (window.end_ns - window.begin_ns) / 10


@pytest.mark.parametrize(("typed", "number", "rid"), [("42", 42, None), ("r19@15", 15, "r19"), ("r66", None, "r66")])
async def test_going_somewhere_by_name(path: Path, typed: str, number: int | None, rid: str | None) -> None:
    async with app_of(path, "pass=3").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["slash", *("at" if letter == "@" else letter for letter in typed), "enter"])
        app: Any = pilot.app
        assert number is None or app.cursor.number == number
        assert rid is None or app.cursor.rid == rid
        if rid is not None:
            assert app.page.find(rid) is not None


# ---- conditions, SQL, marks, files -------------------------------------------------------------------------------


async def test_breakpoints_stop_where_the_condition_holds(path: Path) -> None:
    wanted = [(d["pass"], d["rid"]) for d in Run.open(path).rows("decisions") if d["reason"] == "memory"]
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["b"])
        await pilot.press(*"reason", "space", "equals_sign", "space", "apostrophe", *"memory", "apostrophe", "enter")
        await settle(pilot)
        app: Any = pilot.app
        assert [(hit.number, hit.rid) for hit in app.hits] == wanted
        for number, rid in wanted[:3]:
            await press(pilot, ["c"])
            assert (app.cursor.number, app.cursor.rid) == (number, rid)
        await press(pilot, ["C"])
        assert (app.cursor.number, app.cursor.rid) == wanted[1]


async def test_a_wrong_condition_is_said_and_changes_nothing(path: Path) -> None:
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["b", *"nonsense", "enter"])
        app: Any = pilot.app
        assert app.condition is None
        assert "nonsense" in said(pilot)


def said(pilot: Pilot[Any]) -> str:
    """The line at the bottom."""
    return str(pilot.app.screen_stack[0].query_one("#keys").render())


async def test_sql_completes_answers_and_leads_on(path: Path) -> None:
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["6"])
        view = pilot.app.query_one(SqlView)
        field: Any = view.query_one("#sql")
        field.text = "select pass, rid from decisions where dep"
        field.move_cursor(field.document.end)
        await press(pilot, ["tab"])
        assert field.text.endswith("deprioritized")
        await press(pilot, ["enter"])
        held = [[str(d["pass"]), d["rid"]] for d in Run.open(path).rows("decisions") if d["deprioritized"]]
        assert sorted(shown(pilot)[1:]) == sorted(held)
        await press(pilot, ["escape", "enter"])
        app: Any = pilot.app
        assert app.view == "pass"
        assert [str(app.cursor.number), app.cursor.rid] in held


async def test_a_wrong_query_is_said(path: Path) -> None:
    async with app_of(path, "pass=0").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["6"])
        field: Any = pilot.app.query_one("#sql")
        await press(pilot, [*"selec", "enter"])
        assert field.text == "selec", "what is typed takes the place of the first query"
        hint = str(pilot.app.query_one("#sql-hint").render())
        assert "Parser Error" in hint
        assert "\\" not in hint


async def test_marks_stay_beside_the_run(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    async with app_of(copy, f"pass={BUSY},rid=r25").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["m", *"odd", "enter"])
    (mark,) = read_marks(copy)
    assert (mark.cursor, mark.note) == (Cursor(0, BUSY, "r25"), "odd")
    async with app_of(copy, "pass=3").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["apostrophe", "enter"])
        app: Any = pilot.app
        assert app.cursor == Cursor(0, BUSY, "r25")


async def test_exports(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with app_of(path, f"pass={BUSY},rid=r25").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["e", *"csv", "enter", "e", *"svg", "enter", "e", *"link", "enter"])
    name = f"schedscope-pass-rank0-pass{BUSY}"
    rows = list(csv.reader((tmp_path / f"{name}.csv").open()))
    assert "r25" in {row[3] for row in rows}
    assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")
    assert (tmp_path / f"{name}.sh").read_text() == f"schedscope tui {path} --at pass={BUSY},rid=r25\n"


async def test_copies_go_through_the_terminal(path: Path) -> None:
    async with app_of(path, f"pass={BUSY},rid=r25").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["y"])
        assert pilot.app.clipboard == f"schedscope tui {path} --at pass={BUSY},rid=r25"
        await press(pilot, ["Y"])
        assert "r25 waits at place" in pilot.app.clipboard


# ---- unusual runs ------------------------------------------------------------------------------------------------


async def test_thousands_wait(tmp_path: Path) -> None:
    path = queued(tmp_path, (f"user-{number:05}" for number in range(5_000)), detail=Detail(level="decisions"))
    async with app_of(path).run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        assert len(app.page.candidates) == 5_000
        await press(pilot, ["end", "up"])
        assert app.cursor.rid == app.page.candidates[-2].rid
        assert "waits at place 4998 of 5000" in why(pilot)


async def test_names_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    odd = [
        "汉字漢字かな",
        "e\u0301\u0301\u0301combining",
        "[bold]markup[/]",
        "\x1b[2Jclear",
        "a,rank=3",
        "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}",
        "x" * 300,
    ]
    path = queued(tmp_path, odd, steps=2)
    async with app_of(path, "pass=0").run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app: Any = pilot.app
        for rid in odd:
            app.go(app.cursor._replace(rid=rid))
            await settle(pilot)
            for view in "1234567":
                await press(pilot, [view] if app.view != "sql" else ["escape", view])
            await press(pilot, ["escape", "2"])
        shots = app.export_screenshot()
        assert "\x1b" not in shots
        assert "[bold]markup[/]" in "".join(cell for row in app.shown_cells() for cell in row)


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 50)])
async def test_any_size(path: Path, size: tuple[int, int]) -> None:
    async with app_of(path, f"pass={BUSY}").run_test(size=size) as pilot:
        await settle(pilot)
        for view in "1234572":
            await press(pilot, [view])
        await pilot.resize_terminal(100, 30)
        await settle(pilot)
        assert pilot.app.query_one(PassView).grid.page is not None


async def test_a_run_with_one_pass(tmp_path: Path) -> None:
    path = queued(tmp_path, ["only"])
    async with app_of(path).run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert why(pilot).startswith("● only, at place 0 of 1, was admitted")
        await press(pilot, ["right", "left", "n", "3", "4", "1", "5"])
        assert pilot.app.return_code is None


async def test_a_run_without_a_pass(tmp_path: Path) -> None:
    path = queued(tmp_path, [], steps=0)
    async with app_of(path).run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["right", "n", "o", "escape", "3", "4", "1", "7", "2"])
        assert "no pass" in str(pilot.app.query_one("#headline").render())


async def test_a_run_that_disappears_is_said(tmp_path: Path) -> None:
    path = simulated(tmp_path)
    async with app_of(path, "pass=3").run_test(size=SIZE) as pilot:
        await settle(pilot)
        shutil.rmtree(path)
        await press(pilot, ["slash", "6", "0", "enter"])
        app: Any = pilot.app
        assert app.page.facts.number == 3
        assert "60" in said(pilot) or "no " in said(pilot)


async def test_a_run_without_decisions_is_decided_again(tmp_path: Path) -> None:
    full = simulated(tmp_path / "a")
    bare = simulated(tmp_path / "b", detail=Detail(level="passes"))
    async with app_of(full, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        wanted = shown(pilot)
    async with app_of(bare, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert shown(pilot) == wanted


async def test_a_run_without_tokens_shows_its_decisions(tmp_path: Path) -> None:
    path = simulated(tmp_path, detail=Detail(level="full", tokens="none"))
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert "not re-run" in why(pilot)
        assert len(shown(pilot)) > 20
        await press(pilot, ["4"])
        assert "no cache to show" in str(pilot.app.query_one("#pool").render())


async def test_two_runs_side_by_side(tmp_path: Path) -> None:
    left = simulated(tmp_path / "left")
    right = record(tmp_path / "right", TIGHT.replace(schedule_policy="fcfs"), seed=26, requests=70, outputs=(40, 160))
    both = [{row["rid"] for row in Run.open(left).pass_rows(0, number)["decisions"]} for number in (17, BUSY)]
    rid = min(both[0] & both[1])
    here, there = ([d["pass"] for d in Run.open(run).request_rows(rid, 0)["decisions"]] for run in (left, right))
    async with app_of(left, f"pass={BUSY},view=compare,rid={rid}", right).run_test(size=(200, 50)) as pilot:
        await settle(pilot)
        view = pilot.app.query_one(CompareView)
        assert (view.left.page.facts.active, view.right.page.facts.active) == ("fcfs", "fcfs")
        await press(pilot, ["left"] * 2)
        assert view.right.page is not None
        assert view.left.page is not None
        assert view.left.page.facts.number == 17
        assert view.right.page.facts.number == there[min(here.index(17), len(there) - 1)]
        assert view.right.rid_at(view.right.row) == rid
        assert "of its passes" in str(pilot.app.query_one("#right-head").render())


async def test_garbage_is_collected_while_one_reads(path: Path) -> None:
    before = gc.get_threshold()
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        assert gc.get_freeze_count()
        gc.collect(1)
        assert gc.get_count()[2]
        await pilot.pause(3 * SWEEP_S)
        assert not gc.get_count()[2]
    assert gc.get_threshold() == before
    assert not gc.get_freeze_count()


async def test_both_themes_and_help(path: Path) -> None:
    async with app_of(path, f"pass={BUSY}").run_test(size=SIZE) as pilot:
        await settle(pilot)
        await press(pilot, ["t", "question_mark", "escape", "t"])
        assert pilot.app.theme == "schedscope-dark"


async def test_a_life_without_a_cursor_in_it(path: Path) -> None:
    async with app_of(path, "pass=60,view=request,rid=r2").run_test(size=SIZE) as pilot:
        await settle(pilot)
        view = pilot.app.query_one(RequestView)
        assert view.life is not None
        assert "is not in the queue of this pass" in why(pilot)
