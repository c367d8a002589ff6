"""Every action: done through the page, seen at the brokers, with the command beside it."""

from __future__ import annotations

import pytest
from playwright.async_api import expect
from starlette.routing import Route

from orbitmq.client.errors import TopicNotFound
from orbitmq.client.message import Message
from orbitmq.console.app import PREFIX, api
from tests.browser.chromium import PHONE, watched
from tests.browser.stage import Stage
from tests.support.consoles import console_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PASSWORD = "correct horse battery"  # noqa: S105


async def test_a_topic_is_made_scaled_and_deleted(desk, stage):
    page = await desk.open("/topics")
    await page.get_by_role("button", name="New topic").click()
    dialog = page.locator("dialog")
    await dialog.get_by_label("Name").fill("returns")
    await dialog.get_by_label("Queues to write").fill("2")
    await dialog.get_by_label("Queues to read").fill("2")
    await expect(dialog.locator("code")).to_contain_text("orbitmq topic create returns --queues 2")
    await dialog.get_by_role("button", name="Create").click()
    await expect(page.locator("h1")).to_have_text("returns")
    assert (await stage.world.admin.topics.get("returns")).write_queues == 4

    for flag, is_ordered in (("--ordered", True), ("--unordered", False)):
        await page.get_by_role("button", name="Change").click()
        await expect(dialog.locator(".command")).not_to_contain_text("ordered")
        await dialog.get_by_label("keep the order").set_checked(is_ordered)
        await expect(dialog.locator(".command")).to_contain_text(f" {flag} ")
        await dialog.get_by_role("button", name="Change").click()
        await expect(dialog).to_have_count(0)
        topic = await stage.world.admin.topics.get("returns")
        assert topic.is_ordered is is_ordered
        # The next dialog begins with what the page shows.
        head = page.locator(".head")
        if is_ordered:
            await expect(head).to_contain_text(", ordered")
        else:
            await expect(head).not_to_contain_text(", ordered")

    await page.get_by_role("button", name="Change").click()
    await dialog.get_by_label("Queues to write").fill("5")
    await dialog.get_by_label("Queues to read").fill("5")
    await dialog.get_by_label("Permission").select_option("r")
    await expect(dialog.locator(".command")).to_contain_text(
        f"orbitmq topic update returns --queues 5 --permission r --name-server {name_server(stage)}"
    )
    await dialog.get_by_role("button", name="Change").click()
    await expect(page.locator(".head")).to_contain_text("10 queues")
    changed = await stage.world.admin.topics.get("returns")
    assert {part.permission.letters for part in changed.brokers} == {"r"}

    await page.get_by_role("button", name="Delete").click()
    sure = dialog.get_by_role("button", name="Delete for good")
    await expect(sure).to_be_disabled()
    await expect(dialog.locator(".command")).to_contain_text("orbitmq topic delete returns")
    await dialog.get_by_label("Type the name").fill("returns")
    await sure.click()
    await expect(page.locator("h1")).to_have_text("Topics")
    with pytest.raises(TopicNotFound):
        await stage.world.admin.topics.get("returns")


def name_server(stage: Stage) -> str:
    return stage.cluster.name_server


async def test_progress_is_planned_then_moved_and_read_back(desk, stage):
    page = await desk.open("/progress?group=archive&topic=clicks&to=end")
    before = sum(stage.cluster.progress("archive", "clicks").values())

    await page.get_by_role("button", name="Plan").click()
    plan = page.locator("section", has_text="nothing is changed yet")
    await expect(plan.locator("tbody tr")).to_have_count(8)
    await expect(plan).to_contain_text("orbitmq group reset archive clicks --to latest")
    assert sum(stage.cluster.progress("archive", "clicks").values()) == before
    await page.get_by_role("button", name="Do this").click()

    done = page.locator("section", has_text="Done, and read back")
    await expect(done.locator("tbody tr")).to_have_count(8)
    await expect(done.locator("tbody tr").first).to_contain_text("as wanted")
    await expect(page.locator("section", has_text="What was done here")).to_contain_text(
        "8 queues read back"
    )
    assert sum(stage.cluster.progress("archive", "clicks").values()) > before


