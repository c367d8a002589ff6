"""Locking queues for consumption in order (41, 42)."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.parts import Parts
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.membership import LockBatch, LockedQueues
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command


class Locking:
    """Gives queues to one client of a group at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.LOCK_BATCH_MQ: self.lock, RequestCode.UNLOCK_BATCH_MQ: self.unlock}

    def lock(self, _: Connection, request: Command) -> Command:
        asked = decode_body(LockBatch, request.body)
        held = self._parts.locks.lock(
            asked.consumer_group, asked.client_id, asked.mq_set, self._parts.clock.monotonic()
        )
        return request.answer(
            ResponseCode.SUCCESS, body=encode_body(LockedQueues(lock_ok_mq_set=held))
        )

    def unlock(self, _: Connection, request: Command) -> Command:
        asked = decode_body(LockBatch, request.body)
        self._parts.locks.unlock(asked.consumer_group, asked.client_id, asked.mq_set)
        return request.answer(ResponseCode.SUCCESS)
