"""Every view: drawn without an error, readable on a phone, with what it promises on it."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from playwright.async_api import expect

from orbitmq.client.message import Message
from orbitmq.client.routes import Queue
from tests.browser.chromium import DESK, PHONE, watched

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

#: Each view, and a word that must be on it.
VIEWS = {
    "/": "things need a hand",
    "/topics": "orders",
    "/topics/orders": "Queues",
    "/groups": "billing",
    "/groups/mailer": "Each queue over the last hour",
    "/messages?topic=orders": "Porto",
    "/dead-letters": "billing",
    "/dead-letters/billing": "ValueError",
    "/progress?group=mailer": "What was done here",
    "/consumers": "mailer",
    "/consumers/billing": "clustering",
    "/consumers/mailer/{member}": "Mean call",
    "/charts?group=mailer": "mailer: lag",
    "/send?topic=orders": "Body",
    "/topology": "Connected producers",
    "/pipelines": "orders-by-city",
    "/pipelines/orders-by-city": "Unread in each queue",
    "/brokers": "Name servers",
    "/alerts": "Nobody is told",
    "/audit": "What was changed",
    "/clusters": "Needs a hand",
}


async def test_no_view_is_left_out():
    script = (files("orbitmq.console") / "static" / "main.js").read_text()
    (table,) = re.findall(r"const VIEWS = \[(.*?)\];", script, re.DOTALL)
    views = re.findall(r'\["(/[^"]*)"', table)
    assert len(views) > 15

    def is_tested(view):
        pattern = re.sub(r":\w+", "[^/]+", view)
        return any(re.fullmatch(pattern, path.split("?")[0]) for path in VIEWS)

    # `test_roles.py` has the page of users, which there is for an admin only.
    assert [view for view in views if not is_tested(view)] == ["/access"]


@pytest.mark.parametrize(("viewport", "scheme"), [(DESK, "light"), (PHONE, "dark")])
async def test_every_view_is_drawn_and_readable(browser, stage, viewport, scheme):
    async with watched(browser, stage.url, viewport=viewport, color_scheme=scheme) as screen:
        member = await stage.member("mailer")
        for path, word in VIEWS.items():
            page = await screen.open(path.format(member=member))

            await expect(page.locator("main")).to_contain_text(word)
            await expect(page.locator("h1")).to_have_count(1)
            assert await screen.overflow() <= 0, path
            assert screen.errors == [], path
            # Nothing that is to be read is smaller than a phone shows it.
            small = await page.evaluate(
                """[...document.querySelectorAll("main *")].filter((each) =>
                    each.childNodes.length && [...each.childNodes].some((node) =>
                        node.nodeType === 3 && node.data.trim()) &&
                    each.getClientRects().length && !each.closest("svg") &&
                    parseFloat(getComputedStyle(each).fontSize) < 11).length"""
            )
            assert small == 0, path


async def test_an_address_that_means_no_view_is_said_to_be_none_with_the_way_back(desk):
    page = await desk.open("/nothing/here")

    await expect(page.locator("main")).to_contain_text("This address means no view")
    assert desk.refused == [f"404 {desk.url}/nothing/here"]
    # The browser itself says so of any such page.
    assert len(desk.errors) == 1
    desk.errors.clear()
    await page.locator("nav a", has_text="Topics").click()
    await expect(page.locator("h1")).to_have_text("Topics")


async def test_the_first_page_answers_in_words_and_every_number_is_a_link(desk):
    page = await desk.open("/")

    cards = page.locator(".fault-card")
    archive = cards.filter(has=page.get_by_role("link", name="archive", exact=True))
    await expect(archive).to_contain_text("no member is online")
    await expect(archive.locator("code").first).to_contain_text("orbitmq group show archive")
    await expect(archive.locator("code").last).not_to_be_visible()
    await archive.get_by_text("If repair is not wanted").click()
    await expect(archive.locator("code").last).to_contain_text("orbitmq group skip archive")
    await expect(cards.filter(has_text="billing")).to_contain_text("died in the last hour")
    # The figures come first, then what is critical, then the rest.
    words = await cards.locator("header .tag").all_inner_texts()
    assert words == sorted(words)
    figures, first = page.locator(".tiles").first, cards.first
    above, below = await figures.bounding_box(), await first.bounding_box()
    assert above
    assert below
    assert above["y"] < below["y"]
    tiles = page.locator(".tile")
    assert await tiles.count() == 6
    assert await page.locator("a.tile").count() == 6
    cells = page.locator("main tbody td.n")
    # Some tables have those groups alone that are behind at the moment.
    assert await cells.count() > 10
    numbers = page.locator("main tbody td.n", has_text=re.compile(r"\d"))
    assert await numbers.count() == await numbers.filter(has=page.locator("a[href^='/']")).count()
    await page.locator("section[aria-label='Busiest topics'] td.n a").first.click()
    await expect(page.locator("h1")).to_have_text("Charts")
    await page.go_back()
    await page.locator("a.tile", has_text="Dead letters").click()
    await expect(page.locator("h1")).to_have_text("Dead letters")
    await page.go_back()
    await expect(page.locator(".verdict")).to_be_visible()


async def test_a_group_shows_lag_owners_and_each_queue_over_time(desk):
    page = await desk.open("/groups/fraud-check")

    queues = page.locator("section[aria-label=Queues] tbody tr")
    await expect(queues).to_have_count(4)
    await expect(queues.first.locator("a.id")).to_be_visible()
    assert await page.locator(".heat svg").count() == 4
    assert await page.locator(".heat rect").count() > 4
    assert await page.locator(".plot path.s0").count() == 3
    await page.get_by_role("button", name="24 h").click()
    await expect(page.get_by_role("button", name="24 h")).to_have_attribute("aria-pressed", "true")
    assert "minutes=1440" in page.url


async def test_a_chart_says_its_value_under_the_pointer(desk):
    page = await desk.open("/charts")
    plot = page.locator(".plot").nth(1)
    await plot.scroll_into_view_if_needed()

    await plot.hover(position={"x": 200, "y": 60})

    await expect(plot.locator(".tip")).to_contain_text("lag")
    assert (await plot.get_attribute("aria-label") or "").startswith("Lag: lag")


async def test_a_hostile_body_is_shown_and_does_not_run(desk):
    page = await desk.open("/messages?topic=orders&mode=key&key=hostile")

    await expect(page.locator("td.preview")).to_contain_text("<img src=x")
    await page.locator("tbody button").first.click()
    await expect(page.locator("dialog pre")).to_contain_text("<script>")
    await expect(page.locator("main img")).to_have_count(0)
    assert "owned" not in await page.title()


async def test_a_message_is_shown_as_json_text_and_hex_with_what_became_of_it(desk):
    page = await desk.open("/messages?topic=orders")
    await page.locator("tbody button").first.click()
    dialog = page.locator("dialog.panel")

    await expect(dialog.locator("pre")).to_contain_text('"city": "Porto"')
    await dialog.get_by_role("tab", name="Hex").click()
    await expect(dialog.locator("pre")).to_contain_text("00000000  7b 22")
    await dialog.get_by_role("button", name="Where is it now?").click()
    await expect(dialog.locator("table").first).to_contain_text("billing")
    steps = dialog.locator("table[aria-label=Path] tbody tr")
    await expect(steps.first).to_contain_text("sent")
    await expect(steps.nth(1)).to_contain_text("stored")
    await expect(dialog).to_contain_text("orbitmq message track")
    await expect(dialog).to_contain_text("orbitmq message show")
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)


async def test_pages_of_messages_go_on_to_the_end(desk, stage):
    # More than any ceiling there was.
    count = 2_300
    await stage.cluster.create_topic("long")
    for start in range(0, count, 100):
        await stage.producer.send_batch([Message("long", f"{start + n}") for n in range(100)])
    page = await desk.open("/messages?topic=long")
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(50)
    assert await page.locator(".command").inner_text() != ""

    shown = 50
    while shown < count:
        await expect(page.locator("main")).not_to_contain_text("that is all")
        await page.get_by_role("button", name="Show more").click()
        shown = min(shown + 200, count)
        await expect(rows).to_have_count(shown)

    await expect(page.locator("main")).to_contain_text("that is all")
    await expect(page.locator("h2")).to_have_text("2,300 messages")
    texts = await page.locator("td.preview").all_inner_texts()
    assert sorted(map(int, texts)) == list(range(count))
    # The command lists as many as the page does.
    (limit,) = re.findall(r"--limit (\d+)", await page.locator(".command").inner_text())
    assert int(limit) >= count


async def test_new_messages_appear_while_one_watches(desk, stage):
    page = await desk.open("/messages?topic=clicks&mode=tail")
    await expect(page.locator("[data-open=yes]")).to_be_visible()

    # The second one comes after the broker's bounds were read for sure.
    for number in range(3):
        await stage.producer.send("clicks", f"watched {number}".encode())

    await expect(page.locator("td.preview", has_text="watched 2")).to_be_visible()


async def test_a_consumer_tells_its_queues_and_its_stack(desk):
    page = await desk.open("/consumers/fraud-check")
    await page.locator("tbody a.id").click()
    await expect(page.locator("section[aria-label=Queues] tbody tr")).not_to_have_count(0)

    await page.get_by_role("button", name="Ask for its stack").click()

    await expect(page.locator("pre")).to_contain_text("check")
    await expect(page.locator("main")).to_contain_text("--stack")


async def test_topology_draws_who_reads_what(desk, stage):
    # A driver reports again and again, or it counts as lost and has no rate.
    await stage.report(
        "clicks-to-parquet", state="waiting", group=None, topics=["clicks"], output=[], lag={},
        rows_per_second=840.0,
    )  # fmt: skip
    page = await desk.open("/topology")

    for name in ("orders", "billing", "mailer", "clicks-to-parquet"):
        await expect(page.locator(".node text", has_text=name).first).to_be_visible()
    lines = await page.locator(".map path").count()
    assert lines >= 4
    rates = await page.locator(".map text.rate").all_text_contents()
    assert len(rates) == lines
    assert all(re.fullmatch(r"[\d.,]+k?/s|stopped", each) for each in rates), rates
    assert "840/s" in rates
    await expect(page.locator("main")).to_contain_text("not which topics they send to")
    await page.locator(".map a", has_text="mailer").click()
    await expect(page.locator("h1")).to_have_text("mailer")


async def test_a_pipeline_s_report_is_there_without_loading_the_page_again(desk, stage):
    page = await desk.open("/pipelines")
    await page.wait_for_selector("html[data-live]")

    await stage.report("late-comer", state="failed", error="Py4JJavaError: no space left", batch=9)

    row = page.locator("tbody tr", has_text="late-comer")
    await expect(row).to_contain_text("failed")
    await expect(row).to_contain_text("no space left")
    await stage.browser.send("DELETE", "/pipelines/late-comer", None, 204)


async def test_a_pipeline_whose_messages_all_fail_looks_ill_wherever_it_is_shown(desk, stage):
    await stage.report("sour", state="failing", group="billing", done=0, retried=44, dead=6,
                       failed_share=1.0, error="KeyError: 'customer_id'")  # fmt: skip
    try:
        page = await desk.open("/pipelines/sour")
        await expect(page.locator(".fault")).to_contain_text("KeyError: 'customer_id'")
        await expect(page.locator(".fault code")).to_contain_text("orbitmq dlq summary billing")
        await expect(page.locator(".tile", has_text="Failed")).to_contain_text("100 %")
        await expect(page.locator(".tile .bad-text")).to_have_text("100 %")

        page = await desk.open("/pipelines")
        row = page.locator("tbody tr", has_text="sour")
        await expect(row.locator(".tag.bad")).to_have_text("failing")
        await expect(row).to_contain_text("100 %")

        page = await desk.open("/")
        card = page.locator(".fault-card", has_text="sour")
        await expect(card).to_contain_text("44 retried, 6 dead")
        await expect(page.locator("a[href='/pipelines'] .count.bad")).to_be_visible()
    finally:
        await stage.browser.send("DELETE", "/pipelines/sour", None, 204)


async def test_light_and_dark_are_remembered(desk):
    page = await desk.open("/")
    before = await page.evaluate("getComputedStyle(document.body).backgroundColor")

    await page.get_by_role("button", name="Light or dark").click()
    after = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    await page.reload()
    await desk.drawn()

    assert before != after
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == after


async def test_everything_can_be_reached_with_the_keyboard(desk):
    page = await desk.open("/")
    await page.keyboard.press("Tab")
    await expect(page.locator(":focus")).to_have_text("Skip to the content")
    names = []
    for _ in range(20):
        await page.keyboard.press("Tab")
        names.append(await page.evaluate("document.activeElement.textContent"))

    assert any(name.startswith("Topics") for name in names)
    await page.locator("#places a", has_text="Topics").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("Topics")
    unnamed = await page.evaluate(
        """[...document.querySelectorAll("button, a, input, select")].filter((each) =>
            !each.textContent.trim() && !each.ariaLabel && !each.labels?.length).length"""
    )
    assert unnamed == 0


async def test_what_changes_while_one_looks_at_a_group_is_drawn_without_a_complaint(desk, stage):
    """Bars have widths, and the page's policy lets nobody set a style as an attribute."""
    await stage.world.admin.groups.create("bars")
    for number in range(2):
        await stage.world.report(Queue("clicks", "broker-a", number), 0, "bars")
    page = await desk.open("/groups/bars")
    bars = page.locator("section[aria-label=Queues] .bar span")
    await expect(bars).to_have_count(4)
    before = [await each.get_attribute("style") for each in await bars.all()]

    await stage.world.fill(Queue("clicks", "broker-a", 1), 200)
    await stage.looked()

    await expect(bars.nth(0)).not_to_have_attribute("style", before[0] or "")
    assert desk.errors == []


