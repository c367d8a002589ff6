"""Messages through the page's interface: found, paged, followed."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

from orbitmq.client.routes import Queue
from orbitmq.console.api import messages
from tests.support.consoles import HOSTILE, Browser
from tests.support.consuming import until

QUEUE = Queue("orders", "broker-a", 0)
OTHER = Queue("orders", "broker-b", 1)


async def pages(browser: Browser, **query: object) -> list[list[str]]:
    """The previews of all pages, by cursor."""
    found, cursor = [], None
    while True:
        wanted = {"topic": "orders", **query} | ({"cursor": cursor} if cursor else {})
        page = await browser.get("/messages?" + urlencode(wanted))
        found.append([row["preview"] for row in page["rows"]])
        cursor = page["cursor"]
        if cursor is None:
            return found


async def test_messages_are_found_by_place_time_key_and_id(desk):
    stored = await desk.world.fill(QUEUE, 10)
    page = desk.browser
    third = stored[3]

    by_offset = await pages(page, queue="broker-a:0", offset=7, count=2)
    backwards = await pages(page, queue="broker-a:0", offset=2, newest=1)
    by_time = await pages(page, since=third.stored_at, until=stored[5].stored_at)
    by_key = await pages(page, key="m-3")
    by_place = await page.get(f"/messages/one?id={third.offset_id}")

    assert by_offset == [["m7", "m8"], ["m9"]]
    assert backwards == [["m2", "m1", "m0"]]
    assert by_time == [["m3", "m4"]]
    assert by_key == [["m3"]]
    assert by_place["offset"] == 3
    assert by_place["forms"]["text"] == "m3"
    assert "json" not in by_place["forms"]
    assert by_place["forms"]["hex"].startswith("00000000  6d 33")


async def test_pages_neither_overlap_nor_miss_what_arrives_in_between(desk):
    await desk.world.fill(QUEUE, 7, name="a")
    await desk.world.fill(OTHER, 7, name="b")
    first = await desk.browser.get("/messages?topic=orders&count=5&newest=1")
    await desk.world.fill(QUEUE, 3, name="late")

    seen = [row["preview"] for row in first["rows"]]
    cursor = first["cursor"]
    while cursor:
        page = await desk.browser.get(f"/messages?topic=orders&count=5&cursor={quote(cursor)}")
        seen += [row["preview"] for row in page["rows"]]
        cursor = page["cursor"]

    assert sorted(seen) == sorted(f"{name}{number}" for name in "ab" for number in range(7))


async def test_one_key_on_many_messages_of_one_moment_is_paged_completely(desk):
    for number in range(90):
        await desk.world.send(QUEUE, f"same {number}".encode(), KEYS="same")

    found = await pages(desk.browser, key="same", count=20)

    assert [len(part) for part in found] == [20, 20, 20, 20, 10]
    assert len({body for part in found for body in part}) == 90


async def test_what_cannot_be_found_is_said_in_words(desk):
    cases: list[Any] = [
        ("topic=", 400),
        ("topic=nowhere", 404),
        ("topic=orders&cursor=nonsense", 400),
        ("topic=orders&key=k&cursor=nonsense", 400),
        ("topic=orders&queue=broker-a:9&offset=0", 400),
        ("topic=orders&queue=broker-a:0&offset=5", 400),
        ("topic=orders&queue=nonsense", 404),
        ("topic=orders&since=yesterday", 400),
        ("topic=orders&expression=a&type=LUCENE", 400),
        ("topic=orders&count=0", 400),
    ]
    for query, status in cases:
        assert len((await desk.browser.get(f"/messages?{query}", status))["error"]) > 10


async def test_a_body_is_never_anything_that_runs(desk):
    sent = await desk.world.send(QUEUE, HOSTILE.encode(), KEYS="evil")

    page = await desk.browser.ask("GET", f"/messages?topic=orders&id={sent.msg_id}&mode=id")
    raw = await desk.browser.ask("GET", f"/api/v1/messages/body?id={sent.msg_id}")
    shown = await desk.browser.get(f"/messages/one?id={sent.msg_id}")

    assert HOSTILE.encode() not in page.body
    assert raw.body == HOSTILE.encode()
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.headers["content-disposition"].startswith("attachment")
    assert raw.headers["content-security-policy"].startswith("sandbox")
    assert shown["forms"]["text"] == HOSTILE


async def test_binary_bodies_are_shown_as_hex_and_json_as_json(desk):
    binary = await desk.world.send(QUEUE, bytes(range(256)))
    document = await desk.world.send(QUEUE, b'{"a":[1,2]}')

    as_hex = await desk.browser.get(f"/messages/one?id={binary.msg_id}")
    as_json = await desk.browser.get(f"/messages/one?id={document.msg_id}")

    assert list(as_hex["forms"]) == ["hex"]
    assert as_hex["preview"].startswith("00 01 02")
    assert json.loads(as_json["forms"]["json"]) == {"a": [1, 2]}
    assert "\n" in as_json["forms"]["json"]


async def test_what_became_of_a_message_is_told_for_every_group(desk):
    await desk.world.admin.groups.create("billing")
    sent = await desk.world.send(QUEUE, b"one", UNIQ_KEY="7F00000100000000000000000000AA01")
    await desk.world.report(QUEUE, 1)
    await desk.world.die(QUEUE, b"two", "broken", UNIQ_KEY="7F00000100000000000000000000AA02")

    done = await desk.browser.get(f"/messages/track?id={sent.msg_id}")
    dead = await desk.browser.get(
        "/messages/track?topic=orders&id=7F00000100000000000000000000AA02"
    )

    assert [(each["group"], each["fate"]) for each in done["tracks"]] == [("billing", "consumed")]
    (track,) = dead["tracks"]
    assert track["fate"] == "dead"
    assert track["copy"]["topic"] == "%DLQ%billing"


def told(said: bytes) -> list[dict[str, Any]]:
    """The events in the bytes of a stream."""
    lines = [line for line in said.decode().splitlines(keepends=True) if line.endswith("\n")]
    kinds = [line[7:].strip() for line in lines if line.startswith("event: ")]
    contents = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    return [{"kind": kind} | each for kind, each in zip(kinds, contents, strict=False)]


async def test_messages_are_followed_as_they_arrive(desk):
    await desk.world.fill(QUEUE, 2, name="old")
    async with desk.browser.listening("/messages/tail?topic=orders") as until_said:
        await until_said(b"event: command")
        await desk.world.fill(OTHER, 3, name="new")
        command, *arrived = told(await until_said(b'"preview":"new2"'))

    assert command == {"kind": "command", "command": f"orbitmq consume orders --follow{desk.aim}"}
    assert [each["preview"] for each in arrived][:2] == ["new0", "new1"]
    await desk.browser.get("/messages/tail?topic=nowhere", 404)


async def test_a_bounded_number_of_pages_follow_topics_at_a_time(desk, monkeypatch):
    monkeypatch.setattr(messages, "MOST_TAILS", 1)
    state = desk.browser.console.state
    async with desk.browser.listening("/messages/tail?topic=orders") as first:
        await first(b"event: command")
        async with desk.browser.listening("/messages/tail?topic=orders") as second:
            refused = await second(b"close one")

    assert b"event: refused" in refused
    await until(lambda: state.tails == 0)


async def test_the_path_of_a_message_has_its_times_and_what_clients_traced(desk):
    unique = "7F00000100000000000000000000AA07"
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await desk.world.die(QUEUE, b"two", "broken", UNIQ_KEY=unique, traceparent="00-abc-def-01")
    now = desk.cluster.clock.now()

    def millis(later):
        return str(int((now + later) * 1000))

    traced = "".join(
        "\x01".join(fields) + "\x02"
        for fields in (
            ("Pub", millis(0), "r", "shop", "orders", unique, "", "", "h", "3", "12", "0", "o",
             "true"),
            ("SubBefore", millis(1), "r", "billing", "q1", unique, "0", "k"),
            ("SubAfter", "q1", unique, "250", "false", "k", "1", millis(1.25), "billing"),
            ("SubBefore", "nonsense"),
            ("SubAfter", "q9", "another", "1", "true", "k", "0"),
        )
    )  # fmt: skip
    await desk.world.send(Queue("RMQ_SYS_TRACE_TOPIC", "broker-a", 0), traced.encode(), KEYS=unique)

    found = await desk.browser.get(f"/messages/track?topic=orders&id={unique}")

    steps = [(step["what"], step["group"], step["took"]) for step in found["path"]]
    assert ("send began", None, 0.012) in steps
    assert ("given to a handler, attempt 1", "billing", None) in steps
    assert ("handler failed", "billing", 0.25) in steps
    assert [step["what"].split(",")[0] for step in found["path"]][:2] == ["sent", "stored"]
    assert any(what.startswith("dead letter") for what, _, _ in steps)
    times = [step["at"] for step in found["path"]]
    assert times == sorted(times)
    assert found["trace"] == "00-abc-def-01"
    assert found["command"].startswith("orbitmq message track ")


async def test_changes_are_pushed_to_open_pages(desk):
    async with desk.browser.listening("/events") as until_said:
        await desk.browser.post("/pipelines/q", {"state": "running", "batch": 7}, 204)
        await until_said(b"event: pipeline")
        said = told(await until_said(b"event: sample") + b"\n")

    assert [each["batch"] for each in said if each["kind"] == "pipeline"] == [7]
