"""Topics and test messages through the page's interface."""

from __future__ import annotations

import base64

import pytest

from orbitmq.client.routes import Queue


async def test_a_topic_is_made_changed_and_deleted_with_an_audit_line_each(desk):
    page = desk.browser
    made = await page.post("/topics", {"name": "payments", "queues": 3})
    assert made["command"] == f"orbitmq topic create payments --queues 3{desk.aim}"
    shown = await page.until("/topics?search=payments", lambda found: found["total"] == 1)
    assert shown["rows"][0]["queues"] == 6

    await page.send("PATCH", "/topics/payments", {"write_queues": 1, "permission": "r"})
    changed = await page.get("/topics/payments")
    assert {(each["write_queues"], each["read_queues"]) for each in changed["brokers"]} == {(1, 3)}
    assert changed["permission"] == "r"

    await page.send("DELETE", "/topics/payments")
    await page.get("/topics/payments", 404)
    await page.until("/topics?search=payments", lambda found: found["total"] == 0)
    commands = [line["command"] for line in (await page.get("/audit"))["lines"]]
    assert commands == [
        f"orbitmq topic delete payments{desk.aim}",
        f"orbitmq topic update payments --write-queues 1 --permission r{desk.aim}",
        f"orbitmq topic create payments --queues 3{desk.aim}",
    ]


async def test_the_order_of_a_topic_is_kept_and_given_up_again(desk):
    page = desk.browser
    for wanted, flag in ((True, "--ordered"), (False, "--unordered")):
        told = await page.send("PATCH", "/topics/orders", {"ordered": wanted})
        assert told["command"] == f"orbitmq topic update orders {flag}{desk.aim}"
        assert (await page.get("/topics/orders"))["is_ordered"] is wanted

    # What is not given stays.
    await page.send("PATCH", "/topics/orders", {"ordered": True})
    told = await page.send("PATCH", "/topics/orders", {"queues": 3})

    assert told["command"] == f"orbitmq topic update orders --queues 3{desk.aim}"
    assert (await page.get("/topics/orders"))["is_ordered"] is True


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"name": "no spaces"}, "letters"),
        ({"name": "t", "queues": 0}, "queues"),
        ({"name": "t", "permission": "x"}, "permission"),
        ({"name": "t", "queues": "many"}, "int"),
        ({"name": "t", "nonsense": 1}, "nonsense"),
        ({"name": "TBW102"}, "system"),
    ],
)
async def test_an_impossible_topic_is_refused(desk, content, named):
    assert named in (await desk.browser.post("/topics", content, 400))["error"]


async def test_a_list_is_searched_sorted_and_cut(desk):
    page = desk.browser
    for number in range(5):
        await desk.cluster.create_topic(f"stock-{number}", queues=number + 1)
    await page.until("/topics?search=stock", lambda found: found["total"] == 5)

    window = await page.get("/topics?search=STOCK&sort=-queues&from=1&count=2")
    own = await page.get("/topics?filter=own&sort=name")
    system = await page.get("/topics?filter=system")

    assert [row["name"] for row in window["rows"]] == ["stock-3", "stock-2"]
    assert window["total"] == 5
    assert [row["name"] for row in own["rows"]] == ["orders", *(f"stock-{n}" for n in range(5))]
    assert "TBW102" in [row["name"] for row in system["rows"]]
    for query in ("sort=body", "from=-1", "count=100000", "count=x"):
        await page.get(f"/topics?{query}", 400)


async def test_a_topic_shows_its_queues_and_who_reads_it(desk):
    queue = Queue("orders", "broker-b", 1)
    await desk.world.fill(queue, 5)
    await desk.world.admin.groups.create("billing")
    await desk.world.report(queue, 2)
    await desk.browser.until("/groups?search=billing", lambda found: found["rows"][0]["lag"] == 3)

    found = await desk.browser.get("/topics/orders")

    places = {f"{each['broker']}:{each['id']}": each["messages"] for each in found["queues"]}
    assert places == {"broker-a:0": 0, "broker-a:1": 0, "broker-b:0": 0, "broker-b:1": 5}
    (group,) = found["groups"]
    assert (group["name"], group["lag"]) == ("billing", 3)
    assert found["last_stored_at"] - found["first_stored_at"] == pytest.approx(4.0, abs=1.0)


async def test_the_list_says_how_long_messages_are_kept(desk):
    queue = Queue("orders", "broker-a", 0)
    await desk.world.send(queue, b"first")
    desk.cluster.advance(3600.0)
    await desk.world.send(Queue("orders", "broker-b", 1), b"last")

    found = await desk.browser.until(
        "/topics?search=orders&sort=-span", lambda found: (found["rows"][0]["span"] or 0) >= 3600
    )

    (row,) = found["rows"]
    assert row["last_stored_at"] - row["first_stored_at"] == row["span"]
    assert row["span"] < 3700


async def test_a_message_lands_where_it_is_said_to(desk):
    draft = {
        "topic": "orders",
        "body": "hello",
        "tags": "paid",
        "keys": ["o-1", "o-2"],
        "properties": {"city": "Porto"},
    }
    sent = await desk.browser.post("/send", draft)

    (stored,) = desk.cluster.messages("orders")
    assert stored.body == b"hello"
    assert (stored.tags, stored.keys) == ("paid", "o-1 o-2")
    assert stored.get_property("city") == "Porto"
    assert (sent["queue"], sent["offset"]) == (stored.queue_id, stored.queue_offset)
    assert sent["id"] == stored.msg_id
    found = await desk.browser.get(f"/messages/one?id={sent['offset_id']}")
    assert found["preview"] == "hello"
    (line,) = (await desk.browser.get("/audit"))["lines"]
    assert "hello" not in line["command"] + line["outcome"]


async def test_bytes_and_a_queue_can_be_given(desk):
    body = base64.b64encode(b"\x00\xff").decode()

    sent = await desk.browser.post(
        "/send", {"topic": "orders", "body_base64": body, "queue": "broker-b:1"}
    )

    (stored,) = desk.cluster.messages("orders")
    assert stored.body == b"\x00\xff"
    assert (sent["broker"], sent["queue"]) == ("broker-b", 1)


async def test_a_delayed_message_comes_later(desk):
    await desk.browser.post("/send", {"topic": "orders", "body": "later", "delay": 3600})
    assert desk.cluster.messages("orders") == []

    desk.cluster.advance(3700.0)
    await desk.browser.until(
        "/topics?search=orders", lambda found: found["rows"][0]["messages"] == 1
    )


@pytest.mark.parametrize(
    "draft",
    [
        {"topic": "no spaces", "body": "x"},
        {"topic": "orders", "body_base64": "!"},
        {"topic": "orders", "body": "x", "queue": "nonsense"},
        {"topic": "orders", "body": "x", "properties": {"a": 1}},
        {"body": "x"},
    ],
)
async def test_an_impossible_message_is_refused(desk, draft):
    assert (await desk.browser.post("/send", draft, 400))["error"]
    assert desk.cluster.messages("orders") == []