async def test_a_row_opens_beside_the_list_and_the_arrows_go_on(desk, stage):
    await stage.cluster.create_topic("shop")
    for number in range(4):
        body = f'{{"cents": {number * 500}, "customer": {{"country": "CH"}}}}'
        await stage.producer.send("shop", body.encode(), keys=f"o-{number}")
    page = await desk.open("/messages?topic=shop")
    await expect(page.locator("tbody tr")).to_have_count(4)
    # To the millisecond, and strictly the newest first.
    times = await page.locator("tbody td:first-child").all_inner_texts()
    assert all(re.fullmatch(r"[\d:]{8}\.\d{3}", each.strip()) for each in times), times
    assert times == sorted(times, reverse=True)

    await page.locator("tbody td.preview").first.click()
    panel = page.locator("dialog.panel")
    await expect(panel.locator("pre")).to_contain_text('"cents": 1500')
    await page.keyboard.press("ArrowDown")
    await expect(panel.locator("pre")).to_contain_text('"cents": 1000')
    await page.keyboard.press("Escape")

    where = page.get_by_label("Fields of the body")
    await where.fill('cents > 800 and customer.country = "CH"')
    await page.get_by_role("button", name="Show", exact=True).click()
    await expect(page.locator("h2").first).to_have_text("2 messages of 4 looked at")
    await page.reload()
    await desk.drawn()
    await expect(page.locator("tbody tr")).to_have_count(2)


