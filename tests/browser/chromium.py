"""Chromium for tests: found, started, and watched for errors."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

#: Names the browser, where it is not on the PATH.
VARIABLE = "ORBITMQ_CHROMIUM"
#: Set to make the pictures of the documentation anew.
PICTURES = "ORBITMQ_SCREENSHOTS"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: It draws without a screen, inside of containers too, and asks nobody for anything.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
DESK = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}
#: Milliseconds; generous.
DEADLINE = 20_000


def find_chromium() -> str:
    """The path of a browser; skips the test where there is none."""
    named = os.environ.get(VARIABLE)
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on the PATH, and {VARIABLE} does not name one")
    return found


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = find_chromium()
    # Playwright's own 5 s are an expectation of the machine's speed.
    expect.set_options(timeout=DEADLINE)
    async with async_playwright() as tools:
        browser = await tools.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watched:
    """A page, and what it complained about."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    #: What was answered with an error; the page's own complaint does not name it.
    refused: list[str] = field(default_factory=list)
    #: What was asked for, by method and path.
    asked: set[tuple[str, str]] = field(default_factory=set)

    def note(self, status: int, url: str) -> None:
        if status >= 400:
            self.refused.append(f"{status} {url}")

    async def open(self, path: str) -> Page:
        """Go there, and wait until the view is drawn."""
        await self.page.goto(self.url + path)
        await self.drawn()
        return self.page

    async def drawn(self) -> None:
        await self.page.wait_for_selector("main[data-view]", timeout=DEADLINE)

    async def text(self) -> str:
        return await self.page.inner_text("main")

    async def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        wider: int = await self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return wider


@contextlib.asynccontextmanager
async def watched(
    browser: Browser,
    url: str,
    *,
    viewport: dict[str, int] | None = None,
    asked: set[tuple[str, str]] | None = None,
    **options: Any,
) -> AsyncIterator[Watched]:
    """A page in a context of its own, that must not complain. What it asks for goes to `asked`."""
    context: BrowserContext = await browser.new_context(
        viewport=viewport or DESK,  # type: ignore[arg-type]
        reduced_motion="reduce",
        **options,
    )
    context.set_default_timeout(DEADLINE)
    try:
        page = await context.new_page()
        found = Watched(page, url, asked=set() if asked is None else asked)
        page.on("request", lambda sent: found.asked.add((sent.method, urlsplit(sent.url).path)))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("response", lambda answer: found.note(answer.status, answer.url))
        page.on(
            "console", lambda line: found.errors.append(line.text) if line.type == "error" else None
        )
        yield found
        assert not found.errors, (found.errors, found.refused)
    finally:
        await context.close()


def picture(name: str) -> Path | None:
    """Where a picture for the documentation goes; None unless pictures are wanted."""
    if not os.environ.get(PICTURES):
        return None
    folder = Path(__file__).parents[2] / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"console-{name}.png"
