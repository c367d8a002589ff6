"""Progress at the brokers: where members of a group hand their queues to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from orbitmq.client.consumer.progress import TrackedProgress
from orbitmq.client.errors import BrokerUnavailable, ClientError
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import ConnectFailed
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import (
    OffsetResponse,
    QueryConsumerOffsetRequest,
    UpdateConsumerOffsetRequest,
)

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.remoting.address import Address
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers.base import Header

_ANSWERS = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})
_DONE = frozenset({int(ResponseCode.SUCCESS)})


class ProgressUnknown(ClientError):
    """A broker's answer about progress that means nothing."""

    retriable = True


class BrokerProgress(TrackedProgress):
    """Positions of a group, each at the broker of its queue.

    A report is answered before it counts as put by. (Apache's client does not wait for answers: a
    report that is lost, or refused, leaves the next owner of the queue behind without a word.)

    With `strict_last` a broker is asked not to say 0 for a young queue without progress, which it
    does unless told otherwise, so that "last" means the end there too.
    """

    def __init__(
        self, engine: Engine, group: str, *, strict_last: bool = False, timeout: float = 5.0
    ) -> None:
        super().__init__()
        self._engine = engine
        self._group = group
        self._set_zero = False if strict_last else None
        self._timeout = timeout

    async def stored(self, queue: Queue) -> int | None:
        answer = await self._ask(
            queue,
            RequestCode.QUERY_CONSUMER_OFFSET,
            QueryConsumerOffsetRequest(
                consumer_group=self._group,
                topic=queue.topic,
                queue_id=queue.id,
                set_zero_if_not_found=self._set_zero,
                broker_name=queue.broker,
            ),
            _ANSWERS,
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        offset = answer.header(OffsetResponse).offset
        if offset < 0:
            raise ProgressUnknown(
                f"the broker of {queue} says that group {self._group!r} is at {offset}, "
                "which is no position"
            )
        return offset

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        outcomes = await asyncio.gather(
            *(self._report(queue, offset) for queue, offset in changed.items())
        )
        return {queue: error for queue, error in zip(changed, outcomes, strict=True) if error}

    async def _report(self, queue: Queue, offset: int) -> OrbitError | None:
        try:
            await self._ask(
                queue,
                RequestCode.UPDATE_CONSUMER_OFFSET,
                UpdateConsumerOffsetRequest(
                    consumer_group=self._group,
                    topic=queue.topic,
                    queue_id=queue.id,
                    commit_offset=offset,
                    broker_name=queue.broker,
                ),
                _DONE,
            )
        except OrbitError as error:
            return error
        return None

    async def _ask(
        self, queue: Queue, code: RequestCode, header: Header, accept: frozenset[int]
    ) -> Command:
        """Ask the master; a replica only when nobody can be reached there."""
        refused: ConnectFailed | None = None
        for address in self._replicas(queue):
            try:
                return await self._engine.ask(
                    address, code, header, timeout=self._timeout, accept=accept
                )
            except ConnectFailed as error:
                refused = refused or error
        raise refused or BrokerUnavailable(queue.broker, "no route has it")

    def _replicas(self, queue: Queue) -> Iterator[Address]:
        addresses = self._engine.routes.brokers.get(queue.broker, {})
        for number in sorted(addresses):
            yield addresses[number]
