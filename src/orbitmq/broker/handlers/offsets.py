"""Progress of groups and bounds of queues (14, 15, 29 to 32)."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.commitrule import Outcome, Way
from orbitmq.broker.errors import Refused
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.progressplaces import ProgressPlaces
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.store.reading import ReadStatus
from orbitmq.store.searching import Boundary
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import offsets as headers

_SUCCESS = int(ResponseCode.SUCCESS)


class Offsets:
    """Answers where groups and queues are."""

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
        """Where a group goes on; where it begins when it has no progress is the client's choice."""
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
        """Take a report of progress. Apache's broker takes it for any queue and any number."""
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
        # C++ clients never set the one-way flag, and drop the answer: theirs are reports as well.
        is_report = request.is_one_way or request.language is Language.CPP
        outcome = parts.progress.commit(
            asked.topic,
            asked.consumer_group,
            asked.queue_id,
            asked.commit_offset,
            by=peer_of(connection).name,
            way=Way.REPORT if is_report else Way.REQUEST,
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
        """The offset that belongs to a time."""
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


#: What is said about a report that was not simply stored; the code is success in any case, because
#: clients cannot do anything about it.
_REMARKS: Mapping[Outcome, str] = {
    Outcome.RESET_PENDING: "Offset has been previously reset",
    Outcome.BEFORE_RESET: "Offset has been previously reset",
    Outcome.REFUSED: "a lower offset than another member of the group has reported is not stored",
}