async def test_dead_letters_have_one_number_on_badge_tile_group_and_piles(desk):
    page = await desk.open("/")
    badge = await page.locator("a[href='/dead-letters'] .count").inner_text()
    await expect(page.locator("a.tile", has_text="Dead letters").locator(".value")).to_have_text(
        badge
    )
    row = page.locator("section[aria-label='Open dead letters'] tbody tr", has_text="billing")
    await expect(row.locator("td").last).to_have_text(badge)

    await page.goto(desk.url + "/groups/billing")
    tile = page.locator(".tile", has_text="Dead letters")
    await expect(tile.locator(".value")).to_have_text(badge)
    await page.goto(desk.url + "/dead-letters/billing")
    await expect(page.locator(".head b")).to_have_text(badge)
    await expect(page.locator(".pile").first).to_be_visible()
    piles = await page.locator(".pile .many").all_inner_texts()
    assert sum(int(each) for each in piles) == int(badge)


async def test_a_pipeline_that_stopped_looks_stopped(desk, stage):
    await stage.report("ended", state="running")
    page = await desk.open("/pipelines/ended")
    await stage.looked()
    await stage.report("ended", state="stopped", topics=[], output=[], lag={})
    try:
        rows = page.locator(".tile", has=page.get_by_text("Rows", exact=True))
        await expect(rows.locator(".value")).to_have_text("\u2013")
        await expect(page.locator("main")).to_contain_text("orders@broker-a:0")
        await expect(page.locator("main")).to_contain_text("orders-by-city")
        page = await desk.open("/topology")
        await expect(page.locator(".node.idle", has_text="ended")).to_be_visible()
    finally:
        await stage.browser.send("DELETE", "/pipelines/ended", None, 204)


