"""Progress of groups and bounds of queues (14, 15, 29 to 32)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import peer_of
from orbitmq.broker.progress import CommitOutcome, CommitSource, ProgressPlaces
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.store.read import Boundary, ReadStatus
from orbitmq.wire import headers
from orbitmq.wire.bodies import CorrectionOffsets, MessageQueue, ResetOffsets, TopicConfig
from orbitmq.wire.codes import Gate, Language, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CloneGroupOffsetRequest,
    QueryCorrectionOffsetRequest,
    ResetOffsetRequest,
)
from orbitmq.wire.javajson import encode_body

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


_SUCCESS = int(ResponseCode.SUCCESS)


class OffsetHandler:
    """Answers questions about offsets."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places = ProgressPlaces(parts.topics, parts.progress, parts.store)

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.max_offset,
            RequestCode.GET_MIN_OFFSET: self.min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest_time,
        }

    # Progress.

    def query(self, connection: Connection, request: Command) -> Command:
        """The progress of a group; a group without any decides itself where to begin."""
        asked = request.header(headers.QueryConsumerOffsetRequest)
        self._parts.consumers.note_lookup(connection, asked.consumer_group, asked.topic)
        offset = self._parts.progress.query(asked.topic, asked.consumer_group, asked.queue_id)
        if offset is None and asked.set_zero_if_not_found is not False:
            offset = self._beginning(asked.topic, asked.queue_id)
        if offset is None:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"Not found, maybe this is a new consumer group: {asked.consumer_group!r} has no "
                f"progress in queue {asked.queue_id} of topic {asked.topic!r}",
            )
        return request.answer(_SUCCESS, headers.OffsetResponse(offset=offset))

    def _beginning(self, topic: str, queue_id: int) -> int | None:
        """0 for a queue that a new group should read from its first message; see the settings.

        A group that starts together with its topic would otherwise miss what was sent before its
        first pull, although it asks for "the last offset".
        """
        settings = self._parts.settings.progress
        if settings.strict_last:
            return None
        store = self._parts.store
        if store.max_offset(topic, queue_id) == 0:
            return 0 if settings.zero_for_empty else None
        if store.min_offset(topic, queue_id) > 0:
            return None
        # Whether the first message is in memory, by its distance to the end of the log.
        first = store.read(topic, queue_id, 0, 1)
        is_near = first.status is ReadStatus.FOUND and not first.suggest_replica
        return 0 if is_near else None

    def update(self, connection: Connection, request: Command) -> Command:
        """Store a commit. Apache's broker accepts any queue and any offset."""
        parts = self._parts
        asked = request.header(headers.UpdateConsumerOffsetRequest)
        if asked.consumer_group not in parts.groups:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Group {asked.consumer_group} not exist!",
            )
        topic = parts.topics.get(asked.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"Topic {asked.topic} not exist!")
        if problem := self._places.problem(topic, asked.consumer_group, asked.queue_id):
            raise Refused(ResponseCode.INVALID_PARAMETER, problem)
        if asked.commit_offset < 0:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"commitOffset must be 0 or more, got {asked.commit_offset}",
            )
        # C++ clients never set the one-way flag and drop the answer: theirs are one-way as well.
        is_report = request.is_one_way or request.language is Language.CPP
        outcome = parts.progress.commit(
            asked.topic,
            asked.consumer_group,
            asked.queue_id,
            asked.commit_offset,
            by=peer_of(connection).name,
            way=CommitSource.REPORT if is_report else CommitSource.REQUEST,
            now=parts.clock.monotonic(),
        )
        remark = _REMARKS.get(outcome)
        return request.answer(_SUCCESS, remark=remark)

    # Queues.

    def max_offset(self, _: Connection, request: Command) -> Command:
        asked = request.header(headers.GetMaxOffsetRequest)
        offset = self._parts.store.max_offset(asked.topic, asked.queue_id)
        return request.answer(_SUCCESS, headers.OffsetResponse(offset=offset))

    def min_offset(self, _: Connection, request: Command) -> Command:
        asked = request.header(headers.GetMinOffsetRequest)
        offset = self._parts.store.min_offset(asked.topic, asked.queue_id)
        return request.answer(_SUCCESS, headers.OffsetResponse(offset=offset))

    def search(self, _: Connection, request: Command) -> Command:
        """The offset of a time."""
        asked = request.header(headers.SearchOffsetRequest)
        is_upper = asked.boundary_type is headers.BoundaryType.UPPER
        offset = self._parts.store.offset_by_time(
            asked.topic,
            asked.queue_id,
            asked.timestamp,
            Boundary.UPPER if is_upper else Boundary.LOWER,
        )
        return request.answer(_SUCCESS, headers.OffsetResponse(offset=offset))

    def earliest_time(self, _: Connection, request: Command) -> Command:
        asked = request.header(headers.GetEarliestStoreTimeRequest)
        time_ms = self._parts.store.earliest_store_time(asked.topic, asked.queue_id)
        return request.answer(_SUCCESS, headers.TimestampResponse(timestamp=time_ms))


