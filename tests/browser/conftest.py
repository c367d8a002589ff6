"""Fixtures of the browser's tests: one browser and one cluster for each module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.support.chromium import Watched, chromium, watched
from tests.support.consolestage import Stage, lively_stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(browser: Browser) -> AsyncIterator[Stage]:
    """A large shop's cluster; needs a browser, so that nothing is started where there is none."""
    async with lively_stage(is_crowded=True, every=1.0) as made:
        yield made


@pytest.fixture(scope="module")
def asked() -> set[tuple[str, str]]:
    """What pages have asked consoles for, by method and path."""
    return set()


@pytest_asyncio.fixture(loop_scope="module")
async def desk(
    browser: Browser, stage: Stage, asked: set[tuple[str, str]]
) -> AsyncIterator[Watched]:
    """A page as wide as a desk."""
    async with watched(browser, stage.url, asked=asked) as page:
        yield page
