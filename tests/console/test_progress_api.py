"""Moving progress through the page's interface: a plan, then exactly that plan."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from orbitmq.client.routes import Queue

QUEUE = Queue("orders", "broker-a", 0)
ONE = {"queues": ["broker-a:0"]}


@pytest.fixture
async def group(desk):
    """A group at offset 2 of a queue with five messages, a second apart."""
    await desk.world.admin.groups.create("billing")
    await desk.world.fill(QUEUE, 5)
    await desk.world.report(QUEUE, 2)
    return desk


async def test_a_plan_changes_nothing_and_is_then_done_as_shown(group):
    page = group.browser
    wish = {"action": "reset", "group": "billing", "topic": "orders", "to": "begin"}

    planned = await page.post("/progress/plan", wish)
    assert group.world.progress(QUEUE) == 2
    # What was looked at is done, also when things have changed since.
    await group.world.fill(QUEUE, 3)
    done = await page.post("/progress/apply", {"plan": planned["plan"]})

    moves = {(move["broker"], move["id"]): move for move in planned["topics"][0]["moves"]}
    assert (moves["broker-a", 0]["from"], moves["broker-a", 0]["to"]) == (2, 0)
    assert planned["topics"][0]["replayed"] == 2
    assert planned["command"] == f"orbitmq group reset billing orders --to earliest{group.aim}"
    assert done["is_effective"]
    assert {each["read_back"] for each in done["topics"][0]["queues"]} == {0}
    assert group.world.progress(QUEUE) == 0
    (line,) = (await page.get("/audit"))["lines"]
    assert line["command"] == planned["command"]
    assert line["who"] == "127.0.0.1"
    assert "4 queues read back" in line["outcome"]


async def test_a_plan_is_done_once(group):
    wish = {"action": "reset", "group": "billing", "topic": "orders", "to": "end"}
    planned = await group.browser.post("/progress/plan", wish)
    await group.browser.post("/progress/apply", {"plan": planned["plan"]})

    again = await group.browser.post("/progress/apply", {"plan": planned["plan"]}, 404)

    assert "new one" in again["error"]


@pytest.mark.parametrize(
    ("target", "offset", "options"),
    [
        ({"to": "end"}, 5, "--to latest"),
        ({"to": "offset", "number": 4, **ONE}, 4, "--to 4 --queue broker-a:0"),
        ({"to": "shift", "number": -1, **ONE}, 1, "--by -1 --queue broker-a:0"),
        ({"to": "time"}, 3, "--to {time}"),
    ],
)
async def test_progress_is_reset_to_the_target(group, target, offset, options):
    time = group.cluster.messages("orders")[3].stored_at
    draft = {"action": "reset", "group": "billing", "topic": "orders", "time": time} | target

    planned = await group.browser.post("/progress/plan", draft)
    await group.browser.post("/progress/apply", {"plan": planned["plan"]})

    assert group.world.progress(QUEUE) == offset
    moment = datetime.fromtimestamp(time, UTC).astimezone().isoformat()
    command = f"orbitmq group reset billing orders {options.format(time=moment)}{group.aim}"
    assert planned["command"] == command


@pytest.mark.feature("L7")
async def test_a_backlog_is_skipped_and_progress_is_copied(group):
    page = group.browser
    clone = await page.post(
        "/progress/plan", {"action": "clone", "group": "billing-2", "source": "billing"}
    )
    await page.post("/progress/apply", {"plan": clone["plan"]})
    skip = await page.post("/progress/plan", {"action": "skip", "group": "billing"})
    await page.post("/progress/apply", {"plan": skip["plan"]})
    await page.post("/groups/billing/pause")
    await page.until("/groups?sort=name", lambda found: found["rows"][0]["pace"] == "paused")

    assert group.world.progress(QUEUE, "billing-2") == 2
    assert group.world.progress(QUEUE, "billing") == 5
    assert skip["topics"][0]["skipped"] == 3
    assert clone["command"] == f"orbitmq group clone billing billing-2{group.aim}"
    assert skip["command"] == f"orbitmq group skip billing{group.aim}"
    assert len((await page.get("/audit"))["lines"]) == 3


@pytest.mark.parametrize(
    ("draft", "status"),
    [
        ({"action": "explode"}, 400),
        ({"action": "reset"}, 400),
        ({"action": "clone"}, 400),
        ({"action": "reset", "topic": "orders", "to": "nowhere"}, 400),
        ({"action": "reset", "topic": "orders", "to": "time"}, 400),
        ({"action": "reset", "topic": "orders", "to": "offset"}, 400),
        ({"action": "reset", "topic": "orders", "to": "offset", "number": 99}, 400),
        ({"action": "reset", "topic": "nowhere", "to": "end"}, 404),
        ({"action": "reset", "topic": "orders", "to": "end", "queues": ["broker-z:0"]}, 404),
        ({"action": "skip", "group": "nobody"}, 404),
    ],
)
async def test_an_impossible_plan_is_refused_in_words(group, draft, status):
    answer = await group.browser.post("/progress/plan", {"group": "billing"} | draft, status)

    assert len(answer["error"]) > 10
    assert group.world.progress(QUEUE) == 2