#: Remarks about commits that were not stored; the code is SUCCESS, because clients cannot react.
_REMARKS: Mapping[CommitOutcome, str] = {
    CommitOutcome.RESET_PENDING: "Offset has been previously reset",
    CommitOutcome.BEFORE_RESET: "Offset has been previously reset",
    CommitOutcome.REFUSED: (
        "a lower offset than another member of the group has reported is not stored"
    ),
}


# Resets and clones of progress (222, 308, 314).
#
# A reset first makes a plan: every queue, and the offset that the group will go on from. That is
# the answer. A request with `dryRun=true` (our own) changes nothing. Otherwise the plan is stored
# and pending for every queue: queries return it, and later reports of members are dropped. Held
# pulls are sent to the new offset immediately; no member has to be online.
#
# A clone works in the same way for a group that is online, since its members would overwrite the
# copied progress. An empty topic means all topics of the source.


log = logging.getLogger(__name__)

#: Asks for the plan of a reset only.
DRY_RUN = "dryRun"
_NOTHING_TO_CORRECT = 2**63 - 1


class ResetHandler:
    """Moves the progress of groups."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset,
            RequestCode.QUERY_CORRECTION_OFFSET: self.correction,
            RequestCode.CLONE_GROUP_OFFSET: self.clone,
        }

    # Reset.

    def reset(self, connection: Connection, request: Command) -> Command:
        """Make a group continue at another offset."""
        asked = request.header(ResetOffsetRequest)
        plan = self._plan(asked)
        if request.ext_fields.get(DRY_RUN, "").lower() != "true":
            self._apply(asked.topic, asked.group, plan)
            log.info(
                "progress reset to %s",
                plan,
                extra={"group": asked.group, "topic": asked.topic}
                | {"client": peer_of(connection).name},
            )
        name = self._parts.settings.name
        body = ResetOffsets(
            offset_table={
                MessageQueue(broker_name=name, queue_id=queue_id, topic=asked.topic): offset
                for queue_id, offset in plan.items()
            }
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def _plan(self, asked: ResetOffsetRequest) -> dict[int, int]:
        """The offset of every queue concerned."""
        parts = self._parts
        if parts.settings.is_slave:
            raise Refused(ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker")
        topic = parts.topics.get(asked.topic)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"Topic {asked.topic} does not exist")
        if asked.group not in parts.groups:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {asked.group} does not exist"
            )
        if asked.queue_id < 0:
            queues = range(topic.read_queue_nums)
            if not queues:
                raise Refused(ResponseCode.SYSTEM_ERROR, "No queues to reset.")
            return {queue_id: self._at_time(topic, queue_id, asked) for queue_id in queues}
        if asked.queue_id >= max(topic.read_queue_nums, topic.write_queue_nums):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"topic {asked.topic!r} has no queue {asked.queue_id}; its queues are 0 to "
                f"{max(topic.read_queue_nums, topic.write_queue_nums) - 1}",
            )
        if asked.offset is None or asked.offset == -1:
            return {asked.queue_id: self._at_time(topic, asked.queue_id, asked)}
        return {asked.queue_id: self._checked(asked, asked.offset)}

    def _at_time(self, topic: TopicConfig, queue_id: int, asked: ResetOffsetRequest) -> int:
        """The offset of a time; a negative time means the end."""
        store = self._parts.store
        if asked.timestamp < 0:
            return store.max_offset(topic.topic_name, queue_id)
        return store.offset_by_time(topic.topic_name, queue_id, asked.timestamp)

    def _checked(self, asked: ResetOffsetRequest, offset: int) -> int:
        """An offset within the queue. Apache accepts one beyond the end as well."""
        store = self._parts.store
        low = store.min_offset(asked.topic, asked.queue_id)
        high = store.max_offset(asked.topic, asked.queue_id)
        if not low <= offset <= high:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"Target offset {offset} not in consume queue range [{low}-{high}]",
            )
        return offset

    def _apply(self, topic: str, group: str, plan: Mapping[int, int]) -> None:
        parts = self._parts
        for queue_id, offset in plan.items():
            parts.progress.reset(topic, group, queue_id, offset)
        for queue_id in plan:
            parts.held.wake(topic, queue_id, group)

    # Correction.

    def correction(self, _: Connection, request: Command) -> Command:
        """By queue the lowest progress of any group, unless the compared group is behind it."""
        asked = request.header(QueryCorrectionOffsetRequest)
        parts = self._parts
        topic = parts.topics.get(asked.topic)
        queues = range(topic.read_queue_nums if topic is not None else 0)
        minimum = {each: parts.store.min_offset(asked.topic, each) for each in queues}
        without = [name for name in (asked.filter_groups or "").split(",") if name]
        offsets = parts.progress.lowest(asked.topic, minimum, without=without)
        for queue_id, offset in parts.progress.offsets(asked.topic, asked.compare_group).items():
            if offsets.get(queue_id, _NOTHING_TO_CORRECT) > offset:
                offsets[queue_id] = _NOTHING_TO_CORRECT
        return request.answer(
            ResponseCode.SUCCESS,
            body=encode_body(
                CorrectionOffsets(correction_offsets=offsets),
                bare_integer_keys=request.version < Gate.STANDARD_JSON,
            ),
        )

    # Clone.

    def clone(self, connection: Connection, request: Command) -> Command:
        """Give a group the progress of another."""
        asked = request.header(CloneGroupOffsetRequest)
        progress = self._parts.progress
        topics = [asked.topic] if asked.topic else sorted(progress.topics_of(asked.src_group))
        cloned = [topic for topic in topics if self._clone(topic, asked)]
        log.info(
            "progress of %s cloned",
            asked.src_group,
            extra={"group": asked.dest_group, "topic": ", ".join(cloned)}
            | {"client": peer_of(connection).name},
        )
        if cloned:
            return request.answer(ResponseCode.SUCCESS)
        return request.answer(
            ResponseCode.SUCCESS,
            remark=f"nothing was cloned: group {asked.src_group!r} has no progress there",
        )

    def _clone(self, topic: str, asked: CloneGroupOffsetRequest) -> bool:
        parts = self._parts
        source, target = asked.src_group, asked.dest_group
        if topic not in parts.topics:
            return False
        is_consumed = parts.consumers.subscription(source, topic) is not None
        if not asked.offline and parts.consumers.is_online(source) and not is_consumed:
            # It has given the topic up, so its progress there is of no use.
            return False
        offsets = {
            queue_id: parts.progress.query(topic, source, queue_id) or 0
            for queue_id in parts.progress.offsets(topic, source)
        }
        if not offsets:
            return False
        parts.progress.clone(source, target, topic)
        if parts.consumers.is_online(target):
            self._apply(topic, target, offsets)
        return True
