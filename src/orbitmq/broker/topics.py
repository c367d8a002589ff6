"""The topics of a broker: the table, its changes, versions and pages; permissions and attributes.

A topic is created with the broker (`system_topics`), by administration (`update`), by the first
send (`for_send`), or for a group (`ensure_retry`, `ensure_dead_letter`). Every change gives the
table another DataVersion, which name servers and slaves compare, and a higher `revision`, after
which topics.json is saved; the changed names are kept until `take_changed`, for the registration.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import msgspec

from orbitmq import names
from orbitmq.broker.errors import Refused, check_topic
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies import DataVersion, TopicConfig, TopicConfigTable
from orbitmq.wire.codes import BodyError, ResponseCode
from orbitmq.wire.javajson import decode_body

# Permissions: bits on the wire, letters for people.


class Perm(enum.IntFlag):
    """Bits of a permission. Other bits are kept and mean nothing."""

    #: Topics that are created by sending use this one as their template.
    INHERIT = 1
    WRITE = 2
    READ = 4
    PRIORITY = 8


READ_WRITE = int(Perm.READ | Perm.WRITE)

#: The index of the read bit in a group's forbidden bits.
READ_BIT = 2

_READ = int(Perm.READ)
_WRITE = int(Perm.WRITE)
_INHERIT = int(Perm.INHERIT)


def may_read(perm: int) -> bool:
    """Whether consumers may pull."""
    return perm & _READ != 0


def may_write(perm: int) -> bool:
    """Whether producers may send."""
    return perm & _WRITE != 0


def is_inherited(perm: int) -> bool:
    """Whether it is a template for topics made by sending."""
    return perm & _INHERIT != 0


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
    timer_enabled: bool = True
    delay_levels: int = 18
    #: The most queues of a topic: a request about a topic looks at all of them.
    max_queues: int = 16_384


def system_topics(settings: TopicSettings) -> list[TopicConfig]:
    """The topics of the start, in Apache's order."""
    cluster, broker = settings.cluster, settings.broker_name
    of_cluster = _INHERITED if settings.cluster_topic_enabled else _ONLY_INHERIT
    of_broker = _INHERITED if settings.broker_topic_enabled else _ONLY_INHERIT
    rows = (
        (names.SELF_TEST_TOPIC, 1, READ_WRITE, True),
        (names.AUTO_CREATE_TOPIC, settings.default_queues, _INHERITED, settings.auto_create),
        (names.BENCHMARK_TOPIC, 1024, READ_WRITE, True),
        (cluster, 16, of_cluster, True),
        (broker, 1, of_broker, True),
        (names.OFFSET_MOVED_TOPIC, 1, READ_WRITE, True),
        (names.SCHEDULE_TOPIC, settings.delay_levels, READ_WRITE, True),
        (names.TRACE_TOPIC, 1, READ_WRITE, settings.trace_topic_enabled),
        (f"{cluster}_REPLY_TOPIC", 1, READ_WRITE, True),
        (f"rmq_sys_REVIVE_LOG_{cluster}", 8, READ_WRITE, True),
        (f"rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, _ONLY_INHERIT, True),
        (names.HALF_TOPIC, 1, READ_WRITE, True),
        (names.OP_HALF_TOPIC, 1, READ_WRITE, True),
        (names.TIMER_TOPIC, 1, READ_WRITE, settings.timer_enabled),
    )
    return [
        TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
        for name, queues, perm, is_wanted in rows
        if is_wanted
    ]


@dataclass(frozen=True, slots=True)
class TopicPage:
    """An answer to GET_ALL_TOPIC_CONFIG."""

    table: TopicConfigTable
    total: int


class TopicTable:
    """All topics of a broker. `now` is the time of day, in seconds since the epoch."""

    def __init__(self, settings: TopicSettings, *, now: float) -> None:
        self._settings = settings
        #: Always the same object: `get` is called for every message, without a detour.
        self._topics = {config.topic_name: config for config in system_topics(settings)}
        self.get: Callable[[str], TopicConfig | None] = self._topics.get
        self._system = names.SYSTEM_TOPICS | self._topics.keys()
        self._changed: set[str] = set()
        self.data_version = first_version(now)
        #: Increases with every change of the content of the file.
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
        if config.attributes.get("+" + MESSAGE_TYPE) == MIXED:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic!r}: message type {MIXED} is not supported; declare one of the types",
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
    for name, value, limit in (
        ("readQueueNums", config.read_queue_nums, max_queues + 1),
        ("writeQueueNums", config.write_queue_nums, max_queues + 1),
        ("perm", config.perm, int(Perm.PRIORITY)),
    ):
        if not 0 <= value < limit:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {config.topic_name!r}: {name} must be from 0 to {limit - 1}, got {value}",
            )


