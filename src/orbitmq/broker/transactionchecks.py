"""Asking producers about transactions that they left open.

Every half minute the half queue is gone through from its progress on. What is still open there is
judged by one table (`judge`), and whatever the verdict, the message is dealt with or the round ends
before it: nothing is skipped. One that cannot be dealt with is given up, so that it does not keep
those behind it from being asked about. A round is done in bounded steps.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable

from orbitmq.broker import names
from orbitmq.broker.alarms import nobody
from orbitmq.broker.clients import Channel
from orbitmq.broker.drafts import Draft
from orbitmq.broker.outcomes import PutResult
from orbitmq.broker.parking import Reading, copied, real_place
from orbitmq.broker.parts import Parts
from orbitmq.broker.permissions import READ_WRITE
from orbitmq.broker.releasing import Release
from orbitmq.broker.transactions import QUEUE, HalfMessages, root_of
from orbitmq.clock import milliseconds
from orbitmq.message.errors import BodyCorrupt
from orbitmq.message.ids import encode_offset_id
from orbitmq.message.properties import replace_property
from orbitmq.message.stored import StoredMessage
from orbitmq.message.wellknown import (
    CHECK_IMMUNITY_TIME_IN_SECONDS,
    KEYS,
    PRODUCER_GROUP,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_PREPARED_QUEUE_OFFSET,
)
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.bodies.topics import TopicConfig
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.transactions import CheckTransactionStateRequest

log = logging.getLogger(__name__)

#: Of texts that somebody else has chosen, this much is shown.
_SHOWN = 128
#: A producer that left this much unread is asked only if nobody else is there.
_SLOW_BYTES = 64 * 1024


#: Why nobody can be asked about a message, and what can be done about it.
_HOMELESS = (
    "the message does not say to which topic and queue it belongs",
    "Look at what sent it: no producer can commit it",
)
_NOT_CONNECTED = (
    "no producer of the group is connected",
    "Start a producer of the group with check=",
)
_NOT_ALLOWED = (
    "producers of the group are connected, but none of them may publish to the topic",
    "Allow the account of one of them to publish there",
)


class Verdict(enum.Enum):
    """What is to be done about an open half message."""

    GIVE_UP = enum.auto()
    #: It is too young, and so is everything behind it: the round ends.
    STOP = enum.auto()
    #: Its producer asked for more time: append it again, and go on.
    PUT_BACK = enum.auto()
    ASK = enum.auto()


def judge(
    half: StoredMessage,
    *,
    now_ms: int,
    round_ms: int,
    timeout_ms: int,
    check_max: int,
    keep_ms: int,
) -> Verdict:
    """What is to be done about an open half message; the first rule that applies.

    `round_ms` is when the round began, `keep_ms` how long messages are kept. Apache asks for the
    number of questions first, and gives a message up in the round that asked the last of them,
    before it can be answered.
    """
    # A producer whose clock is ahead does not make its messages younger than they are.
    age_ms = now_ms - min(half.born_ms, half.store_ms)
    immunity_ms = immunity_of(half)
    if half.store_ms >= round_ms:
        return Verdict.STOP
    if times_asked(half) >= check_max or age_ms > keep_ms:
        return Verdict.GIVE_UP
    if immunity_ms is not None and age_ms <= immunity_ms:
        return Verdict.PUT_BACK
    if immunity_ms is None and age_ms <= timeout_ms:
        return Verdict.STOP
    return Verdict.ASK


def immunity_of(half: StoredMessage) -> int | None:
    """The time since its birth in which a half message is not asked about, if it has its own."""
    text = half.get_property(CHECK_IMMUNITY_TIME_IN_SECONDS)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 12:
        return None
    return int(text) * 1000


def times_asked(half: StoredMessage) -> int:
    """How often its producer has been asked about a half message."""
    text = half.get_property(TRANSACTION_CHECK_TIMES)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return 0
    return int(text)


class TransactionChecks:
    """The rounds through the half queue."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.halves = HalfMessages(parts)
        #: Called when the step may have something to do earlier than it said.
        self.wake: Callable[[], None] = nobody
        self._next_round = parts.clock.monotonic() + parts.settings.transactions.check_interval
        #: When the current round began; None between rounds.
        self._round_ms: int | None = None
        self._release: Release | None = None
        #: Groups of which nobody could be asked about a topic.
        self._unanswered = Reminders()

    def step(self, now: float) -> float | None:
        """Do a part of a round when it is time for one; when there will be more to do."""
        if self._release is not None:
            return None
        monotonic = self._parts.clock.monotonic()
        if self._round_ms is None:
            again = now + (self._next_round - monotonic)
            # What is left may be too little to be seen in the time of day: then it is time.
            if again > now:
                return again
            self._round_ms = milliseconds(now)
        is_over, is_waiting = self._walk(milliseconds(now), self._round_ms)
        if not is_over:
            return None if is_waiting else now
        interval = self._parts.settings.transactions.check_interval
        self._next_round = monotonic + interval
        self._round_ms = None
        return now + interval

    def _walk(self, now_ms: int, round_ms: int) -> tuple[bool, bool]:
        """Deal with some half messages; whether the round is over, and whether puts are open."""
        parts, halves = self._parts, self.halves
        halves.skip_ended()
        reading = Reading(parts.store, names.HALF_TOPIC, QUEUE, halves.position)
        release = Release(lambda failed: self._done(release, failed))
        release.end = halves.position
        is_over = True
        for messages in reading.batches(parts.settings.transactions.step_messages):
            for half in messages:
                if halves.is_open(half) and not self._deal(half, now_ms, round_ms, release):
                    break
                release.end = half.queue_offset + 1
                is_over = False
            else:
                continue
            is_over = True
            break
        else:
            release.end = max(release.end, reading.offset)
        self._release = release
        release.close()
        return is_over, self._release is not None

    def _deal(self, half: StoredMessage, now_ms: int, round_ms: int, release: Release) -> bool:
        """Deal with an open half message; whether the round goes on."""
        settings = self._parts.settings.transactions
        try:
            verdict = judge(
                half,
                now_ms=now_ms,
                round_ms=round_ms,
                timeout_ms=round(settings.timeout * 1000),
                check_max=settings.check_max,
                keep_ms=round(self._parts.settings.store.retention.keep * 1000),
            )
            if verdict is Verdict.STOP:
                return False
            self._follow(verdict, half, release)
        except Exception:
            log.exception(
                "a half message that cannot be dealt with is given up",
                extra={"offset": half.queue_offset},
            )
            self._give_up_somehow(half, release)
        return True

    def _give_up_somehow(self, half: StoredMessage, release: Release) -> None:
        try:
            self._follow(Verdict.GIVE_UP, half, release)
        except Exception:
            log.exception(
                "a half message that cannot be given up is passed over",
                extra={"offset": half.queue_offset},
            )

    def _done(self, release: Release, failed: int | None) -> None:
        self._release = None
        position = release.end if failed is None else failed
        if position != self.halves.position:
            self.halves.pass_to(position)
        self.halves.save()
        if failed is not None:
            # The rest of the round waits for the next one.
            self._round_ms = None
            interval = self._parts.settings.transactions.check_interval
            self._next_round = self._parts.clock.monotonic() + interval
        self.wake()

    # Verdicts.

    def _follow(self, verdict: Verdict, half: StoredMessage, release: Release) -> None:
        parts = self._parts
        try:
            if verdict is Verdict.GIVE_UP:
                release.put(parts.turns, self._given_up(half), half.queue_offset)
                return
            draft = self._again(half, is_asked=verdict is Verdict.ASK)
        except BodyCorrupt as error:
            log.error("a half message is lost: %s", error)  # noqa: TRY400  # the text says all
            return

        def stored(result: PutResult) -> None:
            self.halves.note_copy(half, result.queue_offset)
            if verdict is Verdict.ASK:
                self._ask(half, draft, result)

        release.put(parts.turns, draft, half.queue_offset, stored)

    def _given_up(self, half: StoredMessage) -> Draft:
        group = half.get_property(PRODUCER_GROUP) or ""
        log.error(
            "a half message is given up after %d questions that no producer of group %s has "
            "answered: %s is not delivered, a copy is kept in topic %s",
            times_asked(half),
            names.shown(group, _SHOWN),
            _named(half),
            names.CHECK_MAX_TIME_TOPIC,
            extra=_fields(half, group),
        )
        topic = TopicConfig(
            topic_name=names.CHECK_MAX_TIME_TOPIC,
            read_queue_nums=1,
            write_queue_nums=1,
            perm=READ_WRITE,
        )
        self._parts.topics.ensure(topic, now=self._parts.clock.now())
        return copied(half, names.CHECK_MAX_TIME_TOPIC, 0)

    def _again(self, half: StoredMessage, *, is_asked: bool) -> Draft:
        draft = copied(half, names.HALF_TOPIC, QUEUE)
        properties = replace_property(
            draft.properties, TRANSACTION_PREPARED_QUEUE_OFFSET, str(root_of(half))
        )
        if is_asked:
            times = str(times_asked(half) + 1)
            properties = replace_property(properties, TRANSACTION_CHECK_TIMES, times)
        draft.properties = properties
        return draft

    def _ask(self, half: StoredMessage, copy: Draft, stored: PutResult) -> None:
        """Ask a producer of the group; nobody there counts as asked, too."""
        parts = self._parts
        group = half.get_property(PRODUCER_GROUP) or ""
        place = real_place(half)
        if place is None:
            self._tell_nobody(half, group, *_HOMELESS)
            return
        channel = self._somebody(group, place[0])
        if channel is None:
            is_connected = any(map(_is_open, parts.producers.channels(group)))
            self._tell_nobody(half, group, *(_NOT_ALLOWED if is_connected else _NOT_CONNECTED))
            return
        self._unanswered.end(_subject(half, group))
        message = StoredMessage.build(
            topic=place[0],
            queue_id=place[1],
            stored_body=half.stored_body,
            properties=copy.properties,
            queue_offset=stored.queue_offset,
            physical_offset=stored.physical_offset,
            flag=half.flag,
            sys_flag=half.sys_flag,
            born_ms=half.born_ms,
            born_host=half.born_host,
            store_ms=half.store_ms,
            store_host=(parts.address.host, parts.address.port),
            reconsume_times=half.reconsume_times,
        )
        header = CheckTransactionStateRequest(
            topic=names.HALF_TOPIC,
            tran_state_table_offset=stored.queue_offset,
            commit_log_offset=stored.physical_offset,
            msg_id=half.unique_id,
            transaction_id=half.unique_id,
            offset_msg_id=encode_offset_id(parts.store_host, stored.physical_offset),
            broker_name=parts.settings.name,
        )
        parts.notify(channel, RequestCode.CHECK_TRANSACTION_STATE, header, body=message.encode())

    def _tell_nobody(self, half: StoredMessage, group: str, why: str, remedy: str) -> None:
        """Of what a group has open in a topic and nobody can be asked about, one a minute."""
        subject = _subject(half, group)
        if not (count := self._unanswered.note(subject, self._parts.clock.monotonic())):
            return
        asked, most = times_asked(half) + 1, self._parts.settings.transactions.check_max
        log.warning(
            "nobody to ask about a transaction of group %s: %s; %s has had question %d of %d, and "
            "after the last one it is given up and never delivered. %s (time %d)",
            names.shown(group, _SHOWN),
            why,
            _named(half),
            asked,
            most,
            remedy,
            count,
            extra=_fields(half, group),
        )

    def _somebody(self, group: str, topic: str) -> Channel | None:
        """A producer of the group that may see what is sent to a topic.

        Anybody can say that it belongs to a group; a half message is not for anybody.
        """
        may_publish = self._parts.access.may_publish
        return self._parts.producers.choose(
            group,
            is_active=lambda channel: _is_open(channel) and may_publish(channel, topic),
            is_writable=_is_quick,
        )


def _topic_of(half: StoredMessage) -> str:
    place = real_place(half)
    return "no topic" if place is None else place[0]


def _subject(half: StoredMessage, group: str) -> tuple[str, str]:
    return group[:_SHOWN], _topic_of(half)


def _fields(half: StoredMessage, group: str) -> dict[str, str]:
    return {
        "group": group[:_SHOWN],
        "topic": _topic_of(half),
        "message_id": half.msg_id[:_SHOWN],
    }


def _named(half: StoredMessage) -> str:
    msg_id, keys = half.msg_id, half.get_property(KEYS) or "none"
    return (
        f"message {names.shown(msg_id, _SHOWN)} to {_topic_of(half)} "
        f"(keys {names.shown(keys, _SHOWN)})"
    )


def _is_open(channel: Channel) -> bool:
    return isinstance(channel, Connection) and channel.is_open


def _is_quick(channel: Channel) -> bool:
    return isinstance(channel, Connection) and channel.unwritten < _SLOW_BYTES
