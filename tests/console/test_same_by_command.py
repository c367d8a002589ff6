"""What a page does and what the command does that it shows are the same."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from typing import Any
from urllib.parse import quote

import pytest

from tests.console.conftest import QUEUE, die, read_only
from tests.support.nursery import Nursery
from tests.support.orbitmqcli import Cli


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def cli(desk, nursery):
    return Cli(desk.cluster.name_server, nursery)


async def run(cli: Cli, command: str, *more: str, code: int = 0) -> list[Any]:
    """What a command prints that a page has shown, as `orbitmq …`."""
    _, *words = shlex.split(command)
    return await asyncio.to_thread(lambda: cli.records(*words, *more, code=code))


@pytest.mark.feature("F7")
async def test_dead_letters_are_chosen_sent_again_and_exported_by_both(desk, cli, tmp_path):
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await desk.world.consumer("client-2", group="mailer", subscriptions={"orders": "*"})
    for number in range(4):
        await die(desk.world, 1, "ValueError: it's $5 too much", start=number)
    middle = desk.cluster.clock.now() + 1800.0
    desk.cluster.advance(3600.0)
    for number in range(4, 7):
        await die(desk.world, 1, "KeyError", start=number)
    await die(desk.world, 1, "TimeoutError", start=7, group="mailer")
    page = desk.browser
    rows = (await page.get("/dead-letters/billing/letters"))["rows"]
    tried = rows[0]["tried"]

    # By group, time, key, attempts and reason: the page and its command find the same letters.
    cases = {
        "": range(7),
        f"since={middle}": range(4, 7),
        f"until={middle}": range(4),
        "key=order-5": [5],
        f"min_attempts={tried}&max_attempts={tried}": range(7),
        f"min_attempts={tried + 1}": [],
        "pile=ValueError%3A%20it%27s%20%245%20too%20much": range(4),
        f"reason=error&key=order-2&until={middle}": [2],
    }
    for query, wanted in cases.items():
        shown = await page.get(f"/dead-letters/billing/letters?{query}")
        told = await run(cli, shown["command"])
        keys = [f"order-{number}" for number in reversed(wanted)]
        assert [row["keys"][0] for row in shown["rows"]] == keys, query
        assert [record["keys"][0] for record in told] == keys, query
        assert [record["offset_id"] for record in told] == [row["letter"] for row in shown["rows"]]
    other = await page.get("/dead-letters/mailer/letters")
    assert [row["keys"] for row in other["rows"]] == [["order-7"]]
    assert [each["keys"] for each in await run(cli, other["command"])] == [["order-7"]]

    # The page sends two of a pile at a rate; the command that it shows finds them done already.
    wish = {"pile": "KeyError", "count": 3, "rate": 20.0}
    began = time.monotonic()
    begun = await page.post("/dead-letters/billing/replay", wish, 202)
    done = await page.until(f"/replays/{begun['id']}", lambda found: not found["is_running"])
    assert time.monotonic() - began >= 2 / 20
    assert [(each["keys"], each["result"]) for each in done["outcomes"]] == [
        ([f"order-{number}"], "sent") for number in range(4, 7)
    ]
    again = await run(cli, begun["command"], "--yes")
    assert [each["result"] for each in again] == ["already sent"] * 3
    wish = {"pile": "ValueError: it's $5 too much", "rate": 20.0}
    command = (await page.post("/dead-letters/billing/replay/command", wish))["command"]
    began = time.monotonic()
    outcomes = await run(cli, command, "--yes")
    assert time.monotonic() - began >= 3 / 20
    assert [each["result"] for each in outcomes] == ["sent"] * 4
    assert len({each["sent_as"] for each in outcomes}) == 4
    assert len(desk.cluster.messages("%RETRY%billing")) == 7

    # Both write the same file.
    saved = await page.ask("GET", "/api/v1/dead-letters/billing/export?key=order-5")
    summary = await page.get("/dead-letters/billing?key=order-5")
    target = tmp_path / "letters.jsonl"
    command = summary["commands"]["export"].replace("billing.parquet", shlex.quote(str(target)))
    assert [each["count"] for each in await run(cli, command)] == [1]
    assert json.loads(target.read_text()) == json.loads(saved.body)


async def test_messages_are_found_by_both(desk, cli):
    stored = await desk.world.fill(QUEUE, 4)
    await desk.world.send(QUEUE, b"tagged", TAGS="odd", amount="7")
    sent = await desk.world.send(QUEUE, b"one", KEYS="order-1", UNIQ_KEY="7F0000010000AA01" * 2)
    for query in (
        "newest=1",
        f"since={stored[1].stored_at}",
        "queue=broker-a:0&offset=2",
        "queue=broker-a:0&offset=3&newest=1&count=2",
        "queue=broker-a:0&offset=1&expression=odd",
        "queue=broker-a:0&offset=0&expression=amount%20%3E%205&type=SQL92",
        "newest=1&count=2",
        "key=order-1",
    ):
        shown = await desk.browser.get(f"/messages?topic=orders&{query}")
        told = await run(cli, shown["command"])
        assert shown["rows"], query
        assert [each["queue_offset"] for each in told] == [row["offset"] for row in shown["rows"]]
    # However many pages were shown: the command lists what all of them have.
    query = "topic=orders&queue=broker-a:0&offset=1&count=2"
    first = await desk.browser.get(f"/messages?{query}")
    second = await desk.browser.get(f"/messages?{query}&listed=2&cursor={first['cursor']}")
    told = await run(cli, second["command"])
    assert [each["queue_offset"] for each in told] == [1, 2, 3, 4]
    assert [row["offset"] for row in (*first["rows"], *second["rows"])] == [1, 2, 3, 4]
    one = await desk.browser.get(f"/messages/one?id={sent.msg_id}")
    track = await desk.browser.get(f"/messages/track?id={sent.msg_id}")
    (found,) = await run(cli, one["command"])
    tracked = await run(cli, track["command"])

    assert found["body"] == "one"
    assert [each["group"] for each in tracked] == [each["group"] for each in track["tracks"]]


async def test_a_copied_command_asks_this_cluster_wherever_it_is_run(desk, nursery):
    # A shell that knows of no cluster: the default one is not there.
    stranger = Cli("", nursery)
    assert stranger.environment()["ORBITMQ_NAME_SERVER"] == ""
    wish = {"name": "copied", "queues": 3, "dry_run": True}
    command = (await desk.browser.post("/topics", wish))["command"]

    (made,) = await run(stranger, command)
    pause = (await desk.browser.get("/topics/copied"))["commands"]["delete"]
    (deleted,) = await run(stranger, pause, "--yes")

    assert (made["result"], deleted["result"]) == ("created", "deleted")
    await desk.browser.get("/topics/copied", 404)


async def test_a_pipeline_is_taken_off_the_list_by_both(desk, cli):
    page = desk.browser
    await page.post("/pipelines/by%2Fcity", {"state": "stopped"}, 204)
    shown = (await page.get("/pipelines/by%2Fcity"))["commands"]["forget"]
    asked = f"/pipelines/by%2Fcity?console={quote(page.console.url, safe='')}"
    command = (await page.get(asked))["commands"]["forget"]

    (planned,) = await run(cli, command, "--dry-run")
    assert (await page.get("/pipelines/by%2Fcity"))["state"] == "stopped"
    (done,) = await run(cli, command)

    assert (planned["result"], done["result"]) == ("would be forgotten", "forgotten")
    await page.get("/pipelines/by%2Fcity", 404)
    (line,) = (await page.get("/audit"))["lines"]
    assert (line["command"], line["outcome"]) == (shown, "taken off the list")
    assert shown == "orbitmq pipeline forget by/city --console URL"
    # There is none any more, and a console that only shows takes none off.
    await page.post("/pipelines/by%2Ftown", {"state": "stopped"}, 204)
    assert await run(cli, command, code=1) == []
    read_only(desk.browser)
    ran = await asyncio.to_thread(
        lambda: cli.run("pipeline", "forget", "by/town", "--console", page.console.url)
    )
    assert ran.returncode == 1
    assert "--write" in ran.stderr


async def test_what_mends_a_fault_is_a_command_that_runs(desk, cli):
    await desk.world.fill(QUEUE, 3)
    await desk.world.admin.groups.create("quiet")
    await desk.world.report(QUEUE, 0, "quiet")
    await desk.world.admin.groups.create("paused")
    await desk.world.report(QUEUE, 0, "paused")
    await desk.world.admin.groups.pause("paused")
    desk.cluster.advance(600.0)

    def is_there(found):
        return {"quiet", "paused"} <= {each["subject"] for each in found["faults"]}

    faults = (await desk.browser.until("/faults", is_there))["faults"]

    commands = {each["subject"]: each["command"] for each in faults}
    (skip,) = (each["otherwise_command"] for each in faults if each["otherwise"])
    assert skip == f"orbitmq group skip quiet --dry-run{desk.aim}"
    assert await run(cli, skip)
    await run(cli, commands["paused"], "--yes")
    await desk.browser.until(
        "/faults", lambda found: not any(each["kind"] == "paused" for each in found["faults"])
    )
