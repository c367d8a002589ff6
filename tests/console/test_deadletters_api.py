"""Dead letters through the page's interface: triage, replay with outcomes, export."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from orbitmq.client.admin.deadletters import ResendResult
from tests.console.conftest import Desk, die


@pytest.fixture
async def dead(desk):
    """A group with seven letters of two reasons."""
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await die(desk.world, 4, "ValueError: bad amount")
    desk.cluster.advance(7200.0)
    await die(desk.world, 3, "KeyError: 'city'", start=4)
    return desk


async def over(desk: Desk, replay: dict[str, Any]) -> Any:
    return await desk.browser.until(
        f"/replays/{replay['id']}", lambda found: not found["is_running"]
    )


async def test_letters_are_in_piles_by_the_first_line_of_their_reason(dead):
    groups = await dead.browser.until(
        "/dead-letters", lambda found: found["rows"][0]["dead_letters"] == 7
    )
    found = await dead.browser.get("/dead-letters/billing")
    some = await dead.browser.get("/dead-letters/billing/letters?reason=KeyError&count=2")

    assert groups["rows"][0]["dead_last_hour"] == 3
    piles = {pile["name"]: pile for pile in found["reasons"]}
    assert {name: pile["count"] for name, pile in piles.items()} == {
        "ValueError: bad amount": 4,
        "KeyError: 'city'": 3,
    }
    assert piles["ValueError: bad amount"]["ages"] == [0, 4, 0, 0]
    assert piles["KeyError: 'city'"]["ages"] == [3, 0, 0, 0]
    assert piles["KeyError: 'city'"]["topics"] == {"orders": 3}
    assert piles["KeyError: 'city'"]["sample"]["preview"] == "body 6"
    assert [row["preview"] for row in some["rows"]] == ["body 6", "body 5"]
    assert all(row["origin_topic"] == "orders" for row in some["rows"])


async def test_a_pile_is_replayed_and_not_another_whose_reason_contains_its_own(desk):
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await die(desk.world, 2, "KeyError")
    await die(desk.world, 3, "KeyError: 'city'\n  in line 7", start=2)
    page = desk.browser
    wish = {"pile": "KeyError", "rate": 500, "key": "order-1"}

    told = await page.post("/dead-letters/billing/replay/command", wish)
    one = await over(desk, await page.post("/dead-letters/billing/replay", wish, 202))
    both = await over(
        desk, await page.post("/dead-letters/billing/replay", {"pile": "KeyError"}, 202)
    )

    assert (
        told["command"]
        == one["command"]
        == "orbitmq dlq resend billing --key order-1 --pile KeyError --rate 500 --to retry"
        + desk.aim
    )
    assert one["counts"] == {"sent": 1}
    assert both["counts"] == {"sent": 1, "already sent": 1}
    bodies = sorted(each.body for each in desk.cluster.messages("%RETRY%billing"))
    assert bodies == [b"body 0", b"body 1"]


async def test_some_letters_are_resent_by_count_and_id_then_the_rest_and_each_has_an_outcome(dead):
    page = dead.browser

    async def replayed(**choice):
        return await over(dead, await page.post("/dead-letters/billing/replay", choice, 202))

    few = await replayed(reason="ValueError", count=2)
    rest = await replayed(reason="ValueError", rate=200)
    rows = (await page.get("/dead-letters/billing/letters?count=2"))["rows"]
    named = await replayed(ids=[row["letter"] for row in rows])

    assert few["counts"] == named["counts"] == {"sent": 2}
    assert [each["keys"] for each in few["outcomes"]] == [["order-0"], ["order-1"]]
    assert rest["counts"] == {"already sent": 2, "sent": 2}
    assert {each["keys"][0] for each in named["outcomes"]} == {"order-5", "order-6"}
    bodies = sorted(each.body for each in dead.cluster.messages("%RETRY%billing"))
    assert bodies == [f"body {number}".encode() for number in (0, 1, 2, 3, 5, 6)]
    lines = (await page.get("/audit"))["lines"]
    assert [line["outcome"] for line in lines] == ["2 sent", "2 already sent, 2 sent", "2 sent"]
    assert lines[1]["command"] == (
        f"orbitmq dlq resend billing --reason ValueError --rate 200 --to retry{dead.aim}"
    )


async def test_letters_that_were_sent_again_are_counted_apart_and_are_no_fault(dead):
    def faults(now):
        return [each["text"] for kind in now["faults"] for each in kind["faults"]]

    page = dead.browser
    await page.until("/now", lambda found: found["open_letters"] == 7)
    wish = {"reason": "KeyError", "count": 2}
    await over(dead, await page.post("/dead-letters/billing/replay", wish, 202))
    some = await page.until("/now", lambda found: found["open_letters"] == 5)
    # By somebody else, and to the topic: what counts is in the cluster and not in the console.
    outcome = await dead.world.admin.dead_letters.resend("billing", to="origin")
    none = await page.until("/now", lambda found: found["open_letters"] == 0)
    (row,) = (await page.get("/dead-letters"))["rows"]
    letters = (await page.get("/dead-letters/billing/letters?count=9"))["rows"]

    assert (some["open_last_hour"], some["dead_last_hour"]) == (1, 3)
    assert [text for text in faults(some) if "died" in text] == [
        (
            "1 message died in the last hour and was not resent; 5 dead letters are open, "
            "2 were resent"
        )
    ]
    assert outcome.counts == {ResendResult.SENT: 5, ResendResult.ALREADY_SENT: 2}
    assert [text for text in faults(none) if "died" in text] == []
    assert (row["dead_letters"], row["resent"], row["open_letters"]) == (7, 7, 0)
    assert all(letter["resent_at"] >= letter["died_at"] for letter in letters)


async def test_a_dry_run_sends_nothing_and_needs_no_rights(dead):
    begun = await dead.browser.post("/dead-letters/billing/replay", {"dry_run": True}, 202)
    found = await over(dead, begun)

    assert found["counts"] == {"would be sent": 7}
    assert dead.cluster.messages("%RETRY%billing") == []
    assert (await dead.browser.get("/audit"))["lines"] == []


async def test_a_slow_replay_is_stopped_and_a_second_one_waits(dead):
    page = dead.browser
    begun = await page.post("/dead-letters/billing/replay", {"rate": 0.01}, 202)
    await page.until(f"/replays/{begun['id']}", lambda found: found["counts"].get("sent") == 1)

    refused = await page.post("/dead-letters/billing/replay", {}, 400)
    stopped = await page.send("DELETE", f"/replays/{begun['id']}")

    assert "already" in refused["error"]
    assert stopped["was_stopped"]
    assert not stopped["is_running"]
    assert stopped["summary"] == "1 sent; stopped"
    assert len(dead.cluster.messages("%RETRY%billing")) == 1


async def test_a_replay_of_a_group_that_never_was_says_so(desk):
    begun = await desk.browser.post("/dead-letters/nobody/replay", {}, 202)
    found = await over(desk, begun)

    assert "nobody" in found["problem"]
    assert (await desk.browser.get("/audit"))["lines"][0]["is_done"] is False


async def test_letters_are_exported(dead):
    lines = await dead.browser.ask("GET", "/api/v1/dead-letters/billing/export?format=jsonl")
    columns = await dead.browser.ask("GET", "/api/v1/dead-letters/billing/export?format=parquet")
    some = await dead.browser.ask("GET", "/api/v1/dead-letters/billing/export?reason=KeyError")
    wrong = await dead.browser.ask("GET", "/api/v1/dead-letters/billing/export?format=csv")

    rows = [json.loads(line) for line in lines.body.splitlines()]
    assert [row["body"] for row in rows] == [f"body {number}" for number in range(7)]
    assert columns.body.startswith(b"PAR1")
    assert 'filename="billing-dead-letters.parquet"' in columns.headers["content-disposition"]
    assert len(some.body.splitlines()) == 3
    assert wrong.status == 400


async def test_the_notebook_has_the_filter_filled_in_whatever_is_in_it(desk):
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await die(desk.world, 1, 'it\'s "quoted" \\ and {braced}')

    query = "key=it%27s&since=5&until=6&topic=orders&reason=City&min_attempts=3&max_attempts=16"

    found = await desk.browser.get("/dead-letters/billing")
    chosen = await desk.browser.get(f"/dead-letters/billing?{query}")

    texts = _literals(found["reasons"][0]["notebook"])
    assert 'it\'s "quoted" \\ and {braced}' in texts
    assert "billing" in texts
    assert desk.cluster.name_server in texts
    assert {"it's", 5000, 6000, "orders", "city"} <= _literals(chosen["notebook"])
    assert 'F.col("attempts") >= 3' in chosen["notebook"].replace("\n", " ")


def _literals(snippet: str) -> set[Any]:
    return {node.value for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize(
    "choice",
    [
        {"rate": 0}, {"count": 0}, {"to": "nowhere"}, {"nonsense": 1}, {"since": "x"},
        {"since": 1e300}, {"until": -1}, {"min_attempts": -1}, {"max_attempts": 1.5},
    ],
)  # fmt: skip
async def test_an_impossible_choice_of_letters_is_refused(desk, choice):
    for path in ("replay", "replay/command"):
        assert (await desk.browser.post(f"/dead-letters/billing/{path}", choice, 400))["error"]


@pytest.mark.parametrize(
    "query", ["since=x", "until=1e300", "since=nan", "min_attempts=-1", "max_attempts=many"]
)
async def test_an_impossible_query_for_letters_is_refused(desk, query):
    assert (await desk.browser.get(f"/dead-letters/billing?{query}", 400))["error"]
