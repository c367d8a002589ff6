"""The pictures of the documentation, made anew when ORBITMQ_SCREENSHOTS is set."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from playwright.async_api import Browser

from tests.browser.chromium import DESK, PHONE, PICTURES, picture, watched
from tests.browser.stage import Stage, lively_stage
from tests.support.archiving import archiving
from tests.support.consuming import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get(PICTURES), reason=f"{PICTURES} is not set"),
]

#: Seconds that the shop is open before the pictures are taken, and that its pipeline runs of these.
OPEN = 150
PIPED = 60
PIPELINE = "orders-to-lake"
LIGHT: dict[str, Any] = {"viewport": DESK, "color_scheme": "light"}
DARK: dict[str, Any] = {"viewport": DESK, "color_scheme": "dark"}
SMALL: dict[str, Any] = {"viewport": PHONE, "color_scheme": "light", "device_scale_factor": 2}
TAKEN = {
    "now": ("/", LIGHT),
    "now-dark": ("/", DARK),
    "now-phone": ("/", SMALL),
    "now-zh": ("/", LIGHT | {"locale": "zh-CN"}),
    "groups": ("/groups", LIGHT),
    "group": ("/groups/mailer", LIGHT),
    "group-dark": ("/groups/mailer", DARK),
    "topic": ("/topics/orders", LIGHT),
    "messages": ("/messages?topic=orders", LIGHT),
    "dead-letters": ("/dead-letters/billing", LIGHT),
    "dead-letters-phone": ("/dead-letters/billing", SMALL),
    "progress": ("/progress?group=archive&topic=clicks&to=latest", LIGHT),
    "pipeline": (f"/pipelines/{PIPELINE}", LIGHT),
    "charts": ("/charts?group=mailer", DARK),
    "topology": ("/topology", LIGHT),
    "consumer": ("/consumers/mailer", LIGHT),
}


async def test_pictures_are_taken(browser, tmp_path):
    async with (
        lively_stage(OPEN - PIPED, step=0.0, has_reports=False, every=1.0) as stage,
        asyncio.TaskGroup() as tasks,
    ):
        # Life goes on meanwhile, or every picture would show how it ends.
        life = tasks.create_task(_go_on(stage))
        piping = archiving(stage.browser, stage.cluster.name_server, "orders", PIPELINE, tmp_path)
        async with piping:
            await until(lambda: stage.ticks >= OPEN, deadline=4 * OPEN)
            await _take(browser, stage)
        life.cancel()


async def _take(browser: Browser, stage: Stage) -> None:
    for name, (path, options) in TAKEN.items():
        async with watched(browser, stage.url, **options) as desk:
            page = await desk.open(path)
            if name == "progress":
                await page.get_by_role("button", name="Plan").click()
                await page.get_by_role("button", name="Do this").wait_for()
            if name == "consumer":
                await page.locator("tbody a.id").click()
                await page.locator("section[aria-label=Topics]").wait_for()
            await page.wait_for_load_state("load")
            target = picture(name)
            assert target is not None
            # To hide the caret it would add a style, which the page's policy does not let in.
            await page.screenshot(path=target, caret="initial")
            assert target.stat().st_size > 10_000


async def _go_on(stage: Stage) -> None:
    while True:
        await stage.tick()
