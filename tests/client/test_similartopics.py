"""Which topic was perhaps meant."""

from __future__ import annotations

import asyncio
import threading

from orbitmq.client import routes
from orbitmq.client.engine import Engine
from orbitmq.client.routes import similar_topic
from orbitmq.names import most_similar
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings


async def test_the_event_loop_does_not_wait_for_it(monkeypatch):
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(topic, known):
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(20)
        return most_similar(topic, known)

    monkeypatch.setattr(routes, "most_similar", slowly)
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=1)
        async with Engine(quick_settings(cluster.name_server)) as engine:
            asking = asyncio.create_task(similar_topic(engine, "ordesr"))
            try:
                async with asyncio.timeout(20):
                    await begun.wait()  # here it would hang if the loop did the work
            finally:
                may_end.set()
            async with asyncio.timeout(20):
                found = await asking

    assert found == "orders"
