"""Dead letters: found, grouped, sent again, exported."""

from __future__ import annotations

import base64
import itertools
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from orbitmq.client.admin.deadletters import (
    RESENT_FROM,
    DeadLetter,
    DeadLetterFilter,
    ResendResult,
    ResendTo,
)
from orbitmq.client.errors import AdminError
from orbitmq.client.routes import Queue
from orbitmq.errors import NotSupported
from orbitmq.wire.bodies import MessageQueue
from tests.support.client_admin import GROUP, World

A0 = Queue("orders", "broker-a", 0)
B1 = Queue("orders", "broker-b", 1)
DEAD = f"%DLQ%{GROUP}"
RETRY = f"%RETRY%{GROUP}"

_ids = itertools.count(1)


def unique_id() -> str:
    return f"7F000001000100000000{next(_ids):012X}"


async def _letters(world: World) -> None:
    """Five letters, ten seconds apart: three of one reason, on two brokers."""
    await world.consumer("c1")
    for number, (queue, reason) in enumerate(
        [
            (A0, "ValueError: no such account"),
            (B1, "TimeoutError"),
            (A0, "ValueError: no such account"),
            (A0, ""),
            (B1, "ValueError: no such account"),
        ]
    ):
        await world.die(
            queue, b"%d" % number, reason, KEYS=f"order-{number} all", UNIQ_KEY=unique_id()
        )
        world.cluster.advance(10.0)


async def _found(world: World, **where: Any) -> list[DeadLetter]:
    chosen = DeadLetterFilter(**where)
    return [letter async for letter in world.admin.dead_letters.list(GROUP, chosen)]


def numbers(letters: list[DeadLetter]) -> list[int]:
    return [int(letter.message.body) for letter in letters]


async def test_letters_are_listed_with_reason_attempts_and_origin(world):
    await _letters(world)

    letters = await _found(world)

    assert numbers(letters) == [0, 1, 2, 3, 4]
    first = letters[0]
    assert (first.group, first.topic) == (GROUP, "orders")
    assert (first.reason, first.attempts) == ("ValueError: no such account", 1)
    assert first.keys == ("order-0", "all")
    assert first.origin_id is not None
    origin = await world.admin.messages.by_offset_id(first.origin_id)
    assert origin.queue == A0
    assert first.died_at == pytest.approx(world.cluster.messages(DEAD)[0].stored_at)
    assert letters[3].reason != ""


async def test_letters_are_chosen_by_time_key_topic_reason_and_attempts(world):
    await _letters(world)
    letters = await _found(world)

    since = datetime.fromtimestamp(letters[1].message.stored.store_ms / 1000, UTC)
    until = letters[3].message.stored.store_ms / 1000
    assert numbers(await _found(world, since=since, until=until)) == [1, 2]
    assert numbers(await _found(world, keys=["order-4", "order-0"])) == [0, 4]
    assert numbers(await _found(world, reason="timeout")) == [1]
    assert numbers(await _found(world, pile="TimeoutError")) == [1]
    assert numbers(await _found(world, reason="no such", since=since)) == [2, 4]
    assert numbers(await _found(world, topic="orders")) == [0, 1, 2, 3, 4]
    assert await _found(world, topic="returns") == []
    assert await _found(world, min_attempts=2) == []
    assert numbers(await _found(world, max_attempts=1)) == [0, 1, 2, 3, 4]
    assert numbers(await _found(world, ids=[letters[2].id])) == [2]
    assert numbers(await _found(world, ids=[letters[1].message.unique_id or ""])) == [1]


async def test_letters_are_piled_by_reason_topic_and_age(world):
    await _letters(world)
    world.cluster.advance(7200.0)
    await world.die(A0, b"5", "TimeoutError")

    summary = await world.admin.dead_letters.summary(GROUP)

    assert summary.count == 6
    reasons = [(pile.name, pile.count) for pile in summary.by_reason]
    assert reasons[:2] == [("ValueError: no such account", 3), ("TimeoutError", 2)]
    assert len(reasons) == 3
    assert [(pile.name, pile.count) for pile in summary.by_topic] == [("orders", 6)]
    assert [(pile.name, pile.count) for pile in summary.by_age] == [
        ("last day", 5),
        ("last hour", 1),
    ]
    worst = summary.by_reason[0]
    assert worst.sample.message.body == b"4"
    assert worst.last_died_at - worst.first_died_at == pytest.approx(40.0, abs=5.0)


async def test_letters_of_an_unreadable_topic_say_what_to_do(world):
    # As brokers of 4.x make it.
    await _letters(world)
    await world.admin.topics.update(DEAD, permission="w")

    with pytest.raises(NotSupported, match="orbitmq topic update '%DLQ%billing' --permission rw"):
        await _found(world)


# Sending again.