CUT = """[...document.querySelectorAll("main td.n, main .value, main .many, .count")]
    .filter((each) => each.getClientRects().length && getComputedStyle(each).display !== "inline"
        && each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"""


@pytest.mark.parametrize("viewport", [{"width": 1400, "height": 900}, PHONE])
async def test_no_number_is_cut_off_and_nothing_moves_while_it_loads(browser, stage, viewport):
    async with watched(browser, stage.url, viewport=viewport) as screen:
        await screen.page.add_init_script(
            """window.moved = 0; new PerformanceObserver((list) => {
                for (const each of list.getEntries()) if (!each.hadRecentInput) moved += each.value;
            }).observe({ type: "layout-shift", buffered: true });"""
        )
        member = await stage.member("mailer")
        for path in VIEWS:
            page = await screen.open(path.format(member=member))
            assert await page.evaluate(CUT) == [], path
            assert await page.evaluate("window.moved") < 0.1, path


async def test_a_dialog_covers_the_page_to_its_edges(desk):
    page = await desk.open("/topics")
    await page.get_by_role("button", name="New topic").click()

    gutter = await page.evaluate("getComputedStyle(document.documentElement).scrollbarGutter")

    # A reserved gutter is not covered by a backdrop.
    assert gutter == "auto"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_stand_out_from_what_is_behind_them(browser, stage, scheme):
    """At least 4.5 to 1, as WCAG 2.2 asks for in AA."""
    async with watched(browser, stage.url, viewport=DESK, color_scheme=scheme) as screen:
        for path in ("/", "/groups/mailer", "/messages?topic=orders", "/dead-letters/billing"):
            page = await screen.open(path)
            assert await page.evaluate(CONTRAST) == [], path


CONTRAST = """(() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (text) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = rgba(getComputedStyle(node).backgroundColor);
            if (colour[3] > 250) return colour;
        }
        return [255, 255, 255, 255];
    };
    const light = (colour) => colour.slice(0, 3).map((each) => each / 255)
        .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
        .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
    const seen = [...document.querySelectorAll("main *, .side *")].filter((each) =>
        [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
        && each.getClientRects().length && !each.closest("svg, [disabled], [aria-disabled]"));
    return [...new Set(seen.map((each) => {
        const [text, ground] = [light(rgba(getComputedStyle(each).color)), light(behind(each))];
        const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
        const what = `${each.className} ${each.textContent.slice(0, 20)} ${ratio.toFixed(2)}`;
        return ratio < 4.5 ? what : null;
    }).filter(Boolean))];
})()"""
