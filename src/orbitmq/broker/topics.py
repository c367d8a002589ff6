"""The topics of a broker: the table, its changes, its versions and pages.

A topic is created with the broker (`SYSTEM_ROWS`), by administration (`update`), by the first send
(`for_send`), or for a group (`ensure_retry`, `ensure_dead_letter`). Every change gives the table
another DataVersion, which name servers and slaves compare, and a higher `revision`, after which
topics.json is saved; the changed names are kept until `take_changed`, for the registration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from orbitmq import names
from orbitmq.broker.attributes import (
    MESSAGE_TYPE,
    MIXED,
    READ_WRITE,
    TOPIC_ATTRIBUTES,
    Perm,
    changed_attributes,
    is_inherited,
    without_effect,
)
from orbitmq.broker.errors import Refused, check_topic
from orbitmq.clock import milliseconds
from orbitmq.errors import SettingError
from orbitmq.wire.bodies import DataVersion, TopicConfig, TopicConfigTable
from orbitmq.wire.codes import BodyError, ResponseCode
from orbitmq.wire.javajson import decode_body

# The version of a table: name servers, slaves and tools compare it.


def first_version(now: float) -> DataVersion:
    """The version of a table that has never changed."""
    return DataVersion(timestamp=milliseconds(now))


def next_version(version: DataVersion, now: float, state_version: int = 0) -> DataVersion:
    """The version after one change."""
    return DataVersion(
        counter=version.counter + 1, state_version=state_version, timestamp=milliseconds(now)
    )


def is_version_text(text: str | None, version: DataVersion) -> bool:
    """Whether a version that a tool quotes as JSON text is this one."""
    if not text or text.isspace():
        return False
    try:
        return decode_body(DataVersion, text.encode()) == version
    except (BodyError, UnicodeEncodeError):
        return False


def version_text(version: DataVersion) -> str:
    """A version as tools quote it."""
    return msgspec.json.encode(version).decode()


# Pages of a table (GET_ALL_TOPIC_CONFIG, and its like for groups). A tool says how many entries it
# has, how many it wants and of which version of the table. If the version has changed it gets the
# first page again.


V = TypeVar("V")

LARGEST_PAGE = 2000


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A tool's request; all absent: the whole table, as tools before 5.3 expect it."""

    received: int | None = None
    version: str | None = None
    largest: int | None = None

    @property
    def is_for_all(self) -> bool:
        return self.received is None and self.version is None and self.largest is None


def page(
    table: Mapping[str, V], version: DataVersion, request: PageRequest, largest: int = LARGEST_PAGE
) -> dict[str, V]:
    """The entries that answer a request, in the order of their names."""
    names = sorted(table)
    if not request.is_for_all:
        start = 0
        if is_version_text(request.version, version):
            start = max(0, request.received or 0)
        size = largest if request.largest is None else min(largest, max(0, request.largest))
        names = names[start : start + size]
    return {name: table[name] for name in names}


log = logging.getLogger(__name__)

#: Bits of a topic's system flag.
UNIT = 1
UNIT_SUBSCRIPTION = 2

