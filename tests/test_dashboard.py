"""The dashboard without a browser: its URLs, its numbers, who may look, and what it writes to files."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import flask
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import until
from scenes import BUSY, Clients, Clock, record_busy, serve
from schedscope.cli.main import main
from schedscope.dashboard import cache_page, overview, words
from schedscope.dashboard.app import PAGES, make_app
from schedscope.dashboard.cursor import Box, Cursor
from schedscope.dashboard.desk import Desk
from schedscope.dashboard.figures import time_ticks
from schedscope.dashboard.library import PENDING, Answers, Library, Standing
from schedscope.dashboard.report import make_report
from schedscope.dashboard.static import to_html
from schedscope.dashboard.transfer import make_light
from schedscope.engine.errors import RunFormatError, RunNotFoundError, UsageError
from schedscope.engine.scheduler import Scheduler
from schedscope.recorder.direct_sink import DirectSink
from schedscope.recorder.hello import Description, Detail
from schedscope.recorder.manifest import create_run
from schedscope.recorder.tracer import RunTracer

TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    record_busy(folder, "other", config=BUSY.replace(schedule_policy="hrrn"), seconds=8)
    time.sleep(1.1)  # so that the next one is the newest
    record_busy(folder, "busy", seconds=50)
    return folder


@pytest.fixture(scope="module")
def library(log: Path) -> Library:
    return Library(log)


def _desk(library: Library, **cursor: Any) -> Desk:
    book = library.book(cursor.pop("run", None))
    return Desk(library, book, Cursor(run=book.name, **cursor), patient=True)


# ---- URLs ----------------------------------------------------------------------------------------------------------

NUMBERS = st.none() | st.integers(0, 2**62)
TEXTS = st.none() | st.text(min_size=1, max_size=30)


@given(
    run=TEXTS,
    rank=st.none() | st.integers(0, 1000),
    begin_ns=NUMBERS,
    at_ns=NUMBERS,
    pass_number=NUMBERS,
    rid=TEXTS,
    policy=TEXTS,
    other=TEXTS,
)
def test_a_url_says_all_that_a_view_shows(**fields: Any) -> None:
    cursor = Cursor(**fields, last_s=60.0, box=Box(3, 9, 0.25, 2.5))
    assert Cursor.parse(cursor.query()) == cursor


@pytest.mark.parametrize(
    "query",
    ["rank=x", "rank=-1", "pass=1e3", "from=99999999999999999999", "last=0", "last=nan", "box=1,2,3", "box=2,1,1,2"],
)
def test_a_url_that_makes_no_sense_says_what_it_is(query: str) -> None:
    with pytest.raises(UsageError, match=query.partition("=")[0]):
        Cursor.parse(f"?{query}")


@given(st.text(max_size=3_000))
def test_names_from_outside_are_short_and_plain(text: str) -> None:
    shown = words.name(text)
    assert len(shown) <= 44
    assert shown.isprintable()
    assert "<" not in words.in_chart(text)


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_few(begin: float, length: float) -> None:
    values, texts = time_ticks(begin, begin + length)
    assert len(values) == len(texts) <= 9
    slack = 1e-6 * (1 + length)
    assert all(begin - slack <= value <= begin + length + slack for value in values)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _query(capsys: pytest.CaptureFixture[str], run: Path, sql: str) -> Any:
    capsys.readouterr()
    assert main(["query", sql, "--run", str(run), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return next(iter(row.values()))


def _shown(component: Any, found: dict[str, str] | None = None) -> dict[str, str]:
    """Tiles by key, of a page's content."""
    found = {} if found is None else found
    if isinstance(component, list | tuple):
        for each in component:
            _shown(each, found)
    elif hasattr(component, "to_plotly_json"):
        properties = component.to_plotly_json()["props"]
        if "data-tile" in properties:
            found[properties["data-tile"]] = properties["children"]
        _shown(properties.get("children"), found)
    return found