async def test_dead_letters_are_sampled_resent_and_saved(desk, stage):
    page = await desk.open("/dead-letters/billing")
    pile = page.locator(".pile").first
    reason = await pile.locator(".why").inner_text()
    await pile.get_by_role("button", name="Look at them").click()
    dialog = page.locator("dialog")
    await expect(dialog.locator("tbody tr").first).to_contain_text("order-")
    await expect(dialog.locator(".command")).to_contain_text("orbitmq dlq list billing --pile")
    await page.keyboard.press("Escape")

    await pile.get_by_role("button", name="Open in a notebook").click()
    await expect(dialog.locator("pre")).to_contain_text("dead_letters(spark, 'billing'")
    await expect(dialog.locator("pre")).to_contain_text(reason.split("'")[0])
    await expect(dialog.locator(".command")).to_contain_text("orbitmq dlq list billing --pile")
    await page.keyboard.press("Escape")

    await pile.get_by_role("button", name="Resend 10").click()
    await dialog.get_by_role("button", name="Dry run").click()
    await expect(page.locator("[data-replay=over]")).to_have_text("10 would be sent")

    before = len(stage.cluster.messages("%RETRY%billing"))
    await pile.get_by_role("button", name="Resend 10").click()
    await expect(dialog.locator("code")).to_contain_text("orbitmq dlq resend billing --pile")
    await dialog.get_by_role("button", name="Resend", exact=True).click()
    await expect(page.locator("[data-replay=over]")).to_have_text("10 sent")
    outcomes = page.locator("table[aria-label=Outcomes] tbody tr")
    await expect(outcomes).to_have_count(10)
    assert len(stage.cluster.messages("%RETRY%billing")) == before + 10

    await pile.get_by_role("button", name="Resend the rest").click()
    await dialog.get_by_label("At most per second").fill("100")
    await dialog.get_by_role("button", name="Resend", exact=True).click()
    await expect(page.locator("[data-replay=over]")).to_contain_text("10 already sent")

    async with page.expect_download() as saving:
        await page.get_by_role("link", name="Save as Parquet").click()
    saved = await (await saving.value).path()
    assert saved.read_bytes().startswith(b"PAR1")


async def test_dead_letters_are_filtered_and_the_chosen_ones_sent_slowly_and_stopped(desk, stage):
    page = await desk.open("/dead-letters/billing")
    dialog = page.locator("dialog")
    await page.get_by_text("Filter by key").click()
    await page.get_by_label("Key").fill("order-21")
    await page.get_by_label("Tried at least").fill("1")
    await page.get_by_label("Died since").fill("2020-01-31T00:00:00")
    await page.get_by_role("button", name="Filter", exact=True).click()
    await expect(page.locator(".pile")).to_have_count(1)
    await expect(page.locator(".head")).to_contain_text("in 1 pile that the filter chooses")
    shown = page.locator("main > .stack > .command").first
    await expect(shown).to_contain_text("--key order-21 --min-attempts 1")
    assert "key=order-21" in page.url
    await page.reload()
    await desk.drawn()
    await expect(page.locator(".pile")).to_have_count(1)
    async with page.expect_download() as saving:
        await page.get_by_role("link", name="Save as JSON lines").click()
    assert len((await (await saving.value).path()).read_bytes().splitlines()) == 1

    await page.get_by_role("button", name="Look at them").click()
    await expect(dialog.locator(".command")).to_contain_text("orbitmq dlq list billing")
    await dialog.get_by_label("Choose order-21").check()
    await dialog.get_by_role("button", name="Resend the chosen").click()
    await expect(dialog.locator("code")).to_contain_text("orbitmq dlq resend billing --id")
    await dialog.get_by_role("button", name="Dry run").click()
    await expect(page.locator("[data-replay=over]")).to_contain_text("1 ")

    await page.get_by_role("button", name="Clear").click()
    await expect(page.locator(".pile")).not_to_have_count(1)
    await page.get_by_role("button", name="Resend all").click()
    await dialog.get_by_label("At most per second").fill("0.2")
    await dialog.get_by_label("also those").check()
    await dialog.get_by_role("button", name="Resend", exact=True).click()
    stop = page.get_by_role("button", name="Stop", exact=True)
    running = page.locator("section[aria-label=Resending]")
    await expect(running.locator(".command")).to_contain_text("orbitmq dlq resend billing")
    assert "Ctrl-C" in (await stop.get_attribute("title") or "")
    await stop.click()
    await expect(page.locator("[data-replay=over]")).to_contain_text("stopped")
    await page.goto(desk.url + "/audit")
    await expect(page.locator("tbody tr").first).to_contain_text("stopped by hand")


