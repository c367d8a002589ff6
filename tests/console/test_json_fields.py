"""The fields of the API's answers are promised: the page and programs read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orbitmq.client.routes import Queue

PROMISED = Path(__file__).parents[1] / "data" / "console-json-fields.txt"
QUEUE = Queue("orders", "broker-a", 0)
#: Fields whose keys are data.
MAPS = {"counts", "forms", "lag", "named", "properties", "series", "topics", "unread_by_queue"}
ADDRESSES = (
    "/me",
    "/clusters",
    "/now",
    "/faults",
    "/audit",
    "/topics",
    "/topics/orders",
    "/groups",
    "/groups/billing",
    "/groups/billing/heat",
    "/groups/billing/members/{client}",
    "/messages?topic=orders",
    "/messages/one?id={message}",
    "/messages/track?id={message}",
    "/dead-letters",
    "/dead-letters/billing",
    "/dead-letters/billing/letters",
    "/replays",
    "/replays/{replay}",
    "/charts?series=cluster/lag",
    "/topology",
    "/pipelines",
    "/pipelines/city",
)


def fields(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields; those of rows are the same for all."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"{path}.{name}"
            if name not in MAPS or isinstance(each, list):
                yield from fields(each, f"{path}.{name}")
            elif each and isinstance(each, dict):
                yield from fields(next(iter(each.values())), f"{path}.{name}.*")
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, f"{path}[]")


async def test_no_promised_field_is_renamed_or_removed(desk):
    page, world = desk.browser, desk.world
    await world.consumer("client-1", subscriptions={"orders": "*"})
    await world.fill(QUEUE, 3)
    await world.report(QUEUE, 1)
    sent = await world.send(QUEUE, b'{"a": 1}', KEYS="k", UNIQ_KEY="7F0000010000AA01" * 2)
    await world.die(QUEUE, b"x", "KeyError", KEYS="d", UNIQ_KEY="7F0000010000AA02" * 2)
    await page.post("/pipelines/city", {"state": "running", "lag": {"orders@broker-a:0": 1}}, 204)
    await page.post("/topics", {"name": "made", "queues": 1})
    begun = await page.post("/dead-letters/billing/replay", {}, 202)
    await page.until(f"/replays/{begun['id']}", lambda found: not found["is_running"])
    move = {"action": "reset", "group": "billing", "topic": "orders", "to": "begin"}
    plan = await page.post("/progress/plan", move)
    await page.until("/groups/billing", lambda found: found["sample"] and found["members"])
    await page.until("/now", lambda found: found["dying"] and found["worst"] and found["faults"])

    known = {"client": "client-1", "message": sent.msg_id, "replay": begun["id"]}
    answers = {each: await page.get(each.format(**known)) for each in ADDRESSES}
    answers["/progress/plan"] = plan
    answers["/progress/apply"] = await page.post("/progress/apply", {"plan": plan["plan"]})
    answers["/send"] = await page.post("/send", {"topic": "orders", "body": "b"})
    found = {
        f"{address.partition('?')[0]} {path}"
        for address, answer in answers.items()
        for path in fields(answer)
    }

    assert found == set(PROMISED.read_text().splitlines())
