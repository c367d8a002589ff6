"""What is checked before a pull is served, in the order in which clients know it.

First whether the group may read the queue at all, then what it wants of it: each refusal has the
code that Apache's broker gives, so that clients do what they do there.

Nearly every pull asks what one of its group has asked before, and the answer is the same as long as
nothing changes that it follows from: the settings, the topics, the groups, who is there and
subscribes to what. All of that counts its changes, so that the checks are gone through once for a
group and a topic, and then once after every change of anything.
"""

from __future__ import annotations

from typing import NamedTuple

from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.parts import Parts
from orbitmq.broker.permissions import may_read
from orbitmq.filter.subscription import TAG, MessageFilter
from orbitmq.filter.tags import TagFilter
from orbitmq.remoting.connection import Connection
from orbitmq.wire.bodies.membership import ConsumeType, MessageModel, SubscriptionData
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import ForbiddenType, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest

_SUBSCRIPTION = int(PullFlag.SUBSCRIPTION)
_PULL = int(RequestCode.PULL_MESSAGE)
#: How often the subscription that comes with every pull of a group is noted.
_NOTE_SUBSCRIPTION = 60.0
_MOST_NOTED = 10_000
#: Characters of a subscription that is noted; a longer one, of many tags, is looked up each time.
_LONGEST_NOTED = 512
#: Tags of a filter that is remembered with what it passed.
_MOST_CODES = 64


class Forbidden(Refused):
    """A pull that somebody has switched off; clients are told who."""

    def __init__(self, kind: ForbiddenType, remark: str) -> None:
        self.kind = kind
        super().__init__(ResponseCode.NO_PERMISSION, remark)


class _Noted(NamedTuple):
    """What a group wants of a topic, and until when that is not noted again."""

    text: str | None
    kind: str | None
    until: float
    #: None when it is more than tags: that takes more memory, and may be switched off.
    wanted: TagFilter | None


class Passed(NamedTuple):
    """What is known of a pull that may be served."""

    group: SubscriptionGroupConfig
    topic: TopicConfig
    wanted: MessageFilter
    #: The highest version of the subscription that a pull may quote.
    version: int