_INHERITED = int(READ_WRITE | Perm.INHERIT)
_ONLY_INHERIT = int(Perm.INHERIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """Which topics a broker has from the start, and which it creates on demand."""

    cluster: str = "DefaultCluster"
    broker_name: str = "broker-a"
    auto_create: bool = True
    #: Topics from which on sends create none, because any client can send to any name.
    max_auto: int = 30_000
    default_queues: int = 8
    cluster_topic_enabled: bool = True
    broker_topic_enabled: bool = True
    trace_topic_enabled: bool = False
    trace_topic: str = names.TRACE_TOPIC
    timer_enabled: bool = True
    delay_levels: int = 18
    revive_queues: int = 8
    #: The most queues of a topic: a request about a topic looks at all of them.
    max_queues: int = 16_384
    #: Whether a topic may be declared to hold messages of every type.
    mixed_types_allowed: bool = False

    def __post_init__(self) -> None:
        positive = ("max_auto", "default_queues", "delay_levels", "revive_queues", "max_queues")
        for setting in positive:
            if getattr(self, setting) < 1:
                raise SettingError(f"{setting} must be positive, got {getattr(self, setting)}")
        for setting in ("cluster", "broker_name", "trace_topic"):
            problem = names.topic_problem(getattr(self, setting))
            if problem is not None:
                raise SettingError(f"{setting} must be a topic's name: {problem}")


@dataclass(frozen=True, slots=True)
class SystemRow:
    """A topic that every broker has."""

    name: str
    queues: int | Callable[[TopicSettings], int] = 1
    perm: int | Callable[[TopicSettings], int] = READ_WRITE
    is_wanted: Callable[[TopicSettings], bool] = lambda _: True

    def config(self, settings: TopicSettings) -> TopicConfig:
        queues = self.queues(settings) if callable(self.queues) else self.queues
        return TopicConfig(
            topic_name=self.name.format(
                cluster=settings.cluster, broker=settings.broker_name, trace=settings.trace_topic
            ),
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=self.perm(settings) if callable(self.perm) else self.perm,
        )


#: The topics of the start, in Apache's order.
SYSTEM_ROWS: tuple[SystemRow, ...] = (
    SystemRow(names.SELF_TEST_TOPIC),
    SystemRow(
        names.AUTO_CREATE_TOPIC, lambda s: s.default_queues, _INHERITED, lambda s: s.auto_create
    ),
    SystemRow(names.BENCHMARK_TOPIC, 1024),
    SystemRow("{cluster}", 16, lambda s: _INHERITED if s.cluster_topic_enabled else _ONLY_INHERIT),
    SystemRow("{broker}", 1, lambda s: _INHERITED if s.broker_topic_enabled else _ONLY_INHERIT),
    SystemRow(names.OFFSET_MOVED_TOPIC),
    SystemRow(names.SCHEDULE_TOPIC, lambda s: s.delay_levels),
    SystemRow("{trace}", is_wanted=lambda s: s.trace_topic_enabled),
    SystemRow("{cluster}_REPLY_TOPIC"),
    SystemRow("rmq_sys_REVIVE_LOG_{cluster}", lambda s: s.revive_queues),
    SystemRow("rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, _ONLY_INHERIT),
    SystemRow(names.HALF_TOPIC),
    SystemRow(names.OP_HALF_TOPIC),
    SystemRow(names.TIMER_TOPIC, is_wanted=lambda s: s.timer_enabled),
)


@dataclass(frozen=True, slots=True)
class TopicPage:
    """An answer to GET_ALL_TOPIC_CONFIG."""

    table: TopicConfigTable
    total: int


class TopicTable:
    """All topics of a broker. `now` is the time of day, in seconds since the epoch."""

    def __init__(self, settings: TopicSettings, *, now: float) -> None:
        self._settings = settings
        own = [row.config(settings) for row in SYSTEM_ROWS if row.is_wanted(settings)]
        #: Always the same object: `get` is called for every message, without a detour.
        self._topics = {config.topic_name: config for config in own}
        self.get: Callable[[str], TopicConfig | None] = self._topics.get
        self._system = names.SYSTEM_TOPICS | self._topics.keys()
        self._changed: set[str] = set()
        self.data_version = first_version(now)
        #: Increases with every change of what the file says.
        self.revision = 0

    # Lookups.

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(self._topics.values())

    def is_system(self, topic: str) -> bool:
        """Whether administration may not change it."""
        return topic in self._system or topic.startswith(names.SYSTEM_TOPIC_PREFIX)

    def system_topics(self) -> frozenset[str]:
        """The names that belong to the system, whether they exist here or not."""
        return frozenset(self._system)

    def is_order(self, topic: str) -> bool:
        config = self._topics.get(topic)
        return config is not None and config.order

    # Sending.

    def check_for_send(self, topic: str) -> None:
        """Refuse topics that producers may not send to: checks 5 and 6 of a send."""
        if topic in self._topics and topic not in names.NOT_FOR_PRODUCERS:
            return  # it could not have been created with a bad name
        check_topic(topic)
        if topic in names.NOT_FOR_PRODUCERS:
            raise Refused(
                ResponseCode.NO_PERMISSION, f"sending to topic {topic!r} is not allowed: it is ours"
            )

    def for_send(
        self, topic: str, *, template: str, queues: int, unit_mode: bool = False, now: float
    ) -> TopicConfig:
        """The topic to send to, created like `template` if it is missing: check 7 of a send.

        Refuses with TOPIC_NOT_EXIST when it may not be created.
        """
        config = self._topics.get(topic)
        if config is not None:
            return config
        is_retry = topic.startswith(names.RETRY_PREFIX)
        create = "" if is_retry else f"; create it with: orbitmq topic create {topic}"
        if len(self._topics) >= self._settings.max_auto:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {topic!r} does not exist, and with {len(self._topics)} topics the broker "
                f"makes no more by itself (max_auto_topics){create}",
            )
        flag = 0
        if unit_mode:
            flag = UNIT_SUBSCRIPTION if is_retry else UNIT
        config = self._like_template(topic, template, queues, flag)
        if config is None and is_retry:
            config = _plain(topic, 1, flag)
        if config is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {topic!r} does not exist and cannot be made like {template!r}{create}",
            )
        return self._put(config, now)

    def _like_template(
        self, topic: str, template: str, queues: int, flag: int
    ) -> TopicConfig | None:
        model = self._topics.get(template)
        if model is None or not is_inherited(model.perm):
            return None
        if template == names.AUTO_CREATE_TOPIC and not self._settings.auto_create:
            # In the file from a time when it was on.
            return None
        count = max(0, min(queues, model.write_queue_nums))
        return TopicConfig(
            topic_name=topic,
            read_queue_nums=count,
            write_queue_nums=count,
            perm=model.perm & ~_ONLY_INHERIT,
            topic_filter_type=model.topic_filter_type,
            topic_sys_flag=flag,
        )

    # Topics of groups.

    def ensure_retry(
        self,
        group: str,
        queues: int,
        *,
        is_order: bool | None = None,
        unit_mode: bool = False,
        now: float,
    ) -> TopicConfig:
        """The retry topic of a group. `is_order` follows the group's subscription, if given.

        Apache's broker clears the order flag with every send-back, and the next heartbeat sets it
        again. Here only heartbeats change it.
        """
        topic = names.RETRY_PREFIX + group
        queues = max(0, min(queues, self._settings.max_queues))
        config = self._topics.get(topic)
        if config is None:
            made = _plain(topic, queues, UNIT_SUBSCRIPTION if unit_mode else 0)
            return self._put(msgspec.structs.replace(made, order=bool(is_order)), now)
        if is_order is None or is_order == config.order:
            return config
        return self._put(msgspec.structs.replace(config, order=is_order), now)

    def ensure_dead_letter(self, group: str, *, now: float) -> TopicConfig:
        """The dead-letter topic of a group."""
        return self.ensure(_plain(names.dead_letter_topic(group), 1, 0), now=now)

    def ensure(self, config: TopicConfig, *, now: float) -> TopicConfig:
        """The topic, created as `config` says if it is missing."""
        return self._topics.get(config.topic_name) or self._put(config, now)

    # Administration.

    def update(self, config: TopicConfig, *, now: float) -> TopicConfig:
        """Create or change a topic; keys of `config.attributes` carry + or -.

        An update that changes nothing leaves the version as it is.
        """
        topic = config.topic_name
        check_topic(topic)
        self._check_not_system(topic, "changed")
        _check_numbers(config, self._settings.max_queues)
        if config.attributes.get("+" + MESSAGE_TYPE) == MIXED and (
            not self._settings.mixed_types_allowed
        ):
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic!r}: message type {MIXED} is not supported unless it is allowed by "
                "the setting mixed_types_allowed",
            )
        present = self._topics.get(topic)
        attributes = changed_attributes(
            TOPIC_ATTRIBUTES, None if present is None else present.attributes, config.attributes
        )
        config = msgspec.structs.replace(config, attributes=attributes)
        return config if config == present else self._put(config, now)

    def delete(self, topic: str, *, now: float) -> TopicConfig | None:
        """Remove a topic; None when it did not exist, which is no error."""
        if not topic or topic.isspace():
            raise Refused(ResponseCode.INVALID_PARAMETER, "the specified topic is blank")
        self._check_not_system(topic, "deleted")
        config = self._topics.pop(topic, None)
        if config is not None:
            self._note(topic, now)
        return config

    def apply_order_config(self, topics: Iterable[str], *, now: float) -> None:
        """Mark the topics that a name server lists as order topics."""
        for topic in topics:
            config = self._topics.get(topic)
            if config is not None and not config.order:
                self._put(msgspec.structs.replace(config, order=True), now)

    def renew_version(self, *, now: float) -> None:
        """Count the whole table as changed: the registration of every topic is different."""
        self.data_version = next_version(self.data_version, now)
        self.revision += 1

    def _check_not_system(self, topic: str, what: str) -> None:
        if self.is_system(topic):
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic!r} belongs to the system and cannot be {what}",
            )

    def _put(self, config: TopicConfig, now: float) -> TopicConfig:
        self._topics[config.topic_name] = config
        self._note(config.topic_name, now)
        return config

    def _note(self, topic: str, now: float) -> None:
        self._changed.add(topic)
        self.data_version = next_version(self.data_version, now)
        self.revision += 1

    # The file, name servers, slaves and tools.

    def load(self, file: TopicConfigTable) -> None:
        """Take over a file, in place of the topics of the start."""
        _tell_without_effect(file.topic_config_table.values())
        self._topics.update(file.topic_config_table)
        if file.data_version is not None:
            self.data_version = file.data_version
        self.revision += 1

    def replace(self, table: TopicConfigTable) -> None:
        """Become a copy of a master's table."""
        if table.data_version != self.data_version:
            before = self._topics
            _tell_without_effect(
                config
                for name, config in table.topic_config_table.items()
                if name not in before or before[name].attributes != config.attributes
            )
            self._topics.clear()
            self._topics.update(table.topic_config_table)
            self.data_version = table.data_version or self.data_version
            self.revision += 1

    def file(self) -> TopicConfigTable:
        """A copy for topics.json."""
        return TopicConfigTable(
            data_version=self.data_version, topic_config_table=dict(self._topics)
        )

    def take_changed(self) -> frozenset[str]:
        """The names that changed since the last call."""
        changed = frozenset(self._changed)
        self._changed.clear()
        return changed

    def registration(self, broker_perm: int, only: Iterable[str] | None = None) -> TopicConfigTable:
        """The topics for name servers: all, or `only` some, with the broker's permission."""
        wanted = self._topics.values() if only is None else self._existing(only)
        if broker_perm & READ_WRITE != READ_WRITE:
            wanted = [
                msgspec.structs.replace(config, perm=config.perm & broker_perm) for config in wanted
            ]
        return self._table({config.topic_name: config for config in wanted})

    def page(self, request: PageRequest, largest: int = LARGEST_PAGE) -> TopicPage:
        """The topics that answer GET_ALL_TOPIC_CONFIG."""
        entries = page(self._topics, self.data_version, request, largest)
        return TopicPage(self._table(entries), len(self._topics))

    def _existing(self, topics: Iterable[str]) -> list[TopicConfig]:
        return [self._topics[topic] for topic in topics if topic in self._topics]

    def _table(self, entries: Mapping[str, TopicConfig]) -> TopicConfigTable:
        return TopicConfigTable(
            data_version=self.data_version,
            mapping_data_version=DataVersion(),
            topic_config_table=dict(entries),
            topic_queue_mapping_detail_map={},
            topic_queue_mapping_info_map={},
        )


def _plain(topic: str, queues: int, flag: int) -> TopicConfig:
    return TopicConfig(
        topic_name=topic,
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=READ_WRITE,
        topic_sys_flag=flag,
    )


def _tell_without_effect(configs: Iterable[TopicConfig]) -> None:
    for config in configs:
        if config.attributes and (
            idle := list(without_effect(TOPIC_ATTRIBUTES, config.attributes))
        ):
            log.warning(
                "the topic has attributes that this broker does not act on",
                extra={"topic": config.topic_name, "attributes": ", ".join(idle)},
            )


def reading(config: TopicConfig) -> tuple[int, int]:
    """The settings that decide which queues of a topic may be pulled, and by whom."""
    return config.perm, config.read_queue_nums


def _check_numbers(config: TopicConfig, max_queues: int) -> None:
    for field, value, limit in (
        ("readQueueNums", config.read_queue_nums, max_queues + 1),
        ("writeQueueNums", config.write_queue_nums, max_queues + 1),
        ("perm", config.perm, int(Perm.PRIORITY)),
    ):
        if not 0 <= value < limit:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {config.topic_name!r}: {field} must be from 0 to {limit - 1}, got {value}",
            )
