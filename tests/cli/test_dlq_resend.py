"""`orbitmq dlq resend`: nothing is sent that nobody agreed to."""

from __future__ import annotations

import json

import pytest
import typer

from orbitmq.cli.command import Session
from orbitmq.cli.deadletters import Choice, resend
from orbitmq.cli.output import Printer
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.client_admin import World

QUEUE = Queue("orders", "broker-a", 0)
RETRY = "%RETRY%billing"


class Agreeing(Session):
    """Somebody at a terminal says yes."""

    def may(self, what: str) -> bool:
        self.out.note(what)
        return True


@pytest.fixture
async def world():
    """A group with three dead letters."""
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=1)
        async with Engine(quick_settings(cluster.name_server), clock=cluster.clock) as engine:
            world = World(cluster, AsyncAdmin.on(engine))
            try:
                await world.consumer("client-1")
                for number in range(3):
                    await world.die(QUEUE, b"x", "why", UNIQ_KEY=unique_id(number))
                yield world
            finally:
                await world.close()


def unique_id(number: int) -> str:
    return f"7F0000010001000000000000{number:08X}"


def session_of(world: World, kind: type[Session] = Session) -> Session:
    admin = world.admin
    return kind(admin._engine, admin, Printer(is_json=True, clock=world.cluster.clock))


def printed(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return [(each["id"], each["result"]) for each in lines]


async def test_a_plan_in_which_nothing_can_be_sent_is_told_and_nothing_is_sent(
    world, monkeypatch, capsys
):
    usual = world.admin.messages.readable_copies
    asked = 0

    async def away_at_first(*words, **options):
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise BrokerUnavailable("broker-a", "it is away")
        return await usual(*words, **options)

    monkeypatch.setattr(world.admin.messages, "readable_copies", away_at_first)

    with pytest.raises(typer.Exit) as end:
        await resend(session_of(world), "billing", Choice())

    assert end.value.exit_code == 1
    assert printed(capsys) == [(unique_id(number), "failed") for number in range(3)]
    assert world.cluster.messages(RETRY) == []


async def test_only_the_letters_are_sent_that_were_there_when_somebody_agreed(
    world, monkeypatch, capsys
):
    await world.admin.dead_letters.resend("billing", limit=1)
    usual = world.admin.dead_letters.list
    readings = 0

    async def list_letters(*words, **options):
        nonlocal readings
        readings += 1
        if readings == 2:
            await world.die(QUEUE, b"x", "since then", UNIQ_KEY=unique_id(9))
        async for letter in usual(*words, **options):
            yield letter

    monkeypatch.setattr(world.admin.dead_letters, "list", list_letters)

    await resend(session_of(world, Agreeing), "billing", Choice())

    assert readings == 2
    assert printed(capsys) == [
        (unique_id(0), "already sent"),
        (unique_id(1), "sent"),
        (unique_id(2), "sent"),
    ]
    copies = [each.unique_id for each in world.cluster.messages(RETRY)]
    assert copies == [unique_id(number) for number in range(3)]