ADMITTED = "from requests where admit_ns is not null and admit_ns >= {begin} and admit_ns < {end}"
FIRST = "from requests where first_token_ns >= {begin} and first_token_ns < {end}"
TTFT = "select quantile_cont((first_token_ns - arrive_ns) / 1e9, {q}) " + FIRST
IN_STEPS = "from steps where start_ns >= {begin} and start_ns < {end}"
SQL = {
    "hit_rate": ("select sum(cached_tokens) / sum(prompt_tokens) " + ADMITTED, words.share),
    "ttft_p99": (TTFT.replace("{q}", "0.99"), words.seconds),
    "ttft_p90": (TTFT.replace("{q}", "0.9"), words.seconds),
    "ttft_p50": (TTFT.replace("{q}", "0.5"), words.seconds),
    "queue_p99": ("select quantile_cont((admit_ns - arrive_ns) / 1e9, 0.99) " + ADMITTED, words.seconds),
    "queue_max": (
        "select max(coalesce(p.queue_len, s.queue_len)) from steps s left join passes p using (rank, pass) "
        "where s.start_ns >= {begin} and s.start_ns < {end}",
        words.count,
    ),
    "admitted": ("select count(*) " + ADMITTED, words.count),
    "refused": (
        "select count(*) from decisions d join steps s using (rank, pass) where d.result is not null "
        "and not d.admitted and s.start_ns >= {begin} and s.start_ns < {end}",
        words.count,
    ),
    "evicted": (
        "select coalesce(sum(e.tokens), 0) from events e join steps s using (rank, step) where e.kind = 'evict' "
        "and s.start_ns >= {begin} and s.start_ns < {end}",
        words.count,
    ),
    "lost": (
        "select (select coalesce(sum(len(retracted)), 0) "
        + IN_STEPS
        + ") + (select coalesce(sum(len(p.preempted)), 0) "
        "from passes p join steps s using (rank, pass) where s.start_ns >= {begin} and s.start_ns < {end})",
        words.count,
    ),
}


