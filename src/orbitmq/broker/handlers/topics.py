"""Administration of topics (17, 18, 21, 215, 351).

Name servers are told by the registration, which notices at the end of the turn that the table is
another one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from orbitmq.broker import names
from orbitmq.broker.attributes import parse_changes
from orbitmq.broker.errors import Refused
from orbitmq.broker.paging import PageRequest
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.topics import reading
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.topics import (
    CreateTopicList,
    TopicConfig,
    TopicConfigDetail,
    TopicFilterType,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.topics import (
    CreateTopicRequest,
    GetAllTopicConfigRequest,
    GetAllTopicConfigResponse,
    TopicRequest,
)
from orbitmq.wire.versions import Gate

log = logging.getLogger(__name__)


class Topics:
    """Makes, changes, shows and deletes topics."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.update,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: self.update_list,
            RequestCode.GET_ALL_TOPIC_CONFIG: self.show_all,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete,
            RequestCode.GET_TOPIC_CONFIG: self.show,
        }

    # Making and changing.

    def update(self, connection: Connection, request: Command) -> Command:
        asked = request.header(CreateTopicRequest)
        try:
            filter_type = TopicFilterType(asked.topic_filter_type)
        except ValueError as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"topicFilterType must be one of {', '.join(TopicFilterType)}, "
                f"got {asked.topic_filter_type!r}",
            ) from error
        self._apply(
            connection,
            TopicConfig(
                topic_name=asked.topic,
                read_queue_nums=asked.read_queue_nums,
                write_queue_nums=asked.write_queue_nums,
                perm=asked.perm,
                topic_filter_type=filter_type,
                topic_sys_flag=asked.topic_sys_flag or 0,
                order=asked.order,
                attributes=parse_changes(asked.attributes),
            ),
        )
        return request.answer(ResponseCode.SUCCESS)

    def update_list(self, connection: Connection, request: Command) -> Command:
        """All of a list. A bad name refuses the list as a whole, before anything is changed.

        Apache's broker also ends, with success, at the first topic that is as wanted already, and
        leaves the others out.
        """
        asked = decode_body(CreateTopicList, request.body)
        topics = self._parts.topics
        for config in asked.topic_config_list:
            names.check_topic(config.topic_name)
            if topics.is_system(config.topic_name):
                raise Refused(
                    ResponseCode.INVALID_PARAMETER,
                    f"The topic[{config.topic_name}] is conflict with system topic.",
                )
        for number, config in enumerate(asked.topic_config_list):
            try:
                self._apply(connection, config)
            except Refused as refused:
                raise Refused(
                    refused.code, f"{refused}; the {number} topics before it in the list are done"
                ) from refused
        return request.answer(ResponseCode.SUCCESS)

    def _apply(self, connection: Connection, config: TopicConfig) -> None:
        parts = self._parts
        before = parts.topics.get(config.topic_name)
        after = parts.topics.update(config, now=parts.clock.now())
        if after != before:
            log.info(
                "topic created" if before is None else "topic changed",
                extra={"topic": config.topic_name, "client": peer_of(connection).name},
            )
            if before is not None and reading(before) != reading(after):
                # Those who wait for messages of it are told what they may do now.
                parts.held.wake(config.topic_name)

    # Deleting.

    def delete(self, connection: Connection, request: Command) -> Command:
        """Forget a topic: its configuration, queues and progress. Its messages go with the log."""
        topic = request.header(TopicRequest).topic
        parts = self._parts
        # What was sent to it in this turn is stored and answered before it goes.
        parts.turns.finish()
        doomed = [topic, *self._retry_topics_of(topic)]
        for name in doomed:
            is_known = parts.topics.delete(name, now=parts.clock.now()) is not None
            # Messages that wait for their time may be all that there is of it.
            parts.store.delete_topic(name, is_noted=is_known)
            parts.progress.remove_topic(name)
            parts.counters.forget_topic(name)
            parts.timers.counts.forget(name)
            parts.transactions.halves.counts.forget(name)
            parts.held.wake(name)
            if is_known:
                log.info("topic deleted", extra={"topic": name, "client": peer_of(connection).name})
        return request.answer(ResponseCode.SUCCESS)

    def _retry_topics_of(self, topic: str) -> list[str]:
        """The retry topics of this one that popping groups of an Apache broker have left here.

        Only their newer form, `group+topic`: no group can have that name. The older form,
        `group_topic`, may as well be the retry topic of an ordinary group, with retries in it that
        belong to other topics.
        """
        return [
            name
            for group in sorted(self._parts.progress.groups_of(topic))
            if (name := names.retry_topic(f"{group}+{topic}")) in self._parts.topics
        ]

    # Showing.

    def show(self, _: Connection, request: Command) -> Command:
        topic = request.header(TopicRequest).topic
        config = self._parts.topics.get(topic)
        if config is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        detail = TopicConfigDetail(**msgspec.structs.asdict(config))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(detail))

    def show_all(self, _: Connection, request: Command) -> Command:
        """All topics, or a page of them."""
        asked = request.header(GetAllTopicConfigRequest)
        wanted = PageRequest(asked.topic_seq, asked.data_version, asked.max_topic_num)
        page = self._parts.topics.page(wanted)
        table = page.table
        if wanted.is_for_all and (deleted := self._parts.store.deletions()):
            # A topic that was deleted and made again looks to a slave as if it had always been.
            table = msgspec.structs.replace(table, deleted_topics=deleted)
        return request.answer(
            ResponseCode.SUCCESS,
            GetAllTopicConfigResponse(total_topic_num=page.total),
            body=encode_body(table, bare_integer_keys=request.version < Gate.STANDARD_JSON),
        )