class PullChecks:
    """Lets pulls pass or refuses them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._topics, self._groups, self._consumers = parts.topics, parts.groups, parts.consumers
        #: What passed, by group and topic, and the revisions that this holds for.
        self._passed: dict[tuple[str, str], Passed] = {}
        self._revisions = (-1, -1, -1)
        #: Whether the broker itself has nothing against pulls, and nothing against anybody's.
        self._is_open = self._is_for_all = False
        self._apply_settings()
        parts.on_settings_changed(self._apply_settings)
        self._noted: dict[tuple[str, str], _Noted] = {}

    def _apply_settings(self) -> None:
        settings = self._parts.settings
        self._is_open = may_read(settings.permission) and not settings.is_slave
        self._is_for_all = not settings.pull.reject_pull_consumer
        self._passed.clear()

    def passed(
        self,
        connection: Connection,
        request: Command,
        header: PullMessageRequest,
        now: float,
        *,
        has_waited: bool = False,
    ) -> Passed:
        """Go through all checks, or remember that a pull like this one has passed them.

        Raises `Refused`, or `Postponed` as `wanted` does.
        """
        revisions = self._topics.revision, self._groups.revision, self._consumers.revision
        if revisions != self._revisions:
            self._revisions = revisions
            self._passed.clear()
        known = self._passed.get((header.consumer_group, header.topic))
        if (
            known is not None
            and request.code == _PULL
            and not header.sys_flag & _SUBSCRIPTION
            and header.sub_version <= known.version
            and 0 <= header.queue_id < known.topic.read_queue_nums
        ):
            return known
        group, topic = self.check(request, header)
        version = self._version(connection, header)
        wanted = self.wanted(connection, header, group, version, now, has_waited=has_waited)
        passed = Passed(group, topic, wanted, version)
        if (
            self._is_open
            and self._is_for_all
            and request.code == _PULL
            and not header.sys_flag & _SUBSCRIPTION
            and isinstance(wanted, TagFilter)
            and len(wanted.codes) <= _MOST_CODES
        ):
            if len(self._passed) >= _MOST_NOTED:
                self._passed.clear()
            self._passed[header.consumer_group, header.topic] = passed
        return passed

    def check(
        self, request: Command, header: PullMessageRequest
    ) -> tuple[SubscriptionGroupConfig, TopicConfig]:
        """Whether this group may read this queue: checks 0 to 7."""
        if not self._is_open or request.code != _PULL:
            self._check_broker(request)
        parts = self._parts
        group = parts.groups.get(header.consumer_group) or parts.groups.require(
            header.consumer_group, now=parts.clock.now()
        )
        if not group.consume_enable:
            raise Forbidden(
                ForbiddenType.GROUP,
                f"subscription group no permission, {header.consumer_group}: its consumption is "
                "switched off",
            )
        topic = parts.topics.get(header.topic)
        if topic is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{header.topic}] not exist, apply first please! It can be created with: "
                f"orbitmq topic create {header.topic}",
            )
        if not may_read(topic.perm):
            raise Forbidden(
                ForbiddenType.TOPIC,
                f"the topic[{header.topic}] pulling message is forbidden: its read permission is "
                "off",
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] has queues 0 to "
                f"{topic.read_queue_nums - 1} to read",
            )
        return group, topic

    def _check_broker(self, request: Command) -> None:
        """Whether anybody may read here: checks 0 to 2."""
        parts = self._parts
        settings = parts.settings
        if settings.is_slave and not (
            settings.pull.slave_read_enable or parts.replication.is_master_gone
        ):
            raise SystemBusy
        if not may_read(settings.permission):
            raise Forbidden(
                ForbiddenType.BROKER,
                f"the broker[{parts.address}] pulling message is forbidden: its read permission "
                "is off",
            )
        if request.code == RequestCode.LITE_PULL_MESSAGE and not settings.pull.lite_pull:
            raise Forbidden(
                ForbiddenType.BROKER,
                f"the broker[{parts.address}] for lite pull consumer is forbidden",
            )

    def wanted(
        self,
        connection: Connection,
        header: PullMessageRequest,
        group: SubscriptionGroupConfig,
        version: int,
        now: float,
        *,
        has_waited: bool = False,
    ) -> MessageFilter:
        """The filter that this pull brings or its group has in that version: checks 8 to 10.

        Raises `Postponed` if it has to be compiled first; `has_waited`: since then.
        """
        parts = self._parts
        name = header.consumer_group
        if header.sys_flag & _SUBSCRIPTION:
            noted = self._noted.get((name, header.topic))
            if (
                noted is not None
                and noted.text == header.subscription
                and noted.kind == header.expression_type
                and now < noted.until
            ):
                wanted = noted.wanted or parts.filters.of_pull(
                    noted.text, noted.kind, connection, has_waited=has_waited
                )
            else:
                wanted = parts.filters.of_pull(
                    header.subscription, header.expression_type, connection, has_waited=has_waited
                )
                self._note_subscription(header, wanted, now)
        else:
            self._check_membership(connection, header, group)
            subscription = parts.consumers.subscription(name, header.topic, with_compensation=False)
            if subscription is None:
                self._check_not_left_out(connection, header)
            wanted = parts.filters.of_group(
                name,
                header.topic,
                subscription,
                version,
                connection,
                has_waited=has_waited,
            )
        if not self._is_for_all and not self._is_known(connection, name):
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist, or the pull consumer is rejected by server: "
                f"group {name!r} has to send heartbeats",
            )
        return wanted

    def _version(self, connection: Connection, header: PullMessageRequest) -> int:
        """The version that a pull quotes, or that of its group where a newer one means the same."""
        quoted = header.sub_version
        if header.sys_flag & _SUBSCRIPTION:
            return quoted
        group, topic, consumers = header.consumer_group, header.topic, self._consumers
        known = consumers.subscription(group, topic, with_compensation=False)
        if known is None or quoted <= known.sub_version:
            return quoted
        is_same = consumers.may_be_ahead(connection, group, topic)
        return known.sub_version if is_same else quoted

    def _check_membership(
        self, connection: Connection, header: PullMessageRequest, group: SubscriptionGroupConfig
    ) -> None:
        parts = self._parts
        name = header.consumer_group
        if not parts.consumers.is_online(name):
            self._check_not_left_out(connection, header)
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist: no heartbeat of group {name!r} has come, "
                "and the pull does not bring its subscription",
            )
        if (
            not group.consume_broadcast_enable
            and parts.consumers.model(name) is MessageModel.BROADCASTING
        ):
            raise Forbidden(
                ForbiddenType.BROADCASTING,
                f"the consumer group[{name}] can not consume by broadcast way",
            )
        if parts.groups.is_forbidden(name, header.topic):
            raise Forbidden(
                ForbiddenType.SUBSCRIPTION,
                f"the consumer group[{name}] is forbidden for topic[{header.topic}]",
            )

    def _check_not_left_out(self, connection: Connection, header: PullMessageRequest) -> None:
        """Refuse a pull for what was probably said, but not taken over."""
        consumers = self._parts.consumers
        if consumers.is_crowded(connection):
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist: group {header.consumer_group!r}, topic "
                f"{header.topic!r}; heartbeats of this connection are not taken over completely, "
                f"since they say more than {consumers.connection_room} bytes "
                "(max_consumer_bytes) about its consumer groups",
            )

    def _is_known(self, connection: Connection, group: str) -> bool:
        if group.startswith(("CID_RMQ_SYS_", "TOOLS_CONSUMER")):
            return True
        members = self._parts.consumers.members(group)
        if not members:
            return False
        connections = self._parts.consumers.connections(group)
        is_active = connections is not None and (
            connections.consume_type is ConsumeType.CONSUME_ACTIVELY
        )
        return not is_active or any(member.channel is connection for member in members)

    def _note_subscription(
        self, header: PullMessageRequest, wanted: MessageFilter, now: float
    ) -> None:
        """Remember, for the tools, what a group wants that need not send heartbeats."""
        text, kind = header.subscription, header.expression_type
        if text is None or len(text) <= _LONGEST_NOTED:
            if len(self._noted) >= _MOST_NOTED:
                self._noted.clear()
            self._noted[header.consumer_group, header.topic] = _Noted(
                text,
                kind,
                now + _NOTE_SUBSCRIPTION,
                wanted if isinstance(wanted, TagFilter) else None,
            )
        subscription = SubscriptionData(
            topic=header.topic,
            sub_string=text,
            expression_type=kind or TAG,
            sub_version=header.sub_version,
        )
        self._parts.consumers.compensate(header.consumer_group, subscription, now)
