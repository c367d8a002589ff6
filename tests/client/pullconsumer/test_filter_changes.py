"""A pull consumer that wants something else from now on misses nothing of it.

The broker holds its pulls by the old filter, and leaves them held: Apache's brokers do not look at
them again when a group changes its subscription, as ours do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbitmq.broker.longpoll import HeldPulls
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.broker import RawClient, until
from tests.support.polling import (
    DEADLINE,
    PULLS,
    TOPIC,
    consumer,
    poll_count,
    polling,
    progress,
    queue,
)

QUEUE_COUNT = 1

#: Pulls are held for as long as a test takes.
HELD = replace(PULLS, hold=60.0, timeout=90.0)

both_ways = pytest.mark.parametrize("way", ["subscribe", "assign"])


@pytest.fixture(autouse=True)
def held_pulls_are_left_alone(monkeypatch):
    wake = HeldPulls.wake

    def wake_but_for_groups(self, topic=None, queue_id=None, group=None, **more):
        if group is None:
            wake(self, topic, queue_id, **more)

    monkeypatch.setattr(HeldPulls, "wake", wake_but_for_groups)


async def send(sender: RawClient, *tags: str) -> None:
    """One message for each tag, which is its body, too."""
    for tag in tags:
        await sender.stored(TOPIC, tag.encode(), properties={"TAGS": tag})


async def want(reader: AsyncPullConsumer, way: str, tags: str) -> None:
    if way == "subscribe":
        reader.subscribe(TOPIC, tags)
        await until(reader.assignment, DEADLINE)
    else:
        await reader.assign([queue()], tags)


async def until_held(cluster: AsyncEmbeddedCluster) -> None:
    await until(lambda: len(cluster.brokers[0].parts.held), DEADLINE)


@both_ways
async def test_what_is_wanted_from_now_on_is_not_passed_by_a_pull_that_is_held(
    cluster, sender, way
):
    async with consumer(cluster, polling=polling(pull=HELD)) as reader:
        await want(reader, way, "a")
        await until_held(cluster)

        await want(reader, way, "a || b")
        await send(sender, "b", "b", "a", "b")
        found = await poll_count(reader, 4)

        assert [message.body for message in found] == [b"b", b"b", b"a", b"b"]
        assert reader.position(queue()) == 4


@both_ways
@pytest.mark.parametrize("as_arrow", [False, True], ids=["messages", "columns"])
async def test_what_was_fetched_by_the_old_filter_is_fetched_anew_from_what_was_returned(
    cluster, sender, way, as_arrow
):
    await send(sender, "a", "b", "a", "b", "a")

    async with consumer(cluster, polling=polling(pull=HELD)) as reader:
        await want(reader, way, "a")
        first = await reader.poll(DEADLINE, max_messages=1)
        await until_held(cluster)
        assert [message.queue_offset for message in first] == [0]
        assert reader.position(queue()) == 2, "the filter left one out, and two are cached"

        await want(reader, way, "b")
        if as_arrow:
            rest = await reader.poll_arrow(DEADLINE)
            assert rest.column("queueOffset").to_pylist() == [3]
        else:
            assert [m.queue_offset for m in await reader.poll(DEADLINE)] == [3]


async def test_a_new_filter_settles_nothing_that_a_subscriber_was_given(cluster, sender):
    await send(sender, "a", "a", "b")

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC, "a")
        await poll_count(reader, 2)
        reader.subscribe(TOPIC, "a || b")
        await reader.stop(done=False)

    assert progress(cluster).get(0, 0) == 0, "the two come again"
