"""Copying what a master knows besides messages: topics, groups, progress, also of delays.

Everything is asked for at the start, then every `state_interval`, and as soon as messages of a
topic come that is not known here. Topics, groups and progress become copies of the master's.

A topic that the master has no longer was deleted there, and is deleted here: its queues, and what
is parked for it. The master is asked where its log ends before it is asked for its topics, so all
messages of that topic below are among those that were deleted; also those that this log has yet to
get. Beyond, the topic may have been made again, and the next round decides. Nothing is deleted
while this log is not known to go on in the master's: a master that came back with an empty disk
knows no topic, and what is here may be all that is left. A master of ours also tells how far its
deletions reached; of a topic that was made again before anybody looked, nothing else would show it.

Progress of delay levels and of timers must not be ahead of the log: the master has delivered a
message and says so, and if this broker took over before that message has come, nobody would deliver
it. So the master is then asked where its log ends, and what it said counts when this log has come
so far.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TypeVar

from orbitmq.broker.errors import BrokerError
from orbitmq.broker.groups import consumption
from orbitmq.broker.outward import outward_channels
from orbitmq.broker.parts import Parts
from orbitmq.broker.replication.master import MasterPlace
from orbitmq.broker.timerfile import TIMER_PROGRESS, TimerFile, from_apache
from orbitmq.broker.topics import reading
from orbitmq.errors import OrbitError
from orbitmq.remoting.address import Address
from orbitmq.remoting.channels import Channels
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.wire.bodies.base import Body, decode_body
from orbitmq.wire.bodies.offsets import ConsumerOffsets, DelayOffsets
from orbitmq.wire.bodies.route import KVTable
from orbitmq.wire.bodies.topics import SubscriptionGroupTable, TopicConfigTable
from orbitmq.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

_TIMEOUT = 5.0
_LOG_END = "commitLogMaxOffset"


class Copying:
    """Keeps a slave's tables copies of its master's. A job of the background."""

    def __init__(
        self,
        parts: Parts,
        master: MasterPlace,
        is_in_step: Callable[[], bool],
        channels: Channels | None = None,
    ) -> None:
        """`is_in_step` says whether this log is known to be the beginning of the master's."""
        self._parts = parts
        self._master = master
        self._is_in_step = is_in_step
        self._channels = channels or outward_channels(parts.settings.outward, parts.clock)
        self._failures = Occurrences()
        self._wanted = asyncio.Event()
        self._seen_queues = 0
        #: Topics that the master had, and those of them that it has no longer and that are here.
        self._mastered = {each.topic_name for each in parts.topics}
        self._doomed: set[str] = set()
        #: Where the log must end before these may be taken over.
        self._delivered: tuple[int, DelayOffsets, TimerFile | None] | None = None
        #: How often everything was copied.
        self.rounds = 0

    # The job.

    def begin(self) -> None:
        self._parts.background.spawn(self._run())

    def end(self) -> None:
        """The background ends the task."""

    async def _run(self) -> None:
        settings = self._parts.settings.replication
        try:
            while True:
                address, _ = await self._master.known()
                pause = settings.state_interval
                if not await self._copy(address):
                    pause = min(pause, settings.retry)
                try:
                    async with asyncio.timeout(pause):
                        await self._wanted.wait()
                except TimeoutError:
                    pass
                self._wanted.clear()
        finally:
            await self._channels.close()

    def grown(self) -> None:
        """The log has grown: perhaps by messages of a new topic, or by what was waited for."""
        mirroring, parts = self._parts.store.mirroring, self._parts
        if self._delivered is not None:
            self._take_delivered()
        if mirroring.new_queues != self._seen_queues:
            self._seen_queues = mirroring.new_queues
            if any(queue.topic not in parts.topics for queue in parts.store.queues()):
                self._wanted.set()

    # Copying.

    async def _copy(self, address: Address) -> bool:
        """Copy everything; whether all of it could be had."""
        parts = self._parts
        try:
            log_end = await self._log_end(address)
            self._take_topics(
                await self._ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable),
                log_end,
            )
            parts.progress.replace(
                await self._ask(address, RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsets)
            )
            delays = await self._ask(address, RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsets)
            timers = await self._timers(address)
            self._delivered = (await self._log_end(address), delays, timers)
            self._take_delivered()
            self._take_groups(
                await self._ask(
                    address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable
                )
            )
        except OrbitError as error:
            if count := self._failures.note(str(error)):
                log.warning("the master's tables were not copied: %s (%d so far)", error, count)
            return False
        self.rounds += 1
        return True

    # Those who wait here for messages are told when they may not have them any more.

    def _take_topics(self, master: TopicConfigTable, log_end: int) -> None:
        topics, held = self._parts.topics, self._parts.held
        before = {each.topic_name: reading(each) for each in topics}
        topics.replace(master)
        for name, rule in before.items():
            topic = topics.get(name)
            if topic is None or reading(topic) != rule:
                held.wake(name)
        if self._is_in_step() and master.deleted_topics:
            self._parts.store.follow_deletions(master.deleted_topics)
        self._delete_topics(master.topic_config_table.keys(), log_end)

    def _delete_topics(self, mastered: AbstractSet[str], log_end: int) -> None:
        """Delete what the master has no longer, when its log ended at `log_end`, or later."""
        parts = self._parts
        # What was made here, for a group that is heard of here first, was never the master's.
        candidates = self._doomed | self._mastered | {each.topic for each in parts.store.queues()}
        self._mastered = set(mastered)
        self._doomed = {name for name in candidates - mastered if not parts.topics.is_system(name)}
        if not self._is_in_step():
            return
        for name in tuple(self._doomed):
            if parts.store.delete_topic_below(name, log_end):
                self._doomed.discard(name)
                parts.counters.forget_topic(name)
                log.info("topic deleted, as on the master", extra={"topic": name})

    def _take_groups(self, master: SubscriptionGroupTable) -> None:
        groups, held = self._parts.groups, self._parts.held
        before = {each.group_name: consumption(each) for each in groups}
        groups.replace(master)
        may_be_made = self._parts.settings.auto_create_group
        for name, rule in before.items():
            group = groups.get(name)
            if group is None and may_be_made:
                # Whoever waits would only make it again.
                continue
            if group is None or consumption(group) != rule:
                held.wake(group=name)

    async def _ask(self, address: Address, code: RequestCode, kind: type[B]) -> B:
        answer = await self._channels.request(address, code, timeout=_TIMEOUT)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(
                f"the master answers {code.name} with {answer.code}: {answer.remark or 'no remark'}"
            )
        return decode_body(kind, answer.body)

    async def _log_end(self, address: Address) -> int:
        state = await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)
        return _number(state.table.get(_LOG_END))

    async def _timers(self, address: Address) -> TimerFile | None:
        """The progress of timers; None from a master that knows none, such as Apache's 4.x."""
        answer = await self._channels.request(
            address, RequestCode.GET_TIMER_CHECK_POINT, timeout=_TIMEOUT
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        ours = answer.ext_fields.get(TIMER_PROGRESS)
        if ours is not None:
            return decode_body(TimerFile, ours.encode())
        return from_apache(bytes(answer.body))

    def _take_delivered(self) -> None:
        if self._delivered is None or self._parts.store.mirroring.end < self._delivered[0]:
            return
        _, delays, timers = self._delivered
        self._parts.delays.replace(delays)
        if timers is not None:
            self._parts.timers.replace(timers)
        self._delivered = None


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