async def test_letters_go_to_the_group_alone_and_keep_what_they_are(world):
    await _letters(world)
    letters = await _found(world)

    report = await world.admin.dead_letters.resend(GROUP)

    assert report.counts == {ResendResult.SENT: 5}
    copies = {copy.offset_id: copy for copy in world.cluster.messages(RETRY)}
    assert [outcome.sent_as in copies for outcome in report.outcomes] == [True] * 5
    assert len(world.cluster.messages("orders")) == 5
    for letter, outcome in zip(letters, report.outcomes, strict=True):
        copy = copies[outcome.sent_as or ""]
        original = letter.message
        assert (copy.body, copy.keys, copy.unique_id) == (
            original.body,
            original.stored.keys,
            original.unique_id,
        )
        assert copy.reconsume_times == 0
        assert copy.born_ms == original.stored.born_ms
        assert copy.get_property("RETRY_TOPIC") == "orders"
        assert copy.get_property(RESENT_FROM) == letter.id
        assert copy.get_property("DLQ_RESENT_TIMES") == "1"
        for gone in ("DLQ_REASON", "DLQ_ORIGIN_TOPIC", "DELAY", "REAL_TOPIC"):
            assert copy.get_property(gone) is None
    shown = await world.admin.messages.by_offset_id(report.outcomes[0].sent_as or "")
    assert shown.topic == "orders"


async def test_a_letter_that_dies_again_shows_how_often_it_was_sent(world):
    await _letters(world)
    where = DeadLetterFilter(keys=["order-0"])
    report = await world.admin.dead_letters.resend(GROUP, where)
    (outcome,) = report.outcomes
    copy = await world.admin.messages.by_offset_id(outcome.sent_as or "")
    await world.fail(copy.queue, copy.offset_id, level=-1)

    letters = await _found(world, keys=["order-0"])

    assert [letter.resent_times for letter in letters] == [0, 1]
    # The one is done; the other is a letter of its own.
    again = await world.admin.dead_letters.resend(GROUP, where)
    assert [each.result for each in again.outcomes] == [
        ResendResult.ALREADY_SENT,
        ResendResult.SENT,
    ]


async def test_a_letter_that_fails_is_named_and_does_not_hold_up_the_others(world):
    await _letters(world)
    await world.cluster.create_topic("returns", queues=1)
    await world.die(Queue("returns", "broker-a", 0), b"5", UNIQ_KEY=unique_id())
    await world.admin.topics.delete("returns")

    report = await world.admin.dead_letters.resend(GROUP, to=ResendTo.ORIGIN)

    assert report.counts == {ResendResult.SENT: 5, ResendResult.FAILED: 1}
    (failed,) = report.failed
    assert failed.letter.message.body == b"5"
    assert "returns" in (failed.problem or "")


async def test_a_redirected_letter_does_not_count_as_sent(world):
    await _letters(world)
    # A group that consumes in order holds locks: the broker sends its retries to the dead letters.
    for broker in world.cluster.brokers:
        parts = broker.parts
        parts.locks.lock(
            GROUP,
            "c1",
            [MessageQueue(broker_name="broker-a", queue_id=0, topic="orders")],
            parts.clock.monotonic(),
        )

    report = await world.admin.dead_letters.resend(GROUP, limit=1)

    (failed,) = report.failed
    assert "consumes in order" in (failed.problem or "")


# Export.


async def test_letters_are_exported_as_json_lines(world, tmp_path):
    await _letters(world)
    await world.die(A0, b"\xff\x00", "binary")
    path = tmp_path / "dead.jsonl"

    count = await world.admin.dead_letters.export(GROUP, path)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert count == len(rows) == 6
    assert [row.get("body") for row in rows] == ["0", "1", "2", "3", "4", None]
    assert base64.b64decode(rows[5]["body_base64"]) == b"\xff\x00"
    assert rows[0]["reason"] == "ValueError: no such account"
    assert rows[0]["keys"] == ["order-0", "all"]
    assert rows[1]["broker"] == "broker-b"
    assert rows[0]["properties"]["DLQ_ORIGIN_TOPIC"] == "orders"
    dead = {each.offset_id: each.msg_id for each in world.cluster.messages(DEAD)}
    assert {row["offset_id"]: row["id"] for row in rows} == dead
    assert [each.name for each in tmp_path.iterdir()] == ["dead.jsonl"]


async def test_letters_are_exported_as_parquet(world, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    await _letters(world)
    path = tmp_path / "dead.parquet"

    count = await world.admin.dead_letters.export(
        GROUP, path, DeadLetterFilter(reason="ValueError")
    )

    table = parquet.read_table(path)
    assert count == table.num_rows == 3
    assert table.column("body").to_pylist() == [b"0", b"2", b"4"]
    assert table.column("keys").to_pylist()[0] == ["order-0", "all"]
    assert dict(table.column("properties").to_pylist()[0])["DLQ_ORIGIN_TOPIC"] == "orders"
    died = table.column("died_at").to_pylist()[0]
    assert died.timestamp() == pytest.approx(world.cluster.messages(DEAD)[0].stored_at, abs=0.001)


async def test_an_export_that_fails_leaves_the_file_of_before(world, tmp_path, monkeypatch):
    await _letters(world)
    path = tmp_path / "dead.jsonl"
    path.write_text("what was there before")

    async def broken(*_, **__):
        for number in range(2):
            if number:
                raise AdminError("no more")
            yield letter

    (letter,) = await world.admin.dead_letters.sample(GROUP)
    monkeypatch.setattr(world.admin.dead_letters, "list", broken)

    with pytest.raises(AdminError, match="no more"):
        await world.admin.dead_letters.export(GROUP, path)

    assert path.read_text() == "what was there before"
    assert [each.name for each in tmp_path.iterdir()] == ["dead.jsonl"]


# Copies of dead letters, looked for by an account that may not read every topic.