async def test_the_newest_messages_are_filtered_with_sql(desk, stage):
    for amount in (5, 50):
        message = Message("clicks", f"sql {amount}", properties={"amount": str(amount)})
        await stage.producer.send(message)
    page = await desk.open("/messages?topic=clicks")
    await page.get_by_label("Filter").fill("amount > 10")
    await page.locator("form select").last.select_option("SQL92")
    await page.get_by_role("button", name="Show", exact=True).click()

    await expect(page.locator("td.preview")).to_have_text(["sql 50"])
    await expect(page.locator(".command")).to_contain_text("--sql 'amount > 10'")
    await page.get_by_label("Which").select_option("tail")
    await page.get_by_role("button", name="Follow").click()
    await expect(page.locator(".command")).to_contain_text("orbitmq consume clicks --follow --sql")


async def test_a_pipeline_is_taken_off_the_list(desk, stage):
    await stage.report("short/lived", state="stopped", batch=3, rows=77, error="it was told to")
    page = await desk.open("/pipelines")
    await page.get_by_role("link", name="short/lived").click()
    await expect(page.locator("h1")).to_have_text("short/lived")
    tiles = page.locator(".tile")
    await expect(tiles.filter(has_text="Batch").first).to_contain_text("77 rows in it")
    await expect(page.locator("main")).to_contain_text("it was told to")
    for text in ("orders@broker-a:0", "reads", "writes", "orders-by-city", "analytics"):
        await expect(page.locator("main")).to_contain_text(text)
    await page.get_by_role("button", name="Take off the list").click()
    dialog = page.locator("dialog")
    await expect(dialog.locator(".command")).to_contain_text(
        f"orbitmq pipeline forget short/lived --console {stage.url}"
    )
    await dialog.get_by_role("button", name="Take it off").click()

    await expect(page.locator("h1")).to_have_text("Spark pipelines")
    await expect(page.locator("tbody tr", has_text="short/lived")).to_have_count(0)


async def test_a_test_message_is_sent_and_followed(desk, stage):
    page = await desk.open("/send?topic=orders")
    await page.get_by_label("Body").fill('{"order": 4711}')
    await page.get_by_label("Tag").fill("paid")
    await page.get_by_label("Keys").fill("order-4711")
    await page.get_by_label("Properties").fill("city=Porto\nlane=fast")
    await expect(page.locator("code")).to_contain_text("orbitmq produce orders")
    await page.get_by_role("button", name="Send", exact=True).click()

    stored = page.locator("section[aria-label=Stored]")
    await expect(stored).to_contain_text("orders")
    consumed = page.locator("section[aria-label='Who consumed it']")
    await expect(consumed).to_contain_text("billing")
    await expect(consumed.locator("tr", has_text="billing")).to_contain_text("consumed")
    (message,) = [each for each in stage.cluster.messages("orders") if each.keys == "order-4711"]
    assert message.get_property("lane") == "fast"


async def test_a_group_is_paused_and_goes_on(desk):
    page = await desk.open("/groups/mailer")
    dialog = page.locator("dialog")
    await page.get_by_role("button", name="Pause").click()
    await expect(dialog.locator("code")).to_contain_text("orbitmq group pause mailer")
    await dialog.get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("button", name="Resume")).to_be_visible()

    await page.get_by_role("button", name="Resume").click()
    await expect(dialog.locator(".command")).to_contain_text("orbitmq group resume mailer")
    await dialog.get_by_role("button", name="Resume").click()

    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    await page.goto(desk.url + "/audit")
    await expect(page.locator("tbody tr").first).to_contain_text("orbitmq group resume mailer")


