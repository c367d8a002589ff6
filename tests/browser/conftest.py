"""Fixtures of the browser's tests: one browser and one cluster for each module."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.browser.chromium import chromium, watched
from tests.browser.stage import lively_stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(browser):
    """A large shop's cluster; needs a browser, so that nothing is started where there is none."""
    async with lively_stage(is_crowded=True, every=1.0) as made:
        yield made


@pytest.fixture(scope="module")
def asked():
    """What pages have asked consoles for, by method and path."""
    return set()


@pytest_asyncio.fixture(loop_scope="module")
async def desk(browser, stage, asked):
    """A page as wide as a desk."""
    async with watched(browser, stage.url, asked=asked) as page:
        yield page
