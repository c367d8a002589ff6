"""The page in another language than English."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from tests.browser.chromium import DESK, PHONE, watched

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

CHINESE = re.compile(r"[\u4e00-\u9fff]")
#: Views, and words that must be on them.
VIEWS = {
    "/": ("需要处理", "无人消费", "堆积", "启动它的消费者"),
    "/topics": ("主题", "流入", "新建主题"),
    "/topics/orders": ("消费组", "队列", "时间范围"),
    "/groups": ("消费组", "最久等待", "需要处理"),
    "/groups/mailer": ("最近一小时的各队列", "成员"),
    "/dead-letters": ("死信", "未处理"),
    "/dead-letters/billing": ("全部重发", "原因"),
    "/alerts": ("Webhook", "静默规则"),
}
WIDTHS = {"desk": DESK, "phone": PHONE}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.feature("F7")
async def test_the_views_are_in_chinese(browser, stage, width):
    async with watched(browser, stage.url, viewport=WIDTHS[width], locale="zh-CN") as found:
        for path, wanted in VIEWS.items():
            page = await found.open(path)
            text = await found.text()
            assert [word for word in wanted if word not in text] == [], (path, text)
            headings = await page.locator("h1:visible, h2:visible, th:visible").all_inner_texts()
            english = [each for each in headings if re.search(r"[A-Za-z]{3} [a-z]{2}", each)]
            assert english == [], path
            assert await found.overflow() <= 0, path
        assert await page.evaluate("document.documentElement.lang") == "zh-CN"


async def test_what_is_wrong_is_said_in_chinese(browser, stage):
    async with watched(browser, stage.url, locale="zh-CN") as found:
        page = await found.open("/")
        said = await page.locator(".finding > p, .finding .fix > span").all_inner_texts()
        # What is folded has no text yet.
        said = [each for each in said if each]
        assert len(said) >= 6
        assert [each for each in said if not CHINESE.search(each)] == []
        assert [each for each in said if re.search(r" (the|and|of|is|wait) ", each)] == []
        # Commands stay as they are.
        assert "orbitmq group show archive" in (await found.text())


async def test_the_language_is_chosen_and_remembered(browser, stage):
    async with watched(browser, stage.url, locale="fr-FR") as found:
        page = await found.open("/groups")
        await expect(page.locator("h1")).to_have_text("Groups")
        await page.get_by_label("Language").select_option(label="中文")
        await expect(page.locator("h1")).to_have_text("消费组")

        await found.open("/topics")
        await expect(page.locator("h1")).to_have_text("主题")
        await page.get_by_label("语言").select_option(label="English")
        await expect(page.locator("h1")).to_have_text("Topics")
        await page.reload()
        await expect(page.locator("h1")).to_have_text("Topics")
