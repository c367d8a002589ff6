"""What is looked at before a pipeline's Spark is started, which takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from orbitmq.cli.connecting import Connection
from orbitmq.cli.errors import Misused
from orbitmq.cli.suggesting import unknown
from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.admin.errors import TopicNotFound
from orbitmq.client.engine import Engine


def check_topics(connection: Connection, topics: Sequence[str]) -> None:
    """Raises `Misused` for a topic to read that nobody has."""
    if topics:
        with asyncio.Runner() as runner:
            runner.run(_check(connection, topics))


async def _check(connection: Connection, topics: Sequence[str]) -> None:
    async with Engine(connection.client()) as engine:
        admin = AsyncAdmin.on(engine, AdminSettings(timeout=connection.timeout))
        for topic in topics:
            try:
                await admin.topics.get(topic)
            except TopicNotFound as error:
                raise Misused(str(await unknown(admin, error))) from error
