"""Several clusters in one page."""

from __future__ import annotations

import re

import pytest
import pytest_asyncio
from playwright.async_api import expect

from orbitmq.testing import AsyncEmbeddedCluster
from tests.browser.chromium import DESK, PHONE, watched
from tests.support.client import quick_settings
from tests.support.consoles import console_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
    pytest.mark.feature("W7"),
]

WIDTHS = {"desk": DESK, "phone": PHONE}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def several(browser):
    """The console of `shop`, of `lab 2`, which has other topics, and of `gone`."""
    async with AsyncEmbeddedCluster() as shop, AsyncEmbeddedCluster() as lab:
        await shop.create_topic("orders", queues=2)
        await lab.create_topic("trials", queues=2)
        servers = {"shop": shop.name_server, "lab 2": lab.name_server, "gone": "127.0.0.1:1"}
        clusters = {name: quick_settings(server) for name, server in servers.items()}
        async with console_of(shop, every=0.5, clusters=clusters) as page:
            for name in ("shop", "lab 2"):
                await page.within(name).until("/now", lambda now: now["at"])
            await page.until("/clusters", lambda found: found["clusters"][2]["problem"])
            yield page


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_list_leads_into_a_cluster(browser, several, width):
    async with watched(browser, several.url, viewport=WIDTHS[width]) as found:
        page = await found.open("/")
        await expect(page).to_have_url(re.compile("/clusters$"))
        row = page.locator("tbody tr", has_text="gone")
        await expect(row).to_contain_text("unreachable")
        await expect(page.locator(".note.bad")).to_contain_text("no name server answers")
        assert await found.overflow() <= 0

        await page.locator("main").get_by_role("link", name="lab 2").click()
        await expect(page).to_have_url(re.compile("/clusters/lab%202$"))
        await expect(page.locator("main")).to_contain_text("1 of 1 broker up")
        assert await page.title() == "Now · lab 2 · OrbitMQ"


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_switcher_keeps_the_view_and_the_address_has_the_cluster(browser, several, width):
    async with watched(browser, several.url, viewport=WIDTHS[width]) as found:
        page = await found.open("/clusters/shop/topics?sort=-name")
        choice = page.get_by_label("Cluster", exact=True)
        await expect(choice).to_have_value("/clusters/shop")
        await expect(choice.locator("option")).to_have_text(
            ["shop", "lab 2", "gone · unreachable", "All clusters"]
        )
        await expect(page.locator("main")).to_contain_text("orders")

        await choice.select_option("lab 2")
        await expect(page).to_have_url(re.compile("/clusters/lab%202/topics[?]sort=-name$"))
        await expect(page.locator("main")).to_contain_text("trials")
        await expect(page.locator("main")).not_to_contain_text("orders")
        assert await found.overflow() <= 0

        # Links, forms and the list on the left stay in the cluster.
        await page.get_by_role("link", name="trials").first.click()
        await expect(page).to_have_url(re.compile("/clusters/lab%202/topics/trials$"))
        if width == "phone":
            await page.get_by_role("button", name="Menu").click()
        places = page.get_by_role("navigation")
        await expect(places.get_by_role("link", name="Topics")).to_have_attribute(
            "aria-current", "page"
        )
        await places.get_by_role("link", name="Groups").click()
        await expect(page).to_have_url(re.compile("/clusters/lab%202/groups"))
        await page.go_back()
        await expect(page).to_have_url(re.compile("/clusters/lab%202/topics/trials$"))

        await choice.select_option("gone · unreachable")
        await expect(page).to_have_url(re.compile("/clusters/gone/topics/trials$"))
        # What it cannot answer is an error, which the page shows.
        await expect(page.locator("main .note.bad").first).to_be_visible()
        found.errors.clear()
        await choice.select_option("All clusters")
        await expect(page).to_have_url(re.compile("/clusters$"))
        found.errors.clear()


async def test_all_of_it_is_in_chinese(browser, several):
    async with watched(browser, several.url, locale="zh-CN") as found:
        page = await found.open("/clusters")
        for word in ("集群", "需要处理", "无法连接", "堆积"):
            await expect(page.locator("main")).to_contain_text(word)
