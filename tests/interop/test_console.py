"""The console against Apache's brokers, of both lines."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.message import ReceivedMessage
from orbitmq.console.app import Console
from tests.interop.apache import Broker
from tests.support.client import quick_settings
from tests.support.consoles import Browser, settings_for

if TYPE_CHECKING:
    pass

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def broker(release, name_server, tmp_path_factory):
    home = tmp_path_factory.mktemp("console-broker")
    with Broker.running(release, home, name_server.address) as running:
        yield running


@pytest.fixture
async def page(name_server, broker):
    async with Console(settings_for(name_server.address, every=0.3)) as console:
        browser = Browser(console)
        await browser.begin()
        await browser.until("/now", lambda content: content["at"])
        yield browser


async def test_a_topic_a_message_a_group_and_its_progress(page, name_server):
    await page.post("/topics", {"name": "console-orders", "queues": 2})
    for number in range(6):
        draft = {"topic": "console-orders", "body": f"order {number}", "keys": [f"o-{number}"]}
        sent = await page.post("/send", draft)
    consumer = AsyncConsumer(
        "console-billing", client=quick_settings(name_server.address), consume_from="first"
    )

    @consumer.on("console-orders")
    async def bill(message: ReceivedMessage) -> None:
        if message.text() == "order 5":
            raise DeadLetter("ValueError: five")

    async with consumer:
        await page.until(
            "/groups?search=console-billing",
            lambda found: found["rows"][0]["members"] == 1 and found["rows"][0]["lag"] == 0,
        )
        member = quote(consumer.client_id, safe="")
        running = await page.get(f"/groups/console-billing/members/{member}?stack=1")
        await page.until(
            "/dead-letters", lambda found: found["rows"][0]["name"] == "console-billing"
        )
    details = await page.get("/topics/console-orders")
    found = await page.get("/messages?topic=console-orders&key=o-5")
    tracked = await page.get(f"/messages/track?id={sent['offset_id']}")
    browsed = await page.get("/messages?topic=console-orders&newest=1&count=3")
    piles = await page.get("/dead-letters/console-billing")

    assert details["messages"] == 6
    assert [group["name"] for group in details["groups"]] == ["console-billing"]
    assert found["rows"][0]["preview"] == "order 5"
    assert [track["fate"] for track in tracked["tracks"]] == ["dead"]
    assert len(browsed["rows"]) == 3
    assert browsed["cursor"]
    assert sum(queue["topic"] == "console-orders" for queue in running["queues"]) == 2
    assert running["stack"] is not None
    assert piles["count"] == 1


async def test_progress_is_moved_and_lag_is_seen_in_messages_and_seconds(page, name_server):
    await page.post("/topics", {"name": "console-reset", "queues": 1})
    for number in range(5):
        await page.post("/send", {"topic": "console-reset", "body": f"{number}"})
    consumer = AsyncConsumer(
        "console-mover", client=quick_settings(name_server.address), consume_from="first"
    )

    @consumer.on("console-reset")
    async def take(_: ReceivedMessage) -> None:
        pass

    async with consumer:
        await page.until(
            "/groups/console-mover", lambda found: found["queues"] and found["lag"] == 0
        )
    wish = {"action": "reset", "group": "console-mover", "topic": "console-reset", "to": "begin"}
    planned = await page.post("/progress/plan", wish)
    done = await page.post("/progress/apply", {"plan": planned["plan"]})
    row = await page.until(
        "/groups?search=console-mover",
        lambda found: (
            found["rows"][0]["lag"] == 5
            and found["rows"][0]["lag_seconds"]
            and found["rows"][0]["members"] == 0
        ),
    )

    assert planned["topics"][0]["replayed"] == 5
    assert done["is_effective"]
    assert 0 < row["rows"][0]["lag_seconds"] < 300


async def test_every_list_and_the_picture_are_answered(page, release):
    for path in ("/now", "/topics", "/groups", "/topology", "/dead-letters", "/faults"):
        await page.get(path)
    broker = (await page.get("/now"))["brokers"][0]

    assert broker["is_up"]
    assert not broker["is_orbitmq"]
    assert broker["version"].startswith(release.version[:3])