# Attributes (`+key=value` sets, `-key` removes). A change is a text, or a map whose keys have the
# sign. It is applied or refused as a whole, because an attribute may be fixed when the topic is
# created. Attributes that Apache's brokers act on and this one does not are refused, with the
# reason; one in an Apache broker's file is kept (`without_effect`).


@dataclass(frozen=True, slots=True)
class Attribute:
    """A key that topics may have: one of `choices`, or without any a number from `lowest` on."""

    default: str
    is_changeable: bool
    choices: frozenset[str] = frozenset()
    lowest: int = 0
    #: Values that Apache's brokers accept, and what this one does instead.
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def accepts(self, value: str) -> bool:
        if self.choices:
            return value in self.choices
        digits = value.removeprefix("-") if value[:1] == "-" else value.removeprefix("+")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            return False
        return self.lowest <= int(value) < 2**63

    @property
    def allowed(self) -> str:
        return ", ".join(sorted(self.choices)) or f"a whole number from {self.lowest}"


MESSAGE_TYPE = "message.type"
MIXED = "MIXED"

TOPIC_ATTRIBUTES: Mapping[str, Attribute] = {
    "queue.type": Attribute(
        "SimpleCQ",
        False,
        frozenset({"SimpleCQ"}),
        unsupported={"BatchCQ": "this broker has an entry in the queue for every message"},
    ),
    "cleanup.policy": Attribute(
        "DELETE",
        False,
        frozenset({"DELETE"}),
        unsupported={
            "COMPACTION": "this broker does not compact, it deletes messages by time and size"
        },
    ),
    MESSAGE_TYPE: Attribute(
        "NORMAL",
        True,
        frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", MIXED}),
    ),
    "reserve.time": Attribute("-1", True, lowest=-1),
}

#: Apache has none for groups yet.
GROUP_ATTRIBUTES: Mapping[str, Attribute] = {}


def parse_changes(text: str | None) -> dict[str, str]:
    """`+a=1,-b` as a map with signed keys."""
    changes: dict[str, str] = {}
    for piece in text.split(",") if text else ():
        key, equals, value = piece.partition("=")
        if key[:1] != ("+" if equals else "-") or (equals and (not value or "=" in value)):
            _refuse(f"attribute change {piece!r} is not of the form +key=value or -key")
        if key in changes:
            _refuse(f"attribute {key[1:]!r} is changed twice")
        changes[key] = value
    return changes


def changed_attributes(
    known: Mapping[str, Attribute],
    present: Mapping[str, str] | None,
    changes: Mapping[str, str],
) -> dict[str, str]:
    """The attributes after `changes`; `present` is None for what is being created."""
    attributes = dict(present or {})
    seen: set[str] = set()
    for signed, value in changes.items():
        sign, key = signed[:1], signed[1:]
        if sign not in ("+", "-") or not key or "+" in key or "-" in key:
            _refuse(f"attribute key {signed!r} must be + or - and a name without them")
        if key in seen:
            _refuse(f"attribute {key!r} is changed twice")
        seen.add(key)
        attribute = known.get(key)
        if attribute is None:
            _refuse(
                f"unsupported attribute {key!r}; known are {', '.join(sorted(known)) or 'none'}"
            )
        if present is None and sign == "-":
            _refuse(f"attribute {key!r} cannot be taken away from what does not exist yet")
        if present is not None and not attribute.is_changeable:
            _refuse(f"attribute {key!r} is fixed when the topic is created")
        if sign == "-":
            if key not in attributes:
                _refuse(f"attribute {key!r} is not set and cannot be taken away")
            del attributes[key]
        else:
            if not attribute.accepts(value):
                reason = attribute.unsupported.get(value)
                _refuse(
                    f"attribute {key!r} must be {attribute.allowed}, got {value!r}"
                    + (f": {reason}" if reason else "")
                )
            attributes[key] = value
    return attributes


def without_effect(known: Mapping[str, Attribute], present: Mapping[str, str]) -> Iterator[str]:
    """Attributes that an Apache broker would act on and this one does not, as `key=value`."""
    for key, value in present.items():
        attribute = known.get(key)
        if attribute is not None and value in attribute.unsupported:
            yield f"{key}={value}"


def _refuse(remark: str) -> NoReturn:
    raise Refused(ResponseCode.SYSTEM_ERROR, remark)