async def test_without_rights_what_writes_is_disabled_and_says_why_and_what_enables_it(
    browser, stage
):
    async with (
        console_of(stage.cluster, write=False) as console,
        watched(browser, console.url) as desk,
    ):
        await console.post("/pipelines/done", {"state": "stopped"}, 204)
        enabling = f"orbitmq console --write --port 0 --name-server {stage.cluster.name_server}"
        dialog = None
        for path, name, command in (
            ("/topics", "New topic", "orbitmq topic create"),
            ("/topics/orders", "Change", "orbitmq topic update orders"),
            ("/topics/orders", "Delete", "orbitmq topic delete orders"),
            ("/groups/billing", "Pause", "orbitmq group pause billing"),
            ("/dead-letters/billing", "Resend all", "orbitmq dlq resend billing"),
            ("/pipelines/done", "Take off the list", "orbitmq pipeline forget done"),
        ):
            page = await desk.open(path)
            dialog = page.locator("dialog")
            button = page.get_by_role("button", name=name, exact=True)
            await expect(button).to_be_disabled()
            assert enabling in (await button.get_attribute("title") or "")
            # It can be reached, and says so itself.
            await button.focus()
            await page.keyboard.press("Enter")
            await expect(dialog).to_contain_text("This console only shows")
            await expect(dialog.locator("code").first).to_contain_text(command)
            await expect(dialog.locator("code").last).to_contain_text(enabling)
            await page.keyboard.press("Escape")

        page = await desk.open("/dead-letters/billing")
        dialog = page.locator("dialog")
        await page.get_by_role("button", name="Resend all").click(force=True)
        await dialog.get_by_role("button", name="Dry run").click()
        resend = dialog.get_by_role("button", name="Resend", exact=True)
        await expect(resend).to_be_disabled()
        await dialog.get_by_role("button", name="Dry run").click()
        await expect(page.locator("[data-replay=over]")).to_be_visible()
        page = await desk.open("/send?topic=orders")
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
        await expect(page.locator(".read-only code")).to_contain_text(enabling)


async def test_a_decoder_is_chosen_and_a_message_sent_again(desk, stage):
    await stage.cluster.create_topic("packed")
    await stage.producer.send("packed", b"\x81\xa1a\x01", keys="k-1")
    page = await desk.open("/messages?topic=packed")
    dialog = page.locator("dialog")
    await page.get_by_role("button", name="How bodies are read").click()
    await dialog.get_by_label("Format").select_option("avro")
    await dialog.get_by_role("button", name="Read so").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("needs the schema")
    await dialog.get_by_label("Format").select_option("msgpack")
    await dialog.get_by_role("button", name="Read so").click()
    await expect(page.locator("td.preview")).to_have_text('{"a":1}')

    await page.locator("td.preview").click()
    await dialog.get_by_role("button", name="Resend").click()
    again = page.locator("dialog").last
    await expect(again.locator("code")).to_contain_text("orbitmq produce packed")
    await again.get_by_role("button", name="Resend", exact=True).click()

    await expect(page.locator(".toast").last).to_contain_text("Sent to packed")
    bodies = [each.body for each in stage.cluster.messages("packed")]
    assert bodies == [b"\x81\xa1a\x01"] * 2
    # The refusal is noted by the browser itself.
    assert len(desk.errors) == 1
    desk.errors.clear()


async def test_logging_in_and_out(browser, stage, asked):
    async with (
        console_of(stage.cluster, password=PASSWORD) as console,
        watched(browser, console.url, viewport=PHONE, asked=asked) as phone,
    ):
        page = phone.page
        await page.goto(phone.url + "/groups/billing")
        await page.get_by_label("Password").fill("correct horse")
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("alert")).to_have_text("the password is wrong")
        assert await phone.overflow() <= 0

        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.locator("h1")).to_have_text("billing")
        cookies = await page.context.cookies()
        await page.get_by_role("button", name="Menu").click()
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_label("Password")).to_be_visible()

        # The wrong password is noted by the browser itself.
        assert len(phone.errors) == 1
        phone.errors.clear()

    (cookie,) = cookies
    assert cookie.get("httpOnly")
    assert cookie.get("sameSite") == "Strict"


async def test_no_action_was_left_out(request, asked):
    """Every address that changes something was asked by a page, in one of the tests above."""
    ran = {item.name for item in request.session.items if item.path == request.path}
    if not ran >= {name for name in vars(request.module) if name.startswith("test_")}:
        pytest.skip("not all actions were chosen to be tested")
    changing = {
        (method, route.path_regex)
        for route in api.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"GET", "HEAD"}
    }

    left_out = {
        (method, pattern.pattern)
        for method, pattern in changing
        if not any(
            method == done and pattern.match(path.removeprefix(PREFIX)) for done, path in asked
        )
    }

    # A driver reports, not a page; test_roles.py manages users. Silences and tests of webhooks are
    # asked for in tests/console only.
    elsewhere = ("^/access/", "^/password", "^/silences", "^/alerts/")
    left_out = {each for each in left_out if not each[1].startswith(elsewhere)}
    assert left_out == {("POST", "^/pipelines/(?P<name>.*)$")}
