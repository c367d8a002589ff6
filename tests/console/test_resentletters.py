"""Which dead letters were sent again, looked up no more often than needed."""

from __future__ import annotations

from orbitmq.client.queue import Queue
from orbitmq.console.resentletters import Resent, ResentLetters
from tests.console.conftest import Desk

QUEUE = Queue("orders", "broker-a", 0)
ID = "7F00000100000000000000000000{:04}"


async def test_letters_are_read_when_there_are_new_ones_and_open_ones_are_looked_up_again(
    desk: Desk,
) -> None:
    admin = desk.world.admin
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    for number in range(4):
        await desk.world.die(QUEUE, b"x", "why", UNIQ_KEY=ID.format(number))
    letters = ResentLetters(admin, most=3)

    fresh = await letters.count("billing", "first", 0.0)
    await admin.dead_letters.resend("billing", limit=2)
    before = admin.requests
    # The oldest of them is not among the three that are looked at.
    later = await letters.count("billing", "first", 0.0)
    asked = admin.requests - before
    before = admin.requests
    once_more = await letters.count("billing", "first", desk.cluster.clock.now() + 1)
    asked_again = admin.requests - before
    await desk.world.die(QUEUE, b"x", "why", UNIQ_KEY=ID.format(4))
    await desk.world.die(QUEUE, b"x", "why", UNIQ_KEY=ID.format(5))
    unread = await letters.count("billing", "first", 0.0)
    read = await letters.count("billing", "second", 0.0)

    assert fresh == Resent(3, 0, 0)
    assert later == Resent(3, 1, 1)
    assert once_more == Resent(3, 1, 0)
    # One that was sent again stays so: three are looked up, and then two.
    assert asked > 0
    assert asked_again * 3 == asked * 2
    assert unread == Resent(3, 1, 1)
    assert read == Resent(3, 0, 0)


async def test_a_group_without_letters_has_none(desk: Desk) -> None:
    assert await ResentLetters(desk.world.admin, most=3).count("nobody", "", 0.0) == Resent()
