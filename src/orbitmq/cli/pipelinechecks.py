"""What is looked at before a pipeline's Spark is started, which takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from orbitmq.cli.connecting import Connection
from orbitmq.cli.errors import Misused
from orbitmq.cli.suggesting import unknown
from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.admin.errors import GroupNotFound, TopicNotFound
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.names import dead_letter_topic
from orbitmq.wire.codes import ResponseCode


def check_names(connection: Connection, topics: Sequence[str], groups: Sequence[str]) -> None:
    """Raises `Misused` for a topic, or a group with dead letters, that nobody has."""
    if topics or groups:
        with asyncio.Runner() as runner:
            runner.run(_check(connection, topics, groups))


async def _check(connection: Connection, topics: Sequence[str], groups: Sequence[str]) -> None:
    async with Engine(connection.client()) as engine:
        admin = AsyncAdmin.on(engine, AdminSettings(timeout=connection.timeout))
        try:
            for topic in topics:
                await admin.topics.get(topic)
            for group in groups:
                await _check_group(admin, group)
        except (TopicNotFound, GroupNotFound) as error:
            raise Misused(str(await unknown(admin, error))) from error


async def _check_group(admin: AsyncAdmin, group: str) -> None:
    """Raises `GroupNotFound` unless the group is there, or has left dead letters."""
    try:
        await admin.groups.settings(group)
    except GroupNotFound:
        try:
            await admin.topics.get(dead_letter_topic(group))
        except TopicNotFound:
            pass
        else:
            return
        raise
    except BrokerRefused as refused:
        # Who may read the letters need not be an operator.
        if refused.code != ResponseCode.NO_PERMISSION:
            raise