@pytest.mark.parametrize("part", [False, True])
def test_every_tile_is_what_a_query_of_the_log_gives(
    log: Path, library: Library, capsys: pytest.CaptureFixture[str], part: bool
) -> None:
    extent = library.book().timeline.extent
    length = extent.last_ns - extent.first_ns
    begin, end = (extent.first_ns + length // 5, extent.last_ns - length // 3) if part else (None, None)
    shown = _shown(overview.tiles(_desk(library, begin_ns=begin, end_ns=end)))
    assert set(shown) == set(SQL)
    limits = {"begin": extent.first_ns if begin is None else begin, "end": extent.last_ns + 1 if end is None else end}
    run = log / library.book().name
    queried = {key: write(_query(capsys, run, sql.format(**limits))) for key, (sql, write) in SQL.items()}
    assert shown == queried


NEEDED = """
select coalesce(sum(best - cached_tokens), 0) from requests r join (
    select rank, rid, max(prefix_len) as best from decisions where place_before is not null group by rank, rid
) using (rank, rid)
where admit_ns is not null and retractions + preemptions = 0 and best < prompt_tokens and best >= cached_tokens + 32
"""


def test_what_was_evicted_and_then_needed_is_what_a_query_of_the_log_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_busy(
        tmp_path, "fifo", config=BUSY.replace(radix_eviction_policy="fifo", max_total_tokens=3_000), seconds=12
    )
    desk = _desk(Library(tmp_path))
    drawn = cache_page.needed(desk)["data"][0]["y"]
    assert sum(drawn) == _query(capsys, run, NEEDED) > 0
    listed = to_html(cache_page.forgone(desk))
    assert f"{sum(drawn):,} tokens" in listed
    assert desk.load()["needed"] >= listed.count("/request?") > 0


def test_all_charts_of_all_pages_can_be_drawn_at_every_level(tmp_path: Path) -> None:
    for level in ("steps", "passes", "decisions"):
        record_busy(tmp_path, level, seconds=4, detail=Detail(level=level))  # type: ignore[arg-type]
    library = Library(tmp_path)
    for info in library.runs():
        desk = _desk(library, run=info.path.name, rid="req-00010", theme="dark")
        for page in PAGES:
            for draw in page.charts.values():
                try:
                    figure = draw(desk)
                except (RunFormatError, RunNotFoundError):
                    continue  # which the page then says
                json.dumps(figure, allow_nan=False)


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_once_however_many_ask() -> None:
    answers, asked = Answers(), []

    def find() -> int:
        asked.append(1)
        time.sleep(0.05)
        return 7

    threads = [threading.Thread(target=lambda: answers.get("how many", find)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.get("how many", find) == 7
    assert len(asked) == 1


def test_what_takes_long_stands_until_the_next_is_there() -> None:
    standing = Standing()
    assert standing.get("x", 1, lambda: "old") is PENDING
    deadline = time.monotonic() + 20
    while standing.get("x", 1, lambda: "old") is PENDING:
        assert time.monotonic() < deadline
    assert standing.get("x", 2, lambda: "new") == "old"


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", "", "busy/../../secret", "nothing"])
def test_only_runs_of_the_log_are_opened(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    record_busy(log, "busy", seconds=1)
    record_busy(tmp_path / "secret-log", "secret", seconds=1).rename(tmp_path / "secret")
    with pytest.raises(RunNotFoundError):
        Library(log).path_of(name)


def test_a_run_given_by_path_is_opened_beside_those_of_the_log(tmp_path: Path) -> None:
    record_busy(tmp_path / "log", "inside", seconds=1)
    given = record_busy(tmp_path / "elsewhere", "given", seconds=1)
    library = Library(tmp_path / "log", given)
    assert library.default() == given.name
    assert {info.path.name.partition("-")[2].partition("-")[2] for info in library.runs()} == {"inside", "given"}


def test_a_run_that_ended_is_looked_at_again_at_once(tmp_path: Path) -> None:
    clock = Clock()
    sink = DirectSink(create_run(tmp_path, "live"), 0, Description(config=BUSY.to_dict()))
    tracer = RunTracer(sink, clock_ns=clock.ns)
    scheduler = Scheduler(BUSY, tracer)
    tracer.attach(scheduler)
    for _ in serve(scheduler, clock, Clients(1, "req-{:05d}".format), 2.0):
        pass
    library = Library(tmp_path)
    book = library.book()
    assert book.live
    book.took_s = 1e6  # so that it would rest for long
    tracer.close()
    until(lambda: not library.book().live)


# ---- who may look --------------------------------------------------------------------------------------------------


def _client(library: Library, token: str | None = None) -> Any:
    return make_app(library, token).server.test_client()


def test_this_machine_needs_no_token_and_no_other_name_for_it_works(library: Library) -> None:
    client = _client(library)
    for host in ("localhost:8500", "127.0.0.1", "[::1]:8500"):
        assert client.get("/", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8500"):
        assert client.get("/metrics", headers={"Host": host}).status_code == 403


def test_other_web_pages_may_link_here_and_no_more(library: Library) -> None:
    client = _client(library)
    linked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/pass?pass=3", headers=linked).status_code == 200
    for mode in ("no-cors", "cors"):
        used = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        assert client.get("/report.html", headers=used).status_code == 403
    assert "frame-ancestors 'none'" in client.get("/").headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"[]",
        b"{}",
        b'{"output": "a.b", "inputs": []}',
        b'{"output": ["answer.data"], "inputs": []}',
        b'{"output": "answer.data"}',
        b'{"output": "answer.data", "outputs": {"id": "answer", "property": "data"}, "inputs": [{}]}',
        b'{"output": "answer.data", "outputs": "x", "inputs": [{"id": "question", "property": "data"}]}',
    ],
)
def test_what_no_page_asks_is_refused(library: Library, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    answer = _client(library).post("/_dash-update-component", data=body, content_type="application/json")
    assert (answer.status_code, answer.text) == (400, "not a question that this dashboard's pages ask\n")
    assert not caplog.records


@pytest.mark.parametrize("given", ["x", [], {"panels": "all"}, {"generation": "new"}, {"search": "?last=x"}])
def test_a_question_that_cannot_be_is_answered_in_words(
    library: Library, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = {
        "output": "answer.data",
        "outputs": {"id": "answer", "property": "data"},
        "inputs": [{"id": "question", "property": "data", "value": given}],
        "changedPropIds": ["question.data"],
    }
    answer = _client(library).post("/_dash-update-component", json=body)
    assert answer.status_code == 200
    assert "Something in the address of this view can" in answer.text
    assert not caplog.records


def test_elsewhere_a_token_is_needed_for_everything(library: Library) -> None:
    client = _client(library, TOKEN)
    for path in ("/", "/metrics", "/report.html", "/_dash-layout", "/assets/view.js", "/?token=wrong"):
        assert client.get(path).status_code == 401
    assert client.post("/_dash-update-component", json={}).status_code == 401
    assert client.get("/healthz").status_code == 200
    assert client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    entered = client.get(f"/pass?pass=3&token={TOKEN}&rank=0")
    assert entered.status_code == 302
    assert entered.headers["Location"] == "/pass?pass=3&rank=0"
    assert "HttpOnly" in entered.headers["Set-Cookie"]
    assert TOKEN not in entered.headers["Set-Cookie"]
    assert client.get("/").status_code == 200
    away = client.get("//evil.example/", query_string={"token": TOKEN}).headers["Location"]
    assert re.match(r"/(?!/)", away)


def test_a_server_that_others_reach_makes_a_token(log: Path) -> None:
    code = (
        "import sys; from schedscope.dashboard import serve; from schedscope.cli.main import main\n"
        "class Server:\n    effective_port = 1\n    run = close = lambda self: None\n"
        "serve.make_server = lambda library, host, port, token: Server()\n"
        f"sys.exit(main(['dashboard', '--log', {str(log)!r}, '--host', '0.0.0.0', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(r"\?token=[\w-]{20,}", done.stdout)
    done = subprocess.run([sys.executable, "-c", code, "--token", "short"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "at least 8 characters" in done.stderr


# ---- how it travels ------------------------------------------------------------------------------------------------


def test_scripts_are_fetched_once_and_compressed_for_who_asks(library: Library) -> None:
    client = _client(library)
    shell = client.get("/").text
    scripts = re.findall(r'<script src="([^"]+)"', shell)
    assert any("/assets/plotly.min.js?" in each for each in scripts)
    assert not any("polyfill" in each or "dash_table" in each for each in scripts)
    for script in scripts:
        plain = client.get(script)
        assert "immutable" in plain.headers["Cache-Control"]
        packed = client.get(script, headers={"Accept-Encoding": "gzip"})
        assert packed.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed.data) == plain.data
    assert "immutable" not in client.get("/assets/view.js").headers["Cache-Control"]
    assert "Content-Encoding" not in client.get("/healthz", headers={"Accept-Encoding": "gzip"}).headers


def test_what_is_compressed_is_what_is_there_now(tmp_path: Path) -> None:
    server = flask.Flask(__name__, static_url_path="/assets", static_folder=str(tmp_path))
    make_light(server)
    for text in ("a" * 2_000, "b" * 2_000):
        (tmp_path / "some.js").write_text(text)
        packed = server.test_client().get("/assets/some.js?m=1", headers={"Accept-Encoding": "gzip"})
        assert gzip.decompress(packed.data).decode() == text


# ---- what it writes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metrics(library: Library) -> str:
    text: str = _client(library).get("/metrics").text
    return text


def test_metrics_are_in_the_text_format_and_those_of_the_log(
    log: Path, library: Library, metrics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = metrics.splitlines()
    sample = re.compile(r'^schedscope_[a-z_]+\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\} -?[\d.e+-]+$')
    assert all(line.startswith("# ") or sample.match(line) for line in lines)
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    name = library.book().name
    for metric, sql in (
        ("passes_total", "select count(*) from passes"),
        ("cached_tokens_total", "select sum(cached_tokens) from requests where admit_ns is not null"),
        ("retractions_total", "select sum(len(retracted)) from steps"),
    ):
        found = values[f'schedscope_{metric}{{run="{name}",rank="0"}}']
        assert found == _query(capsys, log / name, sql)
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.partition("{")[0] for line in lines if not line.startswith("#")} == typed


def test_grafana_asks_for_metrics_that_there_are(metrics: str) -> None:
    dashboard = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"schedscope_\w+", target["expr"])
    }
    assert len(asked) >= 10
    assert asked <= set(re.findall(r"# TYPE (schedscope_\w+)", metrics))


def test_a_report_is_one_file_that_runs_nothing_else(library: Library) -> None:
    made = make_report(_desk(library))
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", made)
    for figure in re.findall(r'<script type="application/json" class="figure">(.*?)</script>', made, re.S):
        json.loads(figure)
    anchors = set(re.findall(r'href="#([^"]+)"', made))
    assert anchors
    assert anchors <= set(re.findall(r'id="([^"]+)"', made))
    assert "decided again and found identical" in made
    assert "add up to" in made


def test_names_in_a_report_are_only_names(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    record_busy(tmp_path, "hostile", seconds=4, names=lambda count: f"{hostile}{count}")
    made = make_report(_desk(Library(tmp_path)))
    assert made.count("<script>") == 2
    assert "<img" not in made.partition("<main>")[2].partition("</main>")[0]


def test_the_report_command(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    assert main(["report", "--log", str(log), "-o", str(file)]) == 0
    assert "needs nothing but a browser" in capsys.readouterr().out
    assert file.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", "--log", str(log), "-o", str(tmp_path / "no" / "such" / "folder.html")]) == 2
    assert main(["report", "nothing", "--log", str(log), "-o", str(file)]) == 5
