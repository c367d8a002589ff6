"""Administration of topics and groups, settings of a running broker, and statistics.

Name servers get changed topics from the registration, which notices them at the end of the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from orbitmq import names
from orbitmq.broker.counters import SAMPLE_INTERVAL, Rates, stats_data
from orbitmq.broker.errors import ConfigNotSaved, Refused, check_topic
from orbitmq.broker.groups import consumption, peer_of
from orbitmq.broker.metrics import runtime_info
from orbitmq.broker.progress import next_offset, topics_behind
from orbitmq.broker.scheduler import Steps, chunked_answer
from orbitmq.broker.settings import BlackListed, changed, shown
from orbitmq.broker.topics import (
    PageRequest,
    first_version,
    next_version,
    parse_changes,
    reading,
    version_text,
)
from orbitmq.clock import milliseconds
from orbitmq.errors import SettingError
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies import (
    ConsumeQueueEntries,
    ConsumeQueueEntry,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    CreateGroupList,
    CreateTopicList,
    GroupForbidden,
    KVTable,
    MessageQueue,
    QueueBounds,
    QueueProgress,
    QueueTimeSpan,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicConfigDetail,
    TopicFilterType,
    TopicStats,
)
from orbitmq.wire.codes import Gate, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CreateTopicRequest,
    DeleteGroupRequest,
    GetAllGroupConfigRequest,
    GetAllGroupConfigResponse,
    GetAllTopicConfigRequest,
    GetAllTopicConfigResponse,
    GetBrokerConfigResponse,
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    GroupRequest,
    QueryConsumeQueueRequest,
    QueryConsumeTimeSpanRequest,
    TopicRequest,
    UpdateGroupForbiddenRequest,
    ViewBrokerStatsRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body, format_properties, parse_properties

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)


class TopicHandler:
    """Creates, changes, shows and deletes topics (17, 18, 21, 215, 351)."""

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

    # Creating and changing.

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
        """Create all topics of a list; one bad name refuses the whole list.

        Apache's broker stops, with success, at the first topic that exists as requested.
        """
        asked = decode_body(CreateTopicList, request.body)
        topics = self._parts.topics
        for config in asked.topic_config_list:
            check_topic(config.topic_name)
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
                # Held pulls are checked again.
                parts.held.wake(config.topic_name)

    # Deleting.

    def delete(self, connection: Connection, request: Command) -> Command:
        """Delete a topic: its configuration, queues and progress. Its messages go with the log."""
        topic = request.header(TopicRequest).topic
        parts = self._parts
        # What was sent to it in this write is stored and answered first.
        parts.writes.finish()
        doomed = [topic, *self._retry_topics_of(topic)]
        for name in doomed:
            is_known = parts.topics.delete(name, now=parts.clock.now()) is not None
            # Parked messages may be all that there is of it.
            parts.store.delete_topic(name, is_noted=is_known)
            parts.progress.remove_topic(name)
            parts.counters.forget_topic(name)
            parts.dedup.forget(name)
            parts.timers.counts.forget(name)
            parts.transactions.halves.counts.forget(name)
            parts.held.wake(name)
            if is_known:
                log.info("topic deleted", extra={"topic": name, "client": peer_of(connection).name})
        return request.answer(ResponseCode.SUCCESS)

    def _retry_topics_of(self, topic: str) -> list[str]:
        """The retry topics of this one that POP groups of an Apache broker have left here.

        Only their newer form, `group+topic`, which no group's name can have. The older form,
        `group_topic`, may be the retry topic of an ordinary group.
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
            # A topic that was deleted and created again would look unchanged to a slave.
            table = msgspec.structs.replace(table, deleted_topics=deleted)
        return request.answer(
            ResponseCode.SUCCESS,
            GetAllTopicConfigResponse(total_topic_num=page.total),
            body=encode_body(table, bare_integer_keys=request.version < Gate.STANDARD_JSON),
        )


