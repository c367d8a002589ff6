"""Which messages wait for a later attempt."""

from __future__ import annotations

from orbitmq.console.collect import BrokerTables, readers
from orbitmq.console.resends import LaterAttempts, later_attempts
from orbitmq.wire.codes import RequestCode
from tests.console.conftest import OTHER, QUEUE
from tests.support.client_admin import forget_code


async def fail_some(world):
    """Three messages of `billing` failed, one of `shipping`; another is delayed by its sender."""
    ten_seconds, one_minute = 3, 5
    for group in ("billing", "shipping"):
        await world.admin.groups.create(group)
    for queue, group, level in (
        (QUEUE, "billing", ten_seconds),
        (OTHER, "billing", one_minute),
        (OTHER, "billing", ten_seconds),
        (QUEUE, "shipping", ten_seconds),
    ):
        sent = await world.send(queue)
        await world.fail(queue, sent.msg_id, group, level)
        await world.report(queue, sent.queue_offset + 1, group)
    await world.send(QUEUE, DELAY=str(one_minute))


async def test_the_page_of_a_group_counts_later_attempts_until_they_are_delivered(desk):
    await fail_some(desk.world)

    waiting = await desk.browser.until("/groups/billing", lambda found: found["later"] is not None)
    desk.cluster.advance(11.0)
    delivered = await desk.browser.until(
        "/groups/billing", lambda found: found["later"]["count"] < 3
    )

    assert (waiting["later"], waiting["retry_lag"]) == ({"count": 3, "is_all": True}, 0)
    assert waiting["later_text"] == "3 messages wait for a later attempt"
    assert delivered["later"] == {"count": 1, "is_all": True}
    assert delivered["later_text"] == "1 message waits for a later attempt"


async def test_later_attempts_are_those_of_one_group_up_to_a_bound_if_all_brokers_answer(
    watch, monkeypatch
):
    await fail_some(watch.world)
    nodes = readers(await watch.admin.cluster())

    async def counted(group, most=100):
        return await later_attempts(
            watch.engine, BrokerTables(watch.engine), nodes, group, most=most
        )

    assert await counted("shipping") == LaterAttempts(1)
    assert await counted("nobody") == LaterAttempts(0)
    # One message of each broker.
    some = await counted("billing", most=1)
    assert some == LaterAttempts(2, is_all=False)
    assert str(some) == "at least 2 messages wait for a later attempt"
    assert str(LaterAttempts(0, is_all=False)).startswith("not known")
    forget_code(monkeypatch, watch.cluster.brokers[1], RequestCode.GET_ALL_DELAY_OFFSET)
    assert await counted("billing") is None
