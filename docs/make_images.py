"""Makes the pictures in docs/images from real commands: python docs/make_images.py

Each picture is what a terminal shows, colours included; those of the dashboard are what a browser shows.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from schedscope.recorder.run import Run
from schedscope.recorder.runs import resolve_run
from schedscope.tui.app import ScopeApp
from schedscope.tui.cursor import parse_at
from schedscope.tui.session import Session

IMAGES = Path(__file__).parent / "images"
COLUMNS = 118
SCREEN = (150, 44)


def schedscope(*words: str, cwd: Path) -> str:
    """The coloured output of a command. Raises CalledProcessError if it fails."""
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TTY_INTERACTIVE": "0"}
    command = [sys.executable, "-m", "schedscope.cli.main", *words]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=True).stdout


def picture(name: str, *shown: tuple[str, str]) -> None:
    """Draw commands and their outputs as one terminal."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: PTH123, SIM115
    for command, output in shown:
        console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
        console.print(Text.from_ansi(output.rstrip("\n")))
        console.print()
    path = IMAGES / f"{name}.svg"
    console.save_svg(str(path), title="schedscope")
    print(path)


async def screen(name: str, app: ScopeApp, *keys: str) -> None:
    """Draw the terminal debugger after some keys."""
    async with app.run_test(size=SCREEN) as pilot:
        for key in ("", *keys):
            if key:
                await pilot.press(key)
            await pilot.pause(0.2)
            while app.busy:
                await pilot.pause(0.05)
        path = IMAGES / f"{name}.svg"
        path.write_text(app.export_screenshot(title="schedscope tui"))
        print(path)


def interesting_pass(demo: str) -> str:
    """The pass that the demo points to."""
    line = next(line for line in demo.splitlines() if "replay pass" in line)
    return line.split("replay pass ")[1].split()[0]


def dashboard() -> None:
    """Photograph the dashboard over a simulated run."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from browser import Reader, browsing, served
    from scenes import record_busy

    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        run = record_busy(Path(folder), "busy")
        with served(Path(folder)) as url:
            reader = Reader(browser, url, width=1360, height=1180)

            def shoot(name: str, path: str, *, dark: bool = False, top: str | None = None, height: int = 1180) -> None:
                reader.open(f"{path}{'&' if '?' in path else '?'}run={run.name}")
                if dark:
                    reader.follow("#theme")
                    reader.settled()
                reader.page.set_viewport_size({"width": 1360, "height": height})
                if top is not None:
                    reader.page.locator(top).scroll_into_view_if_needed()
                    reader.page.evaluate(
                        "top => window.scrollBy(0, document.querySelector(top).getBoundingClientRect().top - 68)", top
                    )
                reader.page.wait_for_timeout(500)
                file = IMAGES / f"dashboard-{name}.png"
                reader.page.screenshot(path=file)
                print(file)
                if dark:
                    reader.follow("#theme")

            shoot("overview", "/?at=1034000000000")
            shoot("box", "/?box=1028000000000,1042000000000,1,20", top="#card-heat", height=560)
            number = busiest(run)
            shoot("pass", f"/pass?pass={number}&policy=hrrn", height=1500)
            shoot("request", f"/request?rid={slowest(reader, run)}", height=1500)
            shoot("cache", f"/cache?pass={number}", dark=True, height=900)
            reader.close()


def slowest(reader: Any, run: Path) -> str:
    """The request that waited longest."""
    reader.open(f"/?run={run.name}")
    name: str = reader.page.locator("#slowest-table a.rid").first.inner_text()
    return name


def busiest(run: Path) -> int:
    """The pass with the longest queue of those that admitted some and had no memory for others."""
    query = "SELECT pass FROM passes WHERE admitted > 1 AND stop = 'NO_TOKEN' ORDER BY queue_len DESC, pass LIMIT 1"
    number: int = Run.open(run).connect(["passes"]).execute(query).fetchall()[0][0]
    return number


def main() -> None:
    """Draw all pictures."""
    IMAGES.mkdir(exist_ok=True)
    dashboard()
    if sys.argv[1:] == ["dashboard"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        demo = schedscope("demo", cwd=cwd)
        number = interesting_pass(demo)
        other = schedscope("replay", "pass", number, "--policy", "hrrn", cwd=cwd)
        picture("demo", ("schedscope demo", demo))
        picture(
            "replay",
            (f"schedscope replay pass {number}", schedscope("replay", "pass", number, cwd=cwd)),
            (f"schedscope replay pass {number} --policy hrrn", other),
        )
        run = resolve_run(None, cwd / "schedscope-logs")
        for image, view, keys in (
            ("tui", "pass", ()),
            ("tui-request", "request", ()),
            ("tui-cache", "cache", ()),
            ("tui-compare", "pass", ("o", "h", "r", "r", "enter")),
        ):
            app = ScopeApp(Session(Run.open(run)), parse_at(f"pass={number},view={view}"))
            asyncio.run(screen(image, app, *keys))


if __name__ == "__main__":
    main()
