"""Copies of dead letters, looked for by somebody who may not read every topic."""

from __future__ import annotations

from typing import Any

import pytest

from orbitmq.client.admin.deadletters import ResendResult, with_copies
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.remoting.connection import Connection
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import QueryMessageRequest
from tests.support.client_admin import BROKERS, GROUP, World

A0 = Queue("orders", "broker-a", 0)
RETRY = f"%RETRY%{GROUP}"


def forbid(monkeypatch: pytest.MonkeyPatch, world: World, topic: str, *brokers: str) -> None:
    """Let brokers refuse questions about messages of a topic, as Apache's do by their accounts."""
    for broker in brokers:
        dispatcher = world.cluster.brokers[BROKERS.index(broker)]._dispatcher
        assert dispatcher is not None
        usual = dispatcher._handlers[RequestCode.QUERY_MESSAGE]

        def refuse(connection: Connection, request: Command, usual: Any = usual) -> Any:
            if request.header(QueryMessageRequest).topic == topic:
                return request.answer(ResponseCode.NO_PERMISSION, remark="no SUB on this topic")
            return usual(connection, request)

        monkeypatch.setitem(dispatcher._handlers, RequestCode.QUERY_MESSAGE, refuse)


async def letters_of(world: World) -> None:
    await world.consumer("c1")
    for number in range(2):
        await world.die(A0, b"x", "why", UNIQ_KEY=f"7F0000010001000000000000{number:08X}")
        world.cluster.advance(1.0)


async def copies_of(world: World) -> list[ReceivedMessage | None]:
    listed = world.admin.dead_letters.list(GROUP)
    return [copy async for _, copy in with_copies(world.admin.messages, listed)]


@pytest.mark.parametrize("brokers", [BROKERS, BROKERS[:1]], ids=["everywhere", "on one broker"])
async def test_of_letters_whose_topic_may_not_be_read_the_retry_topic_tells(
    world, monkeypatch, brokers
):
    await letters_of(world)
    forbid(monkeypatch, world, "orders", *brokers)

    first = await world.admin.dead_letters.resend(GROUP, limit=1)
    second = await world.admin.dead_letters.resend(GROUP)
    copies = await copies_of(world)

    assert first.counts == {ResendResult.SENT: 1}
    assert second.counts == {ResendResult.ALREADY_SENT: 1, ResendResult.SENT: 1}
    assert [copy is not None and copy.queue.topic for copy in copies] == [RETRY, RETRY]


async def test_a_letter_is_not_sent_to_a_topic_in_which_an_earlier_copy_could_not_be_seen(
    world, monkeypatch
):
    await letters_of(world)
    await world.admin.dead_letters.resend(GROUP, to="origin", limit=1)
    forbid(monkeypatch, world, "orders", *BROKERS)

    blind = await world.admin.dead_letters.resend(GROUP, to="origin")
    insisting = await world.admin.dead_letters.resend(GROUP, to="origin", again=True, limit=1)

    assert blind.counts == {ResendResult.FAILED: 2}
    assert {"no SUB on this topic" in (each.problem or "") for each in blind.failed} == {True}
    assert insisting.counts == {ResendResult.SENT: 1}


async def test_a_copy_on_one_broker_counts_though_another_refuses(world, monkeypatch):
    await letters_of(world)
    await world.admin.dead_letters.resend(GROUP, to="origin", limit=1)
    before = await copies_of(world)
    holder = next(copy.queue.broker for copy in before if copy is not None)
    (other,) = {*BROKERS} - {holder}
    forbid(monkeypatch, world, "orders", other)

    assert await copies_of(world) == before
    report = await world.admin.dead_letters.resend(GROUP, to="origin")
    # Of the second nobody knows what the other broker has.
    assert report.counts == {ResendResult.ALREADY_SENT: 1, ResendResult.FAILED: 1}
    with pytest.raises(BrokerRefused, match="no SUB on this topic"):
        await world.admin.messages.copies("orders", f"7F0000010001{0:020X}")
    with pytest.raises(BrokerRefused, match="no SUB on this topic"):
        [each async for each in world.admin.messages.by_key("orders", "any")]
