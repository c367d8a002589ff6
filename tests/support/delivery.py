"""A broker whose clock is moved by hand, for what it does by itself and after a while."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from orbitmq.broker.broker import Broker, Parts
from orbitmq.clock import milliseconds
from orbitmq.message.stored import StoredMessage, decode_message, decode_messages
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection, Prepare
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreSettings
from orbitmq.wire import headers
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from tests.support.broker import GROUP, SMALL_STORE, RawClient, small_settings
from tests.support.store import HandClock, QuickFiles


class QuickConfigDisk(DiskFiles):
    """A disk for configuration that does not wait."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class HandBroker:
    """A broker on a hand clock, with what tests of delivery do most."""

    def __init__(self, root: Path, clock: HandClock, **changes: Any) -> None:
        self.root = root
        self.clock = clock
        self.changes = changes
        self.files: DiskFiles = changes.pop("files", None) or QuickFiles()
        self.broker = self._made()

    @property
    def parts(self) -> Parts:
        return self.broker.parts

    async def start(self) -> None:
        await self.broker.start()

    def step(self) -> None:
        """Do everything that is due now, without waiting for the loop."""
        for deliverer in (self.parts.delays, self.parts.timers):
            for _ in range(10_000):
                before = deliverer.revision
                again = deliverer.step(self.clock.now())
                self.parts.writes.finish()
                is_due = again is not None and again <= self.clock.now()
                if not is_due and deliverer.revision == before:
                    break

    def advance(self, seconds: float) -> None:
        """Let time pass, and do what is due then."""
        self.clock.advance(seconds)
        self.step()

    def messages(self, topic: str, queue_id: int = 0) -> list[StoredMessage]:
        """What a consumer would find in a queue."""
        self.parts.writes.finish()
        store = self.parts.store
        offset = store.min_offset(topic, queue_id)
        found: list[StoredMessage] = []
        while offset < store.max_offset(topic, queue_id):
            result = store.read(topic, queue_id, offset)
            found += decode_messages(b"".join(result.pieces))
            offset = result.next_offset
        return found

    def bodies(self, topic: str, queue_id: int = 0) -> list[bytes]:
        return [message.body for message in self.messages(topic, queue_id)]

    async def restart(self, **changes: Any) -> None:
        """Stop as one should, and start again."""
        await self.broker.stop()
        await self._start_again(changes)

    async def crash(self, **changes: Any) -> None:
        """Die without saving anything, and start again on the same folder."""
        await kill(self.broker)
        await self._start_again(changes)

    async def _start_again(self, changes: dict[str, Any]) -> None:
        self.changes |= changes
        self.broker = self._made()
        await self.broker.start()

    def _made(self) -> Broker:
        settings = small_settings(self.root, **self.changes)
        return Broker(settings, clock=self.clock, files=self.files, disk=QuickConfigDisk())


async def kill(broker: Broker) -> None:
    """Leave a broker as a kill would: nothing is flushed or saved, and its sockets are closed."""
    parts = broker.parts
    parts.store.abandon()
    await parts.scheduler.stop()
    await parts.registration.stop()
    await parts.listeners.close(grace=0)


@contextlib.asynccontextmanager
async def hand_broker(
    root: Path, clock: HandClock | None = None, **changes: Any
) -> AsyncIterator[tuple[HandBroker, RawClient]]:
    """A broker on a hand clock and a client of it."""
    broker = HandBroker(root, clock or HandClock(), **changes)
    await broker.start()
    client = await RawClient.open(broker.broker)
    try:
        yield broker, client
    finally:
        await client.close()
        await broker.broker.stop()


def with_levels(*delays: float) -> StoreSettings:
    """A store whose delay levels have these delays."""
    return replace(SMALL_STORE, delay_levels=delays)


async def send_back(
    client: RawClient,
    message: StoredMessage,
    *,
    group: str = GROUP,
    level: int = 0,
    extra: dict[str, str] | None = None,
    **fields: Any,
) -> Command:
    """Say that a message could not be processed."""
    header = headers.ConsumerSendBackRequest(
        offset=message.physical_offset, group=group, delay_level=level, **fields
    )
    return await client.connection.request(
        RequestCode.CONSUMER_SEND_MSG_BACK, header, extra=extra, timeout=10
    )


async def send_half(
    client: RawClient, topic: str, body: bytes, broker: HandBroker, **properties: str
) -> headers.SendMessageResponse:
    """Send a message of a transaction."""
    return await client.stored(
        topic,
        body,
        properties={"TRAN_MSG": "true", "PGROUP": "makers"} | properties,
        sys_flag=4,
        born_timestamp=milliseconds(broker.clock.now()),
    )


def end_header(
    half: headers.SendMessageResponse, state: int, **fields: Any
) -> headers.EndTransactionRequest:
    """What a producer says that knows the answer to its send."""
    defaults: dict[str, Any] = {
        "producer_group": "makers",
        "tran_state_table_offset": half.queue_offset,
        "commit_log_offset": int(half.msg_id[16:], 16),
        "commit_or_rollback": state,
        "msg_id": half.transaction_id,
    }
    return headers.EndTransactionRequest(**(defaults | fields))


def record_of(command: Command) -> StoredMessage:
    """The message in the body of a command."""
    return decode_message(bytes(command.body))


class AskedProducer(RawClient):
    """A producer that can be asked about transactions, and that takes replies."""

    questions: list[Command]
    replies: list[Command]
    #: What it answers to a pushed reply; None: nothing.
    reply_code: int | None = 0

    @classmethod
    async def join(
        cls,
        broker: Broker,
        client_id: str = "producer@1",
        group: str = "makers",
        prepare: Prepare | None = None,
    ) -> AskedProducer:
        """Connect, and be known to the broker."""
        questions: list[Command] = []
        replies: list[Command] = []

        def asked(_: Connection, request: Command) -> None:
            questions.append(request)

        def replied(_: Connection, request: Command) -> Command | None:
            replies.append(request)
            code = producer.reply_code
            return None if code is None else request.answer(code, remark="as the test says")

        owner = Dispatcher(
            {
                RequestCode.CHECK_TRANSACTION_STATE: asked,
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: replied,
            }
        )
        producer = cls(await connect(broker.address, owner=owner, prepare=prepare), questions)
        producer.questions = questions
        producer.replies = replies
        await producer.heartbeat(client_id, producers=(group,))
        return producer

    async def end(self, header: headers.EndTransactionRequest) -> Command:
        return await self.connection.request(RequestCode.END_TRANSACTION, header, timeout=10)

    async def answer_question(self, question: Command, state: int) -> Command:
        """Say how a transaction ended that one was asked about."""
        asked = question.header(headers.CheckTransactionStateRequest)
        return await self.end(
            headers.EndTransactionRequest(
                producer_group="makers",
                tran_state_table_offset=asked.tran_state_table_offset,
                commit_log_offset=asked.commit_log_offset,
                commit_or_rollback=state,
                msg_id=asked.msg_id or "",
                transaction_id=asked.transaction_id,
                from_transaction_check=True,
            )
        )
