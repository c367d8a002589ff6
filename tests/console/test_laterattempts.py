"""Messages that wait for the delay before their next attempt are in no lag, and counted apart."""

from __future__ import annotations

from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.console.collect import BrokerTables, readers
from orbitmq.console.resends import LaterAttempts, later_attempts
from orbitmq.wire.codes import RequestCode
from tests.console.conftest import Desk
from tests.support.client_admin import forget_code

QUEUES = (Queue("orders", "broker-a", 1), Queue("orders", "broker-b", 0))
TEN_SECONDS, ONE_MINUTE = 3, 5


async def fail_some(desk: Desk) -> None:
    """Three messages of `billing` failed, one of `shipping`; another is delayed by its sender."""
    for group in ("billing", "shipping"):
        await desk.world.admin.groups.create(group)
    places = (
        (QUEUES[0], "billing", TEN_SECONDS),
        (QUEUES[1], "billing", ONE_MINUTE),
        (QUEUES[1], "billing", TEN_SECONDS),
        (QUEUES[0], "shipping", TEN_SECONDS),
    )
    for queue, group, level in places:
        sent = await desk.world.send(queue)
        await desk.world.fail(queue, sent.msg_id, group, level)
        await desk.world.report(queue, sent.queue_offset + 1, group)
    await desk.world.send(QUEUES[0], DELAY=str(ONE_MINUTE))


async def counted(desk: Desk, group: str, most: int = 100) -> LaterAttempts | None:
    engine: Engine = desk.browser.console.state.engine
    cluster = await desk.world.admin.cluster()
    return await later_attempts(engine, BrokerTables(engine), readers(cluster), group, most=most)


async def test_the_page_of_a_group_counts_them_until_they_are_delivered(desk):
    await fail_some(desk)

    waiting = await desk.browser.until("/groups/billing", lambda found: found["later"] is not None)
    desk.cluster.advance(11.0)
    delivered = await desk.browser.until(
        "/groups/billing", lambda found: found["later"]["count"] < 3
    )

    assert (waiting["later"], waiting["retry_lag"]) == ({"count": 3, "is_all": True}, 0)
    assert waiting["later_text"] == "3 messages wait for a later attempt"
    assert delivered["later"] == {"count": 1, "is_all": True}
    assert delivered["later_text"] == "1 message waits for a later attempt"


async def test_only_those_of_the_group_count_and_no_more_are_read_than_allowed(desk):
    await fail_some(desk)

    assert await counted(desk, "shipping") == LaterAttempts(1)
    assert await counted(desk, "nobody") == LaterAttempts(0)
    # One message of each broker.
    some = await counted(desk, "billing", most=1)
    assert some == LaterAttempts(2, is_all=False)
    assert str(some) == "at least 2 messages wait for a later attempt"
    assert str(LaterAttempts(0, is_all=False)).startswith("not known")


async def test_a_broker_that_does_not_tell_makes_the_number_unknown(desk, monkeypatch):
    await fail_some(desk)
    forget_code(monkeypatch, desk.cluster.brokers[1], RequestCode.GET_ALL_DELAY_OFFSET)

    assert await counted(desk, "billing") is None
