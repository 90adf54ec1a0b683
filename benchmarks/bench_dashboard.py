"""What a reader of the dashboard waits for on a long run, and what its server takes.

    python benchmarks/bench_dashboard.py [--passes N] [--folder FOLDER] [--json FILE]

See README.md in this folder for what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_series import COMING, WAITING, made_up
from playwright.sync_api import sync_playwright
from schedscope.recorder.footprint import measure as footprint
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run

CHROMIUM = os.environ.get("SCHEDSCOPE_CHROMIUM") or shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TARGETS = {"first paint, s": 2.0, "interaction p95, ms": 300.0, "server memory, MB": 1000.0}
READERS = 20
STEPS_PER_S = 50
REST_MS = 300
"""Between an answer and what a reader does next."""


def start(log: Path) -> tuple[subprocess.Popen[str], str]:
    """The dashboard as a process, and its URL."""
    command = [sys.executable, "-m", "schedscope.cli.main", "dashboard", "--log", str(log), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1].rstrip("/")


def memory(pid: int) -> tuple[float, float]:
    """Memory of a process now and at most, MB."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return tuple(int(facts[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


LISTEN = """
() => { for (const kind of ["pointerup", "click", "popstate"])
    window.addEventListener(kind, () => { window.begun = performance.now(); }, true); }
"""


def answer_ms(page: Any, act: Callable[[], object]) -> float:
    """From the end of what a reader does, such as letting go of a button, to the charts that show it."""
    page.wait_for_function("() => document.body.dataset.rest === '0'")
    page.wait_for_timeout(REST_MS)
    before = page.evaluate("() => Number(document.body.dataset.serial)")
    act()
    page.wait_for_function("before => Number(document.body.dataset.serial) > before", arg=before, polling="raf")
    took: float = page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => done(performance.now() - window.begun)))"
    )
    return took


def cpu_clock(page: Any) -> Callable[[], float]:
    """Processor's time of a page's main thread from now on, milliseconds."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def read() -> float:
        figures = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        return float(figures["ThreadTime"] * 1e3)

    return read


def measure(url: str, pid: int, repeat: int) -> dict[str, Any]:
    """Look at a run as a reader would."""
    figures: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(url)
        begin = time.perf_counter()
        page.wait_for_selector("[data-tile=hit_rate]")
        figures["opened, s"] = time.perf_counter() - begin
        page.wait_for_function("() => !document.querySelector('[data-pending]')", timeout=300_000)
        figures["examined, s"] = time.perf_counter() - begin
        paints, busy = [], []
        for _ in range(repeat):
            fresh = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            clock = cpu_clock(fresh)
            begin = time.perf_counter()
            fresh.goto(url, wait_until="commit")
            fresh.wait_for_selector("[data-chart=ttft] .scatterlayer path.js-line", state="attached")
            paints.append(time.perf_counter() - begin)
            busy.append(clock())
            fresh.context.close()
        figures["first paint, s"] = statistics.median(paints)
        figures["first paint, each"] = [round(each, 2) for each in paints]
        figures["first paint, browser CPU, ms"] = statistics.median(busy)
        page.evaluate(LISTEN)
        clock = cpu_clock(page)
        before = clock()
        figures["interactions, ms"] = interactions(page, repeat)
        figures["interaction, browser CPU, ms"] = (clock() - before) / (4 * repeat)
        times = [took for each in figures["interactions, ms"].values() for took in each]
        figures["interaction p50, ms"] = statistics.median(times)
        figures["interaction p95, ms"] = sorted(times)[int(len(times) * 0.95)]
        browser.close()
    figures["server memory, MB"], figures["server memory at most, MB"] = memory(pid)
    return figures


def interactions(page: Any, repeat: int) -> dict[str, list[float]]:
    """Zooming, pointing, and going back, each to places that nobody looked at before."""
    found: dict[str, list[float]] = {"zoom": [], "point": [], "back": [], "whole run": []}
    for number in range(repeat):
        chart = page.locator("[data-chart='queue'] .nsewdrag").first
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        left = box["x"] + box["width"] * (0.1 + 0.5 * number / repeat)

        def drag(left: float = left, box: dict[str, float] = box) -> None:
            page.mouse.move(left, box["y"] + 40)
            page.mouse.down()
            page.mouse.move(left + 60, box["y"] + 40, steps=2)
            page.mouse.up()

        found["zoom"].append(answer_ms(page, drag))

        def click(box: dict[str, float] = box, number: int = number) -> None:
            page.mouse.click(box["x"] + box["width"] * (0.2 + 0.05 * number), box["y"] + 40)

        # A click waits a moment whether another one makes it a double click.
        found["point"].append(answer_ms(page, click) - 230)
        found["back"].append(answer_ms(page, lambda: page.go_back(wait_until="commit")))
        found["whole run"].append(answer_ms(page, lambda: page.locator("button[data-last='']").click()))
    return found


def live(folder: Path, seconds: float, readers: int) -> dict[str, Any]:
    """A run that is recorded for so long while so many browsers follow it; what recording took, and what went wrong."""
    ledger = folder / "ledger"
    ledger.write_bytes(bytes(16))
    log = folder / "log"
    server = [sys.executable, str(Path(__file__).with_name("bench_live.py")), "serve", str(ledger), str(STEPS_PER_S)]
    recording = subprocess.Popen(
        [sys.executable, "-m", "schedscope.cli.main", "record", "--log", str(log), "--", *server]
    )
    found: dict[str, Any] = {}
    try:
        while not int.from_bytes(ledger.read_bytes()[:8], sys.byteorder):
            time.sleep(0.1)
        if readers:
            dashboard, url = start(log)
            try:
                found = follow(url, seconds, readers, lambda: end(ledger, recording))
            finally:
                dashboard.terminate()
                dashboard.wait()
        else:
            time.sleep(seconds)
            end(ledger, recording)
    finally:
        recording.terminate()
        recording.wait()
    run = resolve_run(None, log)
    spent = run_steps(run)
    overhead = footprint(Run.open(run)).overhead
    assert overhead is not None
    median = statistics.median(spent) / 1e3
    return {**found, "recording, us a step": {"mean": round(overhead.per_step_us, 1), "median": round(median, 1)}}


def end(ledger: Path, recording: subprocess.Popen[Any]) -> None:
    """Let the server stop, and its recorder finish."""
    ledger.with_suffix(".stop").touch()
    recording.wait(600)


def run_steps(run: Path) -> list[int]:
    """What recording took on the scheduler's thread, step by step, nanoseconds."""
    rows = Run.open(run).connect(["steps"]).sql("SELECT record_ns FROM steps WHERE kind <> 'idle' AND record_ns > 0")
    return [row[0] for row in rows.fetchall()]


