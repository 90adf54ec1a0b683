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
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_series import COMING, WAITING, made_up
from playwright.sync_api import sync_playwright

CHROMIUM = os.environ.get("SCHEDSCOPE_CHROMIUM") or shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TARGETS = {"first paint, s": 2.0, "interaction p95, ms": 300.0, "server memory, MB": 1000.0}
READERS = 20
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
        paints = []
        for _ in range(repeat):
            fresh = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            begin = time.perf_counter()
            fresh.goto(url, wait_until="commit")
            fresh.wait_for_selector("[data-chart=ttft] .scatterlayer path.js-line", state="attached")
            paints.append(time.perf_counter() - begin)
            fresh.context.close()
        figures["first paint, s"] = statistics.median(paints)
        figures["first paint, each"] = [round(each, 2) for each in paints]
        page.evaluate(LISTEN)
        figures["interactions, ms"] = interactions(page, repeat)
        times = [took for each in figures["interactions, ms"].values() for took in each]
        figures["interaction p50, ms"] = statistics.median(times)
        figures["interaction p95, ms"] = sorted(times)[int(len(times) * 0.95)]
        browser.close()
    figures["20 readers, ms"] = readers(url)
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


def readers(url: str) -> dict[str, float]:
    """Twenty readers who each zoom somewhere else, at the same time."""
    times: list[float] = []

    def read(number: int) -> None:
        for turn in range(3):
            begin = (number * 3 + turn) * 10**9 + 10**9
            value = {"path": "/", "search": f"?from={begin}&to={begin + 600 * 10**9}", "theme": "light", "serial": 1}
            outputs = [("page", "children"), ("bar", "children"), ("notice", "children"), ("shown", "data")]
            body: dict[str, Any] = {
                "outputs": [{"id": name, "property": what} for name, what in outputs],
                "inputs": [{"id": "want-page", "property": "data", "value": value}],
                "changedPropIds": ["want-page.data"],
            }
            body["output"] = ".." + "...".join(f"{name}.{what}" for name, what in outputs) + ".."
            asked = urllib.request.Request(
                f"{url}/_dash-update-component", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            start_ = time.perf_counter()
            with urllib.request.urlopen(asked, timeout=120) as answer:
                assert answer.status == 200
                answer.read()
            times.append((time.perf_counter() - start_) * 1e3)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    times.sort()
    return {"median": statistics.median(times), "p95": times[int(len(times) * 0.95)], "answers": len(times)}


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
    parser.add_argument("--folder", help="where to make the run, which is removed again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
