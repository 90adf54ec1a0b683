"""A real browser for tests of the dashboard, and a served dashboard for it to look at."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from schedscope.dashboard.library import Library
from schedscope.dashboard.serve import serving

CHROMIUM = os.environ.get("SCHEDSCOPE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE_MS = 30_000


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser; the test is skipped, with a warning that nobody overlooks, where there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        pytest.skip("THE DASHBOARD IS NOT TESTED IN A BROWSER: no playwright (pip install playwright)")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        except Error as error:
            pytest.skip(
                "THE DASHBOARD IS NOT TESTED IN A BROWSER: no Chromium, set SCHEDSCOPE_CHROMIUM to one "
                f"or run: playwright install chromium ({str(error).splitlines()[0]})"
            )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(log: Path, given: Path | None = None, token: str | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """A dashboard over a folder of runs, at a free port; gives its URL."""
    with serving(Library(log, given), host, 0, token) as server:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.effective_port}"
    thread.join(10)


class Reader:
    """Somebody who looks at a dashboard. What goes wrong in the browser on the way is noted."""

    def __init__(self, browser: Any, url: str, *, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        self.url = url
        self.wrong: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, accept_downloads=True
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error.stack}"))
        self.page.on("request", self._asked)
        self.page.on("dialog", self._dialog)

    def _heard(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.wrong.append(f"{message.type}: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.wrong.append(f"a request to {request.url}")

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, path: str = "/") -> None:
        """Open a view and wait until all of it is there."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector("body[data-serial]")
        self.settled()

    @property
    def serial(self) -> int:
        """Of the answer that is shown."""
        return int(self.page.get_attribute("body", "data-serial") or 0)

    def answered(self, before: int) -> None:
        """Wait for an answer behind the one of this number."""
        self.page.wait_for_function("before => Number(document.body.dataset.serial) > before", arg=before)
        self.settled()

    def settled(self) -> None:
        """Wait until nothing is worked out any more, and all charts in sight are drawn."""
        self.page.wait_for_function(
            "() => document.body.dataset.rest === '0' && !document.querySelector('[data-pending]') && "
            "!window.charts.pending().length"
        )

    def chart(self, name: str) -> Any:
        """Where the plot area of a chart is on the page: x, y, width, height."""
        self.look_at(name)
        box = self.page.locator(f"[data-chart='{name}'] .nsewdrag").first.bounding_box()
        assert box is not None
        return box

    def look_at(self, name: str) -> None:
        """Scroll to a chart, which is drawn when it comes in sight."""
        self.page.locator(f"[data-chart='{name}']").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"[data-chart='{name}'] .js-plotly-plot", state="attached")

    def drag(self, name: str, begin: float, end: float, top: float = 0.5, bottom: float = 0.5) -> None:
        """Drag across a chart, from one share of its width and height to another, and wait for what comes of it."""
        box, before, mouse = self.chart(name), self.serial, self.page.mouse
        mouse.move(box["x"] + begin * box["width"], box["y"] + top * box["height"])
        mouse.down()
        mouse.move(box["x"] + (begin + end) / 2 * box["width"], box["y"] + (top + bottom) / 2 * box["height"])
        mouse.move(box["x"] + end * box["width"], box["y"] + bottom * box["height"])
        mouse.up()
        self.answered(before)

    def click(self, name: str, x: float) -> None:
        """Click into a chart, at a share of its width, and wait for what comes of it."""
        box, before = self.chart(name), self.serial
        self.page.mouse.click(box["x"] + x * box["width"], box["y"] + 0.5 * box["height"])
        self.answered(before)

    def follow(self, selector: str) -> None:
        """Click on something that leads elsewhere, and wait for it."""
        before = self.serial
        self.page.locator(selector).first.click()
        self.answered(before)

    def tiles(self) -> dict[str, str]:
        """The numbers of the page by key."""
        found: dict[str, str] = self.page.evaluate(
            "() => Object.fromEntries([...document.querySelectorAll('[data-tile]')]"
            ".map(each => [each.dataset.tile, each.textContent]))"
        )
        return found

    def range_of(self, name: str) -> tuple[float, float]:
        """What a chart shows of the time axis."""
        self.look_at(name)
        low, high = self.page.evaluate(
            "name => document.querySelector(`[data-chart='${name}'] .js-plotly-plot`).layout.xaxis.range", name
        )
        return low, high

    def close(self) -> None:
        """End, and fail if anything went wrong in the browser."""
        self.context.close()
        assert not self.wrong, self.wrong