def follow(url: str, seconds: float, readers: int, end_run: Callable[[], None]) -> dict[str, Any]:
    """Readers with a page each, all of them open until what was recorded last is on every one."""
    wrong: list[str] = []
    # The readers' machines are elsewhere: here they get what the scheduler leaves of its processors. A niceness would
    # do if browsers didn't give themselves another one.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        pages = [browser.new_context(viewport={"width": 1280, "height": 800}).new_page() for _ in range(readers)]
        for page in pages:
            page.set_default_timeout(120_000)
            page.on("console", lambda said: wrong.append(said.text) if said.type in {"error", "warning"} else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("response", lambda got: wrong.append(f"{got.status} {got.url}") if got.status >= 400 else None)
            page.goto(url, wait_until="commit")
        for page in pages:
            page.wait_for_selector("#bar .status.recording")
        begun = [int(page.get_attribute("body", "data-serial")) for page in pages]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pages[0].wait_for_timeout(200)
        answers = [
            int(page.get_attribute("body", "data-serial")) - first for page, first in zip(pages, begun, strict=True)
        ]
        end_run()
        for page in pages:
            page.wait_for_selector("#bar .status:not(.recording)")
            page.wait_for_function("() => document.body.dataset.rest === '0'")
        shown = {page.inner_text("[data-tile=admitted]") + page.inner_text("#bar .when") for page in pages}
        browser.close()
    return {
        "browsers": readers,
        "errors": wrong,
        "all at the same end": len(shown) == 1,
        "answers a browser, fewest": min(answers),
        "answers a browser, most": max(answers),
    }


def main() -> None:
    """Measure and print."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="schedscope-bench-", dir=options.folder))
    try:
        made_up(folder, options.passes)
        process, url = start(folder)
        try:
            figures = measure(url, process.pid, options.repeat)
        finally:
            process.terminate()
            process.wait()
    finally:
        shutil.rmtree(folder)
    for readers in (0, READERS):
        with tempfile.TemporaryDirectory(prefix="schedscope-bench-", dir=options.folder) as live_folder:
            figures[f"a live run, {readers} browsers"] = live(Path(live_folder), options.live, readers)
    print(f"{options.passes * WAITING:,} decisions, {options.passes * COMING:,} requests")
    for name, value in figures.items():
        shown = f"{value:.2f}" if isinstance(value, float) else value
        target = f"   target {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:28}{shown}{target}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=9, help="times that each thing is done")
    parser.add_argument("--live", type=float, default=60.0, help="seconds that a live run is followed")
    parser.add_argument("--folder", help="where to make the run, which is removed again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
