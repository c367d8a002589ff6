"""Messages that a consumer could not process come back (36)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from orbitmq.broker import names
from orbitmq.broker.drafts import Draft
from orbitmq.broker.errors import Refused
from orbitmq.broker.outcomes import PutResult
from orbitmq.broker.parts import Parts
from orbitmq.broker.permissions import may_write
from orbitmq.broker.retries import Failure
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.errors import MessageError
from orbitmq.message.properties import property_value
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.message.wellknown import UNIQ_KEY
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.store.errors import StoreError
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.transactions import ConsumerSendBackRequest
from orbitmq.wire.versions import Gate

log = logging.getLogger(__name__)

#: Fields that Apache's clients do not send: what went wrong, and a delay in milliseconds that
#: counts in the place of a level.
REASON_FIELD = "reason"
DELAY_FIELD = "delayMs"

#: Seconds that a consumer is kept waiting for the disk or a slave. Clients wait for five, old pull
#: consumers for three, before they send a copy of their own.
_PATIENCE = 2.0


class SendingBack:
    """Takes failed messages back."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, connection: Connection, request: Command) -> Result:
        """Store the copy for the next attempt, or the dead letter; answered when it is stored.

        As a send that waits is: the consumer goes on past the message when it has the answer, and
        then the copy is all there is. Apache's brokers answer before the flush, also with
        SYNC_FLUSH, and lose it with the power. A copy that is stored, though the disk or a slave
        did not say so in time, is taken all the same: who was told otherwise, or nothing for longer
        than it waits, would send another.
        """
        parts = self._parts
        header = request.header(ConsumerSendBackRequest)
        group = self._group(header)
        if group.retry_queue_nums <= 0:
            return request.answer(ResponseCode.SUCCESS)
        now = parts.clock.now()
        topic = parts.topics.ensure_retry(
            group.group_name, group.retry_queue_nums, unit_mode=header.unit_mode, now=now
        )
        if not may_write(topic.perm):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the topic[{topic.topic_name}] sending message is forbidden",
            )
        fields = request.ext_fields
        failure = Failure(
            self._message(header.offset),
            header.delay_level,
            self._allowed(request, header, group),
            fields.get(REASON_FIELD),
        )
        failure = failure.for_retry_in(topic.topic_name)
        try:
            if failure.is_final:
                dead = parts.topics.ensure_dead_letter(group.group_name, now=now)
                draft = failure.dead_letter(dead.topic_name)
            else:
                # The topic may have got fewer queues than the group's setting says by now.
                queues = max(1, min(group.retry_queue_nums, topic.read_queue_nums))
                queue_id = int(parts.chance.random() * queues)
                draft = failure.retry(topic.topic_name, queue_id)
                self._delay(draft, fields.get(DELAY_FIELD), now)
        except MessageError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        draft.waits = True
        is_confirmed = False

        def confirm() -> None:
            nonlocal is_confirmed
            if not is_confirmed:
                is_confirmed = True
                connection.reply(request, request.answer(ResponseCode.SUCCESS))

        # A copy that cannot be written is refused in the same turn; after so long it is written.
        patience = asyncio.get_running_loop().call_later(_PATIENCE, confirm)

        def stored(result: PutResult) -> None:
            patience.cancel()
            if result.status.is_stored:
                # Anybody can make up an origin, and every new one would be counted by itself.
                origin = failure.origin_topic
                counted = origin if origin in parts.topics else topic.topic_name
                counts = parts.counters.group(counted, group.group_name)
                counts.sent_back += 1
                if failure.is_final:
                    counts.dead_letters += 1
                    self._log_dead(draft, group.group_name, failure)
                confirm()
            elif not is_confirmed:
                remark = result.status.name
                if result.error is not None:
                    remark += f": {result.error}"
                answer = request.answer(ResponseCode.SYSTEM_ERROR, remark=remark)
                connection.reply(request, answer)

        parts.turns.put(draft, stored, transform=False)
        return LATER

    # Its steps.

    def _group(self, header: ConsumerSendBackRequest) -> SubscriptionGroupConfig:
        parts = self._parts
        if parts.settings.is_slave:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"no master available along with {parts.address.host}"
            )
        group = parts.groups.require(header.group, now=parts.clock.now())
        if not may_write(parts.settings.permission):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{parts.address}] sending message is forbidden",
            )
        return group

    def _message(self, offset: int) -> StoredMessage:
        try:
            return decode_message(self._parts.store.message_at(offset))
        except (StoreError, MessageError) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}: {error}"
            ) from error

    @staticmethod
    def _allowed(
        request: Command, header: ConsumerSendBackRequest, group: SubscriptionGroupConfig
    ) -> int:
        if request.version >= Gate.MAX_RECONSUME_TIMES and header.max_reconsume_times is not None:
            return header.max_reconsume_times
        return group.retry_max_times

    def _delay(self, draft: Draft, delay_ms: str | None, now: float) -> None:
        """Park the copy for as long as its level says, or as the consumer does.

        A delay that is longer than timers may be becomes their longest one; without timers, its
        level counts. The consumer is asked again then, and may say the same once more.
        """
        timers = self._parts.timers
        if delay_ms is None:
            self._parts.delays.park(draft)
            return
        if not delay_ms.isascii() or not delay_ms.isdecimal() or len(delay_ms) > 15:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"field {DELAY_FIELD} must be milliseconds, got {delay_ms[:32]!r}",
            )
        if not int(delay_ms):
            return
        if not self._parts.settings.timer:
            self._parts.delays.park(draft)
        else:
            longest = milliseconds(timers.longest)
            timers.park_until(draft, milliseconds_up(now) + min(int(delay_ms), longest))

    def _log_dead(self, draft: Draft, group: str, failure: Failure) -> None:
        log.info(
            "message became a dead letter",
            extra={"group": group, "topic": failure.origin_topic}
            | {"dead_letters": names.dead_letter_topic(group)}
            | {"message_id": property_value(draft.properties, UNIQ_KEY) or failure.origin_id},
        )
