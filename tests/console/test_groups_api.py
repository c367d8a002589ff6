"""Groups through the page's interface: lag in messages and seconds, owners, members, findings."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from orbitmq.client.routes import Queue
from orbitmq.wire.bodies import ProcessQueueInfo

QUEUE = Queue("orders", "broker-a", 1)


async def test_lag_is_shown_in_messages_and_seconds_and_as_a_fault_with_a_remedy(desk):
    await desk.world.admin.groups.create("billing")
    await desk.world.fill(QUEUE, 5)
    await desk.world.report(QUEUE, 2)
    desk.cluster.advance(100.0)
    # The third message was stored three seconds before the clock was moved.
    age = pytest.approx(103.0, abs=3.0)

    rows = await desk.browser.until(
        "/groups?search=billing", lambda found: (found["rows"][0]["lag_seconds"] or 0) > 99
    )
    details = await desk.browser.get("/groups/billing")
    now = await desk.browser.until("/now", lambda found: found["fault_count"])

    (row,) = rows["rows"]
    assert (row["lag"], row["lag_seconds"], row["members"]) == (3, age, 0)
    assert row["pace"] == "nobody consumes"
    places = {(each["broker"], each["id"]): each for each in details["queues"]}
    place = places["broker-a", 1]
    assert (place["lag"], place["lag_seconds"], place["done"], place["end"]) == (3, age, 2, 5)
    assert details["command"] == f"orbitmq group show billing{desk.aim}"
    (kind,) = now["faults"]
    (fault,) = kind["faults"]
    assert kind["kind"] == "nobody consumes"
    assert (fault["subject"], fault["link"]) == ("billing", "/groups/billing")
    assert fault["command"] == f"orbitmq group show billing{desk.aim}"
    assert fault["otherwise_command"] == f"orbitmq group skip billing --dry-run{desk.aim}"
    # The group may belong to a stream, which that command does not move.
    assert "a Spark stream goes on from its checkpoint" in fault["otherwise"]
    assert now["worst"][0]["name"] == now["oldest_group"] == "billing"


@pytest.mark.feature("L6")
async def test_members_that_subscribe_differently_are_both_named(desk):
    await desk.world.consumer("client-1", subscriptions={"orders": "paid"})
    await desk.world.consumer("client-2", subscriptions={"orders": "shipped"})

    def is_looked_into(found):
        # Until then, what the broker itself says stands in.
        return any(each["kind"] == "different subscriptions" for each in found["faults"])

    content = await desk.browser.until("/now", is_looked_into)
    details = await desk.browser.get("/groups/billing")

    (kind,) = content["faults"]
    assert kind["faults"][0]["link"] == "/groups/billing"
    (finding,) = details["findings"]
    assert finding["kind"] == "different subscriptions"
    assert "client-1" in finding["text"]
    assert "client-2" in finding["text"]
    assert "subscribe alike" in finding["remedy"]
    assert finding["command"].startswith("orbitmq group clone billing ")


@pytest.mark.feature("L5")
async def test_a_consumer_tells_what_it_holds_and_its_stack_on_request(desk):
    held = ProcessQueueInfo(cached_msg_count=7, locked=True, last_pull_timestamp=1_700_000_000_000)
    client = "10.0.0.1@17#4"
    await desk.world.consumer(client, owns={QUEUE: held})
    await desk.world.fill(QUEUE, 2)
    path = f"/groups/billing/members/{quote(client, safe='')}"

    info = await desk.browser.get(path)
    with_stack = await desk.browser.get(path + "?stack=1")
    group = await desk.browser.get("/groups/billing")
    gone = await desk.browser.get("/groups/billing/members/nobody", 404)

    (queue,) = info["queues"]
    assert (queue["cached_messages"], queue["is_locked"]) == (7, True)
    assert queue["last_pull_at"] == 1_700_000_000.0
    assert info["stack"] is None
    assert with_stack["stack"] == "main: waiting"
    assert with_stack["command"] == (f"orbitmq group member billing '{client}' --stack{desk.aim}")
    owners = {(each["broker"], each["id"]): each["owner"] for each in group["queues"]}
    assert owners["broker-a", 1] == client
    assert "not online" in gone["error"]


async def test_what_others_want_stands_beside_a_member_s_own_subscriptions(desk):
    await desk.cluster.create_topic("returns")
    await desk.world.consumer("client-1", subscriptions={"orders": "a"})
    await desk.world.consumer("client-2", subscriptions={"orders": "b", "returns": "*"})
    await desk.world.consumer("client-3", subscriptions={"orders": "b"})

    def is_told(found):
        return len([each for each in found["subscriptions"] if each["others"]]) == 2

    first = await desk.browser.until("/groups/billing/members/client-1", is_told)
    second = await desk.browser.until("/groups/billing/members/client-2", is_told)

    wants = {each["topic"]: each["expression"] for each in first["subscriptions"]}
    assert wants == {"orders": "a", "returns": None}
    others = {each["topic"]: each["others"] for each in first["subscriptions"]}
    assert others["orders"] == [{"clients": ["client-2", "client-3"], "expression": "b"}]
    assert others["returns"] == [{"clients": ["client-2"], "expression": "*"}]
    others = {each["topic"]: each["others"] for each in second["subscriptions"]}
    assert others["orders"] == [{"clients": ["client-1"], "expression": "a"}]
    assert others["returns"] == [{"clients": ["client-1", "client-3"], "expression": None}]


async def test_lag_of_a_group_that_never_reported_is_seen(desk):
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await desk.world.fill(QUEUE, 6)

    rows = await desk.browser.until(
        "/groups?search=billing", lambda found: found["rows"] and found["rows"][0]["lag"] == 6
    )

    assert rows["rows"][0]["members"] == 1


async def test_a_group_is_paused_and_resumed(desk):
    page = desk.browser
    await desk.world.admin.groups.create("billing")

    await page.post("/groups/billing/pause")
    paused = await page.until("/groups", lambda found: found["rows"][0]["pace"] == "paused")
    await page.post("/groups/billing/resume")
    await page.until("/groups", lambda found: found["rows"][0]["pace"] != "paused")
    await page.post("/groups/nobody/pause", None, 404)

    assert paused["total"] == 1
    lines = [line["command"] for line in (await page.get("/audit"))["lines"]]
    assert lines == [
        f"orbitmq group resume billing{desk.aim}",
        f"orbitmq group pause billing{desk.aim}",
    ]


async def test_the_heat_map_shows_the_queue_that_stands_still(desk):
    await desk.world.admin.groups.create("billing")
    still, moving = QUEUE, Queue("orders", "broker-b", 0)
    for queue in (still, moving):
        await desk.world.fill(queue, 4)
        await desk.world.report(queue, 0)
    await desk.world.report(moving, 4)

    found = await desk.browser.until(
        "/groups/billing/heat",
        lambda found: found["times"] and sorted(row[-1] for row in found["lags"]) == [0, 0, 0, 4],
    )

    lags = dict(zip(found["queues"], found["lags"], strict=True))
    assert lags[str(still)][-1] == 4
    assert lags[str(moving)][-1] == 0
