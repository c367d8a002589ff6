"""A test message through the page's interface."""

from __future__ import annotations

import base64
from typing import Any


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


async def test_what_cannot_be_sent_is_refused(desk):
    cases: list[Any] = [
        {"topic": "no spaces", "body": "x"},
        {"topic": "orders", "body_base64": "!"},
        {"topic": "orders", "body": "x", "queue": "nonsense"},
        {"topic": "orders", "body": "x", "properties": {"a": 1}},
        {"body": "x"},
    ]
    for draft in cases:
        assert (await desk.browser.post("/send", draft, 400))["error"]
    assert desk.cluster.messages("orders") == []