# Consumer groups.


class GroupHandler:
    """Creates, changes, shows and deletes groups (200, 201, 207, 225, 352, 353)."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.show_all,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.show,
            RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: self.forbid,
        }

    # Creating and changing.

    def update(self, connection: Connection, request: Command) -> Command:
        self._apply(connection, decode_body(SubscriptionGroupConfig, request.body))
        return request.answer(ResponseCode.SUCCESS)

    def update_list(self, connection: Connection, request: Command) -> Command:
        """Create all groups of a list; one bad name or number refuses the whole list."""
        asked = decode_body(CreateGroupList, request.body)
        for config in asked.group_config_list:
            self._parts.groups.check(config)
        for config in asked.group_config_list:
            self._apply(connection, config)
        return request.answer(ResponseCode.SUCCESS)

    def _apply(self, connection: Connection, config: SubscriptionGroupConfig) -> None:
        groups = self._parts.groups
        before = groups.get(config.group_name)
        after = groups.update(config, now=self._parts.clock.now())
        if after != before:
            log.info(
                "group created" if before is None else "group changed",
                extra={"group": config.group_name, "client": peer_of(connection).name},
            )
            if before is not None and consumption(before) != consumption(after):
                # Held pulls are checked again.
                self._parts.held.wake(group=config.group_name)

    def forbid(self, _: Connection, request: Command) -> Command:
        """Forbid a group a topic, or allow it again, or only report it."""
        asked = request.header(UpdateGroupForbiddenRequest)
        parts = self._parts
        if asked.readable is not None:
            parts.groups.forbid(
                asked.group,
                asked.topic,
                is_forbidden=not asked.readable,
                now=parts.clock.now(),
            )
            parts.held.wake(asked.topic, group=asked.group)
        body = GroupForbidden(
            group=asked.group,
            topic=asked.topic,
            readable=not parts.groups.is_forbidden(asked.group, asked.topic),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    # Deleting.

    async def delete(self, connection: Connection, request: Command) -> Command:
        """Delete a group, and its progress if requested.

        Online consumers create it again by their next heartbeat. Deleted progress does not return
        after a crash: the answer waits for the disk.
        """
        asked = request.header(DeleteGroupRequest)
        parts = self._parts
        if parts.groups.delete(asked.group_name, now=parts.clock.now()) is not None:
            log.info(
                "group deleted",
                extra={"group": asked.group_name, "client": peer_of(connection).name},
            )
        if asked.clean_offset:
            parts.progress.remove_group(asked.group_name)
        parts.counters.forget_group(asked.group_name)
        if not parts.settings.auto_create_group:
            # Otherwise held pulls would create it again.
            parts.held.wake(group=asked.group_name)
        if asked.clean_offset:
            await self._save_progress(asked.group_name)
        return request.answer(ResponseCode.SUCCESS)

    async def _save_progress(self, group: str) -> None:
        try:
            await self._parts.progress_saved()
        except ConfigNotSaved as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"group {group!r} is deleted, but its progress may be there again after a crash, "
                f"delete it once more: {error}",
            ) from error

    # Showing.

    def show(self, _: Connection, request: Command) -> Command:
        """One group. Apache's broker creates one that does not exist."""
        group = request.header(GroupRequest).group
        config = self._parts.groups.get(group)
        if config is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"No group in this broker: {group!r}",
            )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(config))

    async def show_all(self, _: Connection, request: Command) -> Command:
        """All groups, or a page of them."""
        asked = request.header(GetAllGroupConfigRequest)
        page = self._parts.groups.page(
            PageRequest(asked.group_seq, asked.data_version, asked.max_group_num)
        )
        return await chunked_answer(
            request,
            page.table,
            GetAllGroupConfigResponse(total_group_num=page.total),
            entries=len(page.table.subscription_group_table),
        )


# Settings, and cleaning on demand.


