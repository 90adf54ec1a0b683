"""The dashboard in a real browser: what a reader sees, does, and may rely on."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from browser import Reader, browsing, served
from patience import until
from scenes import BUSY, Clients, Clock, record_busy, serve
from schedscope.engine.scheduler import Scheduler
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import create_run, sealed, update_manifest
from schedscope.recorder.rank_log import Limits
from schedscope.recorder.tracer import RunTracer

PAGES = ("/", "/pass", "/request", "/cache", "/ranks", "/compare", "/runs")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    record_busy(folder, "other", config=BUSY.replace(schedule_policy="hrrn"), seconds=12)
    record_busy(folder, "ranks", config=BUSY.replace(enable_prefill_delayer=True, dp_size=2), seconds=8, ranks=2)
    time.sleep(1.1)  # so that it is the newest
    record_busy(folder, "busy", seconds=30)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def url(log: Path, browser: Any) -> Iterator[str]:
    assert browser
    with served(log) as address:
        yield address


@pytest.fixture
def reader(browser: Any, url: str) -> Iterator[Reader]:
    someone = Reader(browser, url)
    yield someone
    someone.close()


def _named(log: Path, name: str) -> str:
    return next(path.name for path in log.iterdir() if path.name.endswith(f"-{name}"))


def test_from_the_overview_down_to_a_decision(reader: Reader) -> None:
    reader.open()
    assert reader.page.locator(".findings > li").count() >= 1
    tiles = reader.tiles()
    assert re.fullmatch(r"\d+\.\d %", tiles["hit_rate"])
    whole = reader.range_of("ttft")

    reader.drag("hit-rate", 0.2, 0.6)
    part = reader.range_of("ttft")
    assert part[0] == pytest.approx(whole[0] + 0.2 * (whole[1] - whole[0]), abs=0.3)
    assert part[1] == pytest.approx(whole[0] + 0.6 * (whole[1] - whole[0]), abs=0.3)
    assert reader.tiles()["admitted"] != tiles["admitted"]
    for name in ("queue", "waited", "bands", "heat", "memory", "gates"):
        assert reader.range_of(name) == pytest.approx(part)

    reader.click("queue", 0.5)
    assert "at=" in reader.page.url
    reader.follow("[id*=moment] a[title='Open this pass']")
    number = re.search(r"pass=(\d+)", reader.page.url)
    assert number is not None
    assert f"Pass {int(number[1]):,} of rank 0" in reader.page.inner_text("h2")
    assert reader.page.locator("#queue-table tbody tr").count() >= 1
    assert "decided again and found identical" in reader.page.inner_text("#page")

    reader.follow("#queue-table a.rid")
    assert "add up to" in reader.page.inner_text("#page")
    reader.page.go_back()
    reader.page.wait_for_function("() => document.querySelector('h2')?.innerText.startsWith('Pass')")


def test_a_copied_url_shows_the_same_in_another_browser(reader: Reader, browser: Any) -> None:
    reader.open()
    reader.drag("ttft", 0.3, 0.7)
    reader.click("waited", 0.4)
    other = Reader(browser, reader.url)
    other.page.goto(reader.page.url)
    other.page.wait_for_selector("body[data-serial]")
    other.settled()
    assert other.tiles() == reader.tiles()
    assert other.range_of("memory") == pytest.approx(reader.range_of("memory"))
    assert other.page.inner_text("[id*=moment]") == reader.page.inner_text("[id*=moment]")
    other.close()


def test_a_box_tells_what_is_different_about_the_requests_in_it(reader: Reader) -> None:
    reader.open()
    reader.drag("heat", 0.05, 0.95, 0.02, 0.45)
    assert "box=" in reader.page.url
    said = reader.page.inner_text("[id*=inside]")
    inside, outside = re.search(r"([\d,]+) requests in the box, ([\d,]+) outside", said).groups()  # type: ignore[union-attr]
    assert int(inside.replace(",", "")) > 0 < int(outside.replace(",", ""))
    assert "% different" in said
    scores = [int(score) for score in re.findall(r"(\d+) % different", said)]
    assert scores == sorted(scores, reverse=True)
    assert "in the box" in reader.page.inner_text("[id*=slowest]")


def test_zooming_out_by_double_click_and_by_button(reader: Reader) -> None:
    reader.open()
    whole = reader.range_of("queue")
    reader.drag("queue", 0.3, 0.6)
    assert reader.range_of("queue") != pytest.approx(whole)
    box, before = reader.chart("queue"), reader.serial
    reader.page.mouse.dblclick(box["x"] + 40, box["y"] + 40)
    reader.answered(before)
    assert reader.range_of("queue") == pytest.approx(whole)
    reader.drag("queue", 0.3, 0.6)
    reader.follow("button[data-last='']")
    assert reader.range_of("queue") == pytest.approx(whole)


def test_charts_are_drawn_when_they_come_in_sight(reader: Reader) -> None:
    reader.open()
    assert reader.page.locator("[data-chart='ttft'] .js-plotly-plot").count() == 1
    assert reader.page.locator("[data-chart='gates'] .js-plotly-plot").count() == 0
    reader.look_at("gates")
    assert reader.range_of("gates") == pytest.approx(reader.range_of("ttft"))


def test_what_is_open_stays_open_when_its_words_change(reader: Reader) -> None:
    reader.open()
    said = reader.page.evaluate(
        """() => {
            const place = document.createElement("div");
            const html = (n) => `<ul><li>${n}<details><p>${n}</p></details></li></ul>`;
            document.body.append(place);
            window.morph(place, html(1));
            const details = place.querySelector("details");
            details.open = true;
            window.morph(place, html(2) + "<b>more</b>");
            const after = [place.innerHTML, place.querySelector("details") === details];
            window.morph(place, html(3));
            return [...after, place.innerHTML];
        }"""
    )
    shown = '<ul><li>{n}<details open=""><p>{n}</p></details></li></ul>'
    assert said == [shown.format(n=2) + "<b>more</b>", True, shown.format(n=3)]


def test_the_keyboard_reaches_charts_and_passes(reader: Reader) -> None:
    reader.open()
    reader.page.locator("[data-chart='ttft']").focus()
    before = reader.serial
    for _ in range(4):
        reader.page.keyboard.press("ArrowRight")
    reader.answered(before)
    assert "at=" in reader.page.url
    before = reader.serial
    reader.page.keyboard.press("+")
    reader.answered(before)
    assert "from=" in reader.page.url
    reader.page.keyboard.press("Enter")
    before = reader.serial
    reader.page.keyboard.press("Enter")
    reader.answered(before)
    assert "/pass?" in reader.page.url
    reader.page.locator("#find").fill("req-0001")
    before = reader.serial
    reader.page.keyboard.press("Enter")
    reader.answered(before)
    assert "Requests that begin with req-0001" in reader.page.inner_text("#page")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_accessible_and_quiet(browser: Any, url: str, log: Path, path: str, theme: str) -> None:
    from axe_core_python.sync_playwright import Axe

    queries = {
        "/request": "?rid=req-00020",
        "/ranks": f"?run={_named(log, 'ranks')}",
        "/compare": f"?with={_named(log, 'other')}",
    }
    someone = Reader(browser, url, theme=theme)
    someone.open(path + queries.get(path, ""))
    assert someone.page.evaluate("document.documentElement.dataset.theme") == theme
    found = Axe().run(someone.page)
    serious = [
        f"{each['id']}: {each['help']}: {node['html'][:200]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]
    assert not serious
    assert "bug" not in someone.page.inner_text("#page")
    someone.close()


@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_no_page_is_wider_than_its_window(browser: Any, url: str, log: Path, width: int) -> None:
    someone = Reader(browser, url, width=width)
    for path in (
        "/",
        "/pass?pass=40",
        "/request?rid=req-00020",
        "/cache?pass=40",
        f"/compare?with={_named(log, 'other')}",
    ):
        someone.open(path)
        assert someone.page.evaluate("document.documentElement.scrollWidth") <= width
    someone.close()


def test_the_theme_is_switched_and_remembered(reader: Reader) -> None:
    reader.open()
    light = reader.page.evaluate("getComputedStyle(document.body).backgroundColor")
    reader.follow("#theme")
    dark = reader.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    paper = "document.querySelector('.js-plotly-plot').layout.paper_bgcolor"
    assert reader.page.evaluate(paper) == "#161b22"
    reader.open("/pass?pass=3")
    assert reader.page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


@pytest.mark.parametrize("form", ["png", "svg", "csv"])
def test_charts_are_saved(reader: Reader, form: str, tmp_path: Path) -> None:
    reader.open()
    reader.page.locator("#card-ttft summary").click()
    with reader.page.expect_download() as waiting:
        reader.page.locator(f"#card-ttft [data-export={form}]").click()
    saved = tmp_path / f"chart.{form}"
    waiting.value.save_as(saved)
    data = saved.read_bytes()
    if form == "png":
        assert data.startswith(b"\x89PNG")
    elif form == "svg":
        assert b"<svg" in data
        assert b"Time to first token" in data
    else:
        lines = data.decode().splitlines()
        assert lines[0] == "series,x,y,value"
        assert sum(line.startswith("p99,") for line in lines) == 160


HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[31m\x00\n\r\u202eevil",
    "x" * 10_000,
    '";--',
    "a&b=c#d%",
)


def test_hostile_names_are_shown_and_do_nothing(browser: Any, tmp_path: Path) -> None:
    def name(count: int) -> str:
        return f"{HOSTILE[count % len(HOSTILE)]}{count}"

    record_busy(tmp_path, "hostile", seconds=6, names=name)
    with served(tmp_path) as url:
        someone = Reader(browser, url)
        someone.open()
        for path in ("/pass?pass=20", *(f"/request?rid={quote(name(count), safe='')}" for count in range(6, 12))):
            someone.open(path)
            assert someone.page.evaluate("document.documentElement.scrollWidth") <= 1440
            assert someone.page.locator("#page script, #page img").count() == 0
            assert someone.page.locator(".tiles, #queue-table").count() >= 1
        someone.close()


def _record_live(folder: Path, ended: threading.Event) -> tuple[Path, threading.Thread]:
    """A run that grows: a tenth of a second of simulated time in about as much real time."""
    path = create_run(folder, "live")
    clock = Clock()
    sink = DirectSink(path, 0, Description(config=BUSY.to_dict()), Limits(passes=50), detail=Detail(level="full"))
    tracer = RunTracer(sink, checkpoint_every=100, clock_ns=clock.ns)
    scheduler = Scheduler(BUSY, tracer)
    tracer.attach(scheduler)

    def work() -> None:
        for _ in serve(scheduler, clock, Clients(1, "req-{:05d}".format), 1e9):
            if ended.wait(0.01):
                break
        tracer.close()

    thread = threading.Thread(target=work)
    thread.start()
    return path, thread


def test_a_run_that_is_being_recorded_is_followed(browser: Any, tmp_path: Path) -> None:
    ended = threading.Event()
    _, thread = _record_live(tmp_path, ended)
    try:
        time.sleep(1.0)
        with served(tmp_path) as url:
            someone = Reader(browser, url)
            someone.page.goto(url)
            someone.page.wait_for_selector("[data-tile=admitted]")
            first = someone.tiles()["admitted"]
            assert "live" in someone.page.inner_text("#bar")
            someone.page.wait_for_function(
                "first => document.querySelector('[data-tile=admitted]').textContent !== first", arg=first
            )
            asked: list[float] = []
            open_: list[int] = [0, 0]

            def begin(request: Any) -> None:
                if "_dash-update-component" in request.url:
                    open_[0] += 1
                    open_[1] = max(open_)
                    asked.append(time.monotonic())

            def end(request: Any) -> None:
                if "_dash-update-component" in request.url:
                    open_[0] -= 1

            someone.page.on("request", begin)
            someone.page.on("requestfinished", end)
            someone.page.wait_for_timeout(4_000)
            assert 2 <= len(asked) <= 8, "it asks about once a second"
            assert open_[1] == 1, "one question at a time"
            someone.close()
    finally:
        ended.set()
        thread.join()


def test_a_run_that_ends_while_panels_out_of_sight_are_drawn_is_seen_to_have_ended(
    browser: Any, tmp_path: Path
) -> None:
    ended = threading.Event()
    path, thread = _record_live(tmp_path, ended)
    try:
        time.sleep(1.0)
        with served(tmp_path) as url:
            someone = Reader(browser, url)
            someone.page.goto(url)
            someone.page.wait_for_selector("#bar .status.recording")
            held = []

            def hold(route: Any) -> None:
                asked = route.request.post_data_json["inputs"][0]["value"]
                if not asked["bar"] and not held:
                    held.append(asked["panels"])
                    ended.set()
                    thread.join()
                    update_manifest(path, lambda manifest: sealed(manifest, {}, []))
                    with httpx.Client(base_url=url, timeout=60) as client:
                        until(lambda: not _ask(client, "/").json()["response"]["answer"]["data"]["live"])
                route.continue_()

            someone.page.route(re.compile("/_dash-update-component"), hold)
            someone.page.wait_for_selector("#bar .status:not(.recording)")
            assert held
            someone.close()
    finally:
        ended.set()
        thread.join()


def test_twenty_readers_of_a_live_run(tmp_path: Path) -> None:
    """Without their browsers, which would be what is measured: their questions, at once and again."""
    ended = threading.Event()
    _, thread = _record_live(tmp_path, ended)
    try:
        time.sleep(1.0)
        with served(tmp_path) as url, ThreadPoolExecutor(20) as pool:

            def look(number: int) -> list[int]:
                with httpx.Client(base_url=url, timeout=60) as client:
                    return [_ask(client, "/", f"?last={number + 1}").status_code for _ in range(5)]

            answers = [code for codes in pool.map(look, range(20)) for code in codes]
        assert answers == [200] * 100
    finally:
        ended.set()
        thread.join()


def _ask(client: httpx.Client, path: str, search: str = "") -> httpx.Response:
    """What a browser asks for a page."""
    value = {"path": path, "search": search, "theme": "light", "serial": 1}
    body = {
        "output": "answer.data",
        "outputs": {"id": "answer", "property": "data"},
        "inputs": [{"id": "question", "property": "data", "value": value}],
        "changedPropIds": ["question.data"],
    }
    return client.post("/_dash-update-component", json=body)


def _break_nothing(path: Path) -> None:
    shutil.rmtree(path)


def _break_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def _break_newer(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(re.sub(r'"version": \d+', '"version": 99', manifest.read_text()))


def _break_columns(path: Path) -> None:
    for file in path.glob("rank=*/*.p*/steps.parquet"):
        file.write_bytes(b"PAR1" + bytes(200) + b"PAR1")


BREAKERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (_break_nothing, "deleted"),
    "half a manifest": (_break_manifest, "not the manifest"),
    "of a newer version": (_break_newer, "upgrade"),
    "broken columns": (_break_columns, "steps.parquet"),
}


@pytest.mark.parametrize("kind", list(BREAKERS))
def test_a_run_that_can_no_longer_be_read_gets_a_clear_page(browser: Any, tmp_path: Path, kind: str) -> None:
    bad = record_busy(tmp_path, "bad", seconds=3)
    record_busy(tmp_path, "good", seconds=3)
    destroy, said = BREAKERS[kind]
    with served(tmp_path) as url:
        someone = Reader(browser, url)
        if kind == "deleted":
            someone.open(f"/?run={bad.name}")
        destroy(bad)
        someone.page.goto(f"{url}/?run={bad.name}")
        someone.page.wait_for_selector("#page .notice.bad")
        shown = someone.page.inner_text("#page")
        assert said in shown
        assert "See which runs there are" in shown
        someone.follow(".notice a[href='/runs']")
        assert "good" in someone.page.inner_text("#page")
        someone.open(f"/?run={_named(tmp_path, 'good')}")
        assert someone.tiles()["admitted"] != "0"
        someone.close()


def test_a_run_without_anything_yet_and_one_of_an_older_version(browser: Any, tmp_path: Path) -> None:
    create_run(tmp_path, "empty")
    older = tmp_path / "20250101-000000-older"
    shutil.copytree(Path(__file__).parent / "data" / "run-v1", older)
    with served(tmp_path) as url:
        someone = Reader(browser, url)
        someone.page.goto(f"{url}/?run={_named(tmp_path, 'empty')}")
        someone.page.wait_for_selector("#page .notice.bad")
        assert "no step yet" in someone.page.inner_text("#page")
        for path in ("/", "/pass", "/cache", "/ranks"):
            someone.open(f"{path}?run={older.name}")
            assert someone.page.locator(".card").count() >= 2
        someone.close()


def _start(log: Path, port: int) -> subprocess.Popen[bytes]:
    """The dashboard as a process of its own, once it answers."""
    command = [sys.executable, "-m", "schedscope.cli.main", "dashboard", "--log", str(log), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    until(answers)
    return process


def test_a_server_that_is_gone_and_comes_back(browser: Any, log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = _start(log, port)
    try:
        someone = Reader(browser, f"http://127.0.0.1:{port}")
        someone.open()
        process.kill()
        process.wait()
        someone.page.evaluate("() => document.querySelector('[data-page=\"/cache\"]').click()")
        someone.page.wait_for_selector("#offline:not([hidden])")
        assert "does not answer" in someone.page.inner_text("#offline")
        process = _start(log, port)
        someone.page.wait_for_selector("#card-tree")
        someone.page.wait_for_selector("#offline", state="hidden")
        someone.wrong.clear()  # the browser says that there was nobody
        someone.close()
    finally:
        process.kill()
        process.wait()