class ConfigHandler:
    """Changes a running broker (25, 26, 306, 316, 329)."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._version = first_version(parts.clock.now())

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.UPDATE_BROKER_CONFIG: self.update,
            RequestCode.GET_BROKER_CONFIG: self.show,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean_queues,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clean_topics,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.clean_log,
        }

    # Settings.

    def show(self, _: Connection, request: Command) -> Command:
        text = format_properties(shown(self._parts.settings, self._parts.address))
        return request.answer(
            ResponseCode.SUCCESS,
            GetBrokerConfigResponse(version=version_text(self._version)),
            body=text.encode(),
        )

    def update(self, connection: Connection, request: Command) -> Command:
        """Change all of these settings, or none, until the broker stops."""
        parts = self._parts
        try:
            wanted = parse_properties(bytes(request.body).decode())
            settings = changed(parts.settings, parts.address, wanted)
        except UnicodeDecodeError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"not UTF-8: {error}") from error
        except BlackListed as refused:
            raise Refused(ResponseCode.NO_PERMISSION, str(refused)) from refused
        except SettingError as refused:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(refused)) from refused
        before = parts.settings
        if settings == before:
            return request.answer(ResponseCode.SUCCESS)
        now = parts.clock.now()
        self._version = next_version(self._version, now)
        parts.change_settings(settings)
        log.warning(
            "settings changed until the broker stops: %s",
            ", ".join(f"{name}={value}" for name, value in sorted(wanted.items())),
            extra={"client": peer_of(connection).name},
        )
        if settings.permission != before.permission:
            # The permissions of all topics at the name servers depend on it.
            parts.topics.renew_version(now=now)
            parts.registration.register_all()
        if (settings.permission, settings.pull) != (before.permission, before.pull):
            # Held pulls are checked again.
            parts.held.wake()
        return request.answer(ResponseCode.SUCCESS)

    # Cleaning. A run is bounded; the periodic ones go on with the rest.

    def clean_queues(self, _: Connection, request: Command) -> Command:
        """Remove the queue entries of messages that are gone from the log."""
        self._parts.store.clean()
        return request.answer(ResponseCode.SUCCESS)

    def clean_log(self, _: Connection, request: Command) -> Command:
        """Delete expired files of the log now, at any hour."""
        self._parts.store.ask_for_cleaning()
        self._parts.store.clean()
        return request.answer(ResponseCode.SUCCESS)

    def clean_topics(self, _: Connection, request: Command) -> Command:
        """Delete the queues of topics that no longer exist."""
        parts = self._parts
        unused = sorted(
            {
                queue.topic
                for queue in parts.store.queues()
                if queue.topic not in parts.topics and not parts.topics.is_system(queue.topic)
            }
        )
        if unused:
            parts.writes.finish()
        for topic in unused:
            parts.store.delete_topic(topic)
            log.info("queues without a topic deleted", extra={"topic": topic})
        return request.answer(ResponseCode.SUCCESS)


# Statistics are read from tables and from the ends of queues. A request about all groups looks at
# all queues that they have progress in, which may be tens of thousands, so it is done in steps.


#: Entries of a queue that one answer shows.
MOST_ENTRIES = 10_000


class StatisticsHandler:
    """Answers questions about queues, groups and the broker (28, 202, 208, 303, 315, 317, 321)."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.rates = Rates(parts.counters, parts.clock)
        parts.scheduler.every(SAMPLE_INTERVAL, self.rates.sample)

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self.time_spans,
            RequestCode.VIEW_BROKER_STATS_DATA: self.stats_item,
            RequestCode.GET_BROKER_CONSUME_STATS: self.all_consume_stats,
            RequestCode.QUERY_CONSUME_QUEUE: self.queue_entries,
        }

    # The broker.

    def runtime_info(self, _: Connection, request: Command) -> Command:
        body = KVTable(table=runtime_info(self._parts, self.rates))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def stats_item(self, _: Connection, request: Command) -> Command:
        """A count over the last minute, hour and day."""
        asked = request.header(ViewBrokerStatsRequest)
        parts = self._parts
        body = stats_data(
            asked.stats_name, asked.stats_key, self.rates, parts.settings.cluster, parts.topics
        )
        if body is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"The stats <{asked.stats_name}> <{asked.stats_key}> not exist",
            )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    # Topics.

    def topic_stats(self, _: Connection, request: Command) -> Command:
        """The bounds of a topic's queues."""
        topic = self._topic(request.header(TopicRequest).topic)
        name = topic.topic_name
        store = self._parts.store
        table: dict[MessageQueue, QueueBounds] = {}
        for queue_id in range(max(topic.write_queue_nums, topic.read_queue_nums)):
            end = store.max_offset(name, queue_id)
            table[self._queue(name, queue_id)] = QueueBounds(
                min_offset=store.min_offset(name, queue_id),
                max_offset=end,
                last_update_timestamp=store.store_time(name, queue_id, end - 1) if end else 0,
            )
        body = TopicStats(offset_table=table, topic_put_tps=self.rates.put_rate(name))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def queue_entries(self, _: Connection, request: Command) -> Command:
        """A part of a consume queue as it is stored."""
        asked = request.header(QueryConsumeQueueRequest)
        store, topic, queue_id = self._parts.store, asked.topic, asked.queue_id
        found = store.queue_entries(topic, queue_id, asked.index, min(asked.count, MOST_ENTRIES))
        if found is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{queue_id}@{topic} is not exist!")
        if not found and asked.count > 0:
            return request.answer(
                ResponseCode.SUCCESS,
                remark=f"Index {asked.index} of {queue_id}@{topic} is not exist!",
            )
        group = asked.consumer_group
        subscription = None
        if group is not None:
            subscription = self._parts.consumers.subscription(group, topic)
        is_missing = group is not None and subscription is None
        body = ConsumeQueueEntries(
            filter_data=f"{group}@{topic} is not online!" if is_missing else None,
            max_queue_index=store.max_offset(topic, queue_id),
            min_queue_index=store.min_offset(topic, queue_id),
            queue_data=tuple(
                ConsumeQueueEntry(physic_offset=offset, physic_size=size, tags_code=code)
                for offset, size, code in found
            ),
            subscription_data=subscription,
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    # Groups.

    async def consume_stats(self, _: Connection, request: Command) -> Command:
        """The progress of a group: in all its topics, in one, or in those of a list."""
        asked = request.header(GetConsumeStatsRequest)
        group = asked.consumer_group
        listed = [name for name in (asked.topic_list or "").split(";") if name]
        topics = dict.fromkeys(listed or self._consumed(group, asked.topic))
        table: dict[MessageQueue, QueueProgress] = {}
        rate = 0.0
        steps = Steps()
        for name in topics:
            topic = self._parts.topics.get(name)
            if topic is not None:
                table |= self._progress(group, topic, topic.read_queue_nums)
                rate += self.rates.get_rate(name, group)
                await steps.did(topic.read_queue_nums)
        body = ConsumeStats(consume_tps=rate, offset_table=table)
        return await chunked_answer(request, body, entries=len(table))

    async def all_consume_stats(self, _: Connection, request: Command) -> Command:
        """The progress of all groups."""
        asked = request.header(GetBrokerConsumeStatsRequest)
        parts = self._parts
        groups: list[dict[str, tuple[ConsumeStats, ...]]] = []
        behind = in_flight = 0
        steps = Steps()
        for group in [config.group_name for config in parts.groups]:
            stats: list[ConsumeStats] = []
            for name in self._consumed(group):
                topic = parts.topics.get(name)
                if topic is None or (asked.is_order and not topic.order):
                    continue
                table = self._progress(group, topic, topic.write_queue_nums)
                for queue in table.values():
                    behind += queue.broker_offset - queue.consumer_offset
                    in_flight += queue.pull_offset - queue.consumer_offset
                rate = self.rates.get_rate(name, group)
                stats.append(ConsumeStats(consume_tps=rate, offset_table=table))
                await steps.did(topic.write_queue_nums)
            groups.append({group: tuple(stats)})
            await steps.did(1)
        body = ConsumeStatsList(
            broker_addr=str(parts.address),
            consume_stats_list=tuple(groups),
            total_diff=behind,
            total_inflight_diff=in_flight,
        )
        return await chunked_answer(request, body, entries=len(groups))

    def time_spans(self, _: Connection, request: Command) -> Command:
        """The time span of a topic's messages, and up to when a group has consumed them."""
        asked = request.header(QueryConsumeTimeSpanRequest)
        topic = self._topic(asked.topic)
        body = ConsumeTimeSpans(
            consume_time_span_set=tuple(
                self._time_span(asked.topic, queue_id, asked.group)
                for queue_id in range(topic.write_queue_nums)
            )
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def _time_span(self, topic: str, queue_id: int, group: str) -> QueueTimeSpan:
        parts, store = self._parts, self._parts.store
        end = store.max_offset(topic, queue_id)
        first = store.earliest_store_time(topic, queue_id)
        last = store.store_time(topic, queue_id, end - 1)
        progress = parts.progress.query(topic, group, queue_id)
        consumed = first if not progress else store.store_time(topic, queue_id, progress - 1)
        delay = 0
        # A group without progress, or with progress before the first message, begins here.
        following = max(progress or 0, store.min_offset(topic, queue_id))
        if following < end:
            waiting_since = store.store_time(topic, queue_id, following)
            delay = max(0, milliseconds(parts.clock.now()) - waiting_since)
        return QueueTimeSpan(
            message_queue=self._queue(topic, queue_id),
            min_time_stamp=first,
            min_time_stamp_str=_time_text(first),
            max_time_stamp=last,
            max_time_stamp_str=_time_text(last),
            consume_time_stamp=consumed,
            consume_time_stamp_str=_time_text(consumed),
            delay_time=delay,
        )

    def _progress(
        self, group: str, topic: TopicConfig, queues: int
    ) -> dict[MessageQueue, QueueProgress]:
        """The progress of a group in the queues of a topic."""
        store, progress = self._parts.store, self._parts.progress
        name = topic.topic_name
        table: dict[MessageQueue, QueueProgress] = {}
        for queue_id in range(queues):
            consumed = next_offset(self._parts, group, name, queue_id) or 0
            pulled = progress.pulled(name, group, queue_id) or 0
            last = store.store_time(name, queue_id, consumed - 1) if consumed else 0
            table[self._queue(name, queue_id)] = QueueProgress(
                broker_offset=store.max_offset(name, queue_id),
                consumer_offset=consumed,
                last_timestamp=max(0, last),
                pull_offset=max(consumed, pulled),
            )
        return table

    def _consumed(self, group: str, topic: str | None = None) -> list[str]:
        """The topics that a group may be behind in, or only `topic`, without those it has given up.

        A group that is not online has given up none.
        """
        consumers = self._parts.consumers
        topics = [topic] if topic else topics_behind(self._parts, group)
        if not consumers.is_online(group):
            return topics
        return [name for name in topics if consumers.subscription(group, name) is not None]

    def _topic(self, name: str) -> TopicConfig:
        topic = self._parts.topics.get(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(broker_name=self._parts.settings.name, queue_id=queue_id, topic=topic)


def _time_text(millis: int) -> str:
    """A time as tools show it, in the broker's zone."""
    moment = datetime.fromtimestamp(millis / 1000, UTC).astimezone()
    return f"{moment:%Y-%m-%d#%H:%M:%S}:{millis % 1000:03d}"
