"""Consumer groups and what they are allowed: Apache's "subscription groups".

A group comes into being when somebody looks it up who needs it (`find`: heartbeat, pull,
send-back, a message to its retry topic, unregistering) and auto-creation is on, or by
administration. Commits and resets only look whether it is there (`in`).

Anybody can name groups, tens of thousands in one heartbeat, and each is kept for good with a retry
topic of its own. So there is a number from which on no more come into being by themselves, and not
too many do in one second, in which others are to be served as well; clients come again. Whoever is
refused for that reason is told so (`missing`): nothing else would tell a consumer why it gets
nothing.

Beside its configuration a group may be forbidden single topics: a set of bits for each, of which
the read bit stops pulls. Apache's broker drops all of a group's bits when one topic's are
cleared, and does not save that; here only that topic's go, and it is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from orbitmq.broker import names
from orbitmq.broker.attributes import GROUP_ATTRIBUTES, changed_attributes
from orbitmq.broker.dataversion import first_version, next_version
from orbitmq.broker.errors import Refused
from orbitmq.broker.paging import LARGEST_PAGE, PageRequest, page
from orbitmq.broker.permissions import READ_BIT
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig, SubscriptionGroupTable
from orbitmq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

#: Groups that come into being in one second by themselves; each costs about 0.1 ms.
MADE_PER_SECOND = 1000

#: What there is from the start. All may broadcast, which is also the default.
PREDEFINED_GROUPS = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)


@dataclass(frozen=True, slots=True)
class GroupPage:
    """An answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""

    table: SubscriptionGroupTable
    total: int


class GroupTable:
    """All groups of a broker. `now` is the time of day, in seconds since the epoch."""

    def __init__(
        self,
        *,
        auto_create: bool = True,
        max_auto: int = 10_000,
        max_queues: int = 16_384,
        now: float,
    ) -> None:
        """`max_auto` is the number of groups from which on none is made by being looked up, and
        `max_queues` what the retry topic of a group may have."""
        self._auto_create = auto_create
        self._max_auto = max_auto
        self._max_queues = max_queues
        self._second = 0  #: of the time of day
        self._made = 0  #: groups that were made in it
        self._refused = 0  #: groups that were not made because there are too many
        self._groups = {
            name: SubscriptionGroupConfig(group_name=name) for name in PREDEFINED_GROUPS
        }
        self._forbidden: dict[str, dict[str, int]] = {}
        self.data_version = first_version(now)
        #: Counts what the file would say differently; the saver compares it with what it saved.
        self.revision = 0

    # Looking.

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """The group if it is there."""
        return self._groups.get(group)

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SubscriptionGroupConfig]:
        return iter(self._groups.values())

    def find(self, group: str, *, now: float) -> SubscriptionGroupConfig | None:
        """The group, made now if that is allowed; None when it is not there and may not be made."""
        config = self._groups.get(group)
        if config is not None:
            return config
        may_be_made = self._auto_create or group.startswith(names.SYSTEM_GROUP_PREFIX)
        if not may_be_made or names.group_problem(group) is not None:
            return None
        if not self._has_room(now):
            self._log_refusal(group)
            return None
        self._made += 1
        return self._put(SubscriptionGroupConfig(group_name=group), now)

    def require(self, group: str, *, now: float) -> SubscriptionGroupConfig:
        """The same for those who cannot do without it; raises `Refused`."""
        config = self.find(group, now=now)
        if config is None:
            raise self.absent(group)
        return config

    def absent(self, group: str) -> Refused:
        """Why a group is not there: it is not going to be, or it is when its members come again."""
        return self.missing(group) or Refused(
            ResponseCode.SYSTEM_BUSY,
            f"subscription group [{names.shown(group)}] does not exist yet: no more than "
            f"{MADE_PER_SECOND} are made in a second, and it is made when its members come again",
        )

    def missing(self, group: str) -> Refused | None:
        """Why a group is not there and is not going to be; None when it is, or may be made."""
        if group in self._groups:
            return None
        remedy = f"create it with: orbitmq group create {group}"
        if (problem := names.group_problem(group)) is not None:
            why, remedy = problem, "choose another name"
        elif not self._auto_create and not group.startswith(names.SYSTEM_GROUP_PREFIX):
            why = "the broker makes none by itself (auto_create_group is off)"
        elif len(self._groups) >= self._max_auto:
            why = (
                f"with {len(self._groups)} groups the broker makes no more by itself "
                f"(max_auto_groups is {self._max_auto})"
            )
            remedy += ", delete some that nobody needs, or raise that setting"
        else:
            return None
        return Refused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group [{names.shown(group)}] does not exist: {why}; {remedy}",
        )

    def is_full_for_now(self, now: float) -> bool:
        """Whether groups that nobody made have to wait for the next second."""
        return int(now) == self._second and self._made >= MADE_PER_SECOND

    def _has_room(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._made = int(now), 0
        return len(self._groups) < self._max_auto and self._made < MADE_PER_SECOND

    def _log_refusal(self, group: str) -> None:
        self._refused += 1
        if self._refused % 1000 == 1:
            log.warning(
                "a group was not made by itself: there are %d, of which %d came in this second; "
                "allowed are %d and %d (time %d)",
                len(self._groups),
                self._made,
                self._max_auto,
                MADE_PER_SECOND,
                self._refused,
                extra={"group": group},
            )

    # Administration.

    def update(self, config: SubscriptionGroupConfig, *, now: float) -> SubscriptionGroupConfig:
        """Create or change a group. An update that changes nothing leaves the version as it is.

        Raises `Refused`.
        """
        self.check(config)
        present = self._groups.get(config.group_name)
        attributes = changed_attributes(
            GROUP_ATTRIBUTES, None if present is None else present.attributes, config.attributes
        )
        config = msgspec.structs.replace(config, attributes=attributes)
        return config if config == present else self._put(config, now)

    def check(self, config: SubscriptionGroupConfig) -> None:
        """Raises `Refused` for what no group may be. Apache's broker looks at the name only.

        -1 retries are legal, and dead letters at the first failure, as at Apache's; so is a group
        without retry queues, whose failures are dropped.
        """
        names.check_group(config.group_name)
        for field, value, low, high in (
            ("retryQueueNums", config.retry_queue_nums, 0, self._max_queues),
            ("retryMaxTimes", config.retry_max_times, -1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise Refused(
                    ResponseCode.INVALID_PARAMETER,
                    f"group {config.group_name!r}: {field} must be from {low} to {high}, "
                    f"got {value}",
                )

    def delete(self, group: str, *, now: float) -> SubscriptionGroupConfig | None:
        """Forget a group and what it was forbidden; None when there was none, which is no error."""
        config = self._groups.pop(group, None)
        if self._forbidden.pop(group, None) is not None or config is not None:
            self._note(now)
        return config

    def _put(self, config: SubscriptionGroupConfig, now: float) -> SubscriptionGroupConfig:
        self._groups[config.group_name] = config
        self._note(now)
        return config

    def _note(self, now: float) -> None:
        self.data_version = next_version(self.data_version, now)
        self.revision += 1

    # What is forbidden.

    def is_forbidden(self, group: str, topic: str, bit: int = READ_BIT) -> bool:
        """Whether the group may not do this with the topic; by default: pull it."""
        # Asked on every pull, and almost always there is nothing in it.
        return bool(self._forbidden) and self._bits(group, topic) >> bit & 1 == 1

    def forbid(
        self, group: str, topic: str, *, bit: int = READ_BIT, is_forbidden: bool, now: float
    ) -> None:
        """Set or clear one bit."""
        before = self._bits(group, topic)
        after = before | 1 << bit if is_forbidden else before & ~(1 << bit)
        if after == before:
            return
        topics = self._forbidden.setdefault(group, {})
        if after:
            topics[topic] = after
        else:
            del topics[topic]
        if not topics:
            del self._forbidden[group]
        self._note(now)

    def _bits(self, group: str, topic: str) -> int:
        return max(0, self._forbidden.get(group, {}).get(topic, 0))

    # The file, slaves and tools.

    def load(self, file: SubscriptionGroupTable) -> None:
        """Take over what a file says, over what the broker has by itself."""
        self._groups.update(file.subscription_group_table)
        self._forbidden.update(
            {group: dict(topics) for group, topics in file.forbidden_table.items() if topics}
        )
        if file.data_version is not None:
            self.data_version = file.data_version
        self.revision += 1

    def replace(self, table: SubscriptionGroupTable) -> None:
        """Become a copy of a master's table."""
        if table.data_version != self.data_version:
            self._groups = {}
            self._forbidden = {}
            self.load(table)

    def file(self) -> SubscriptionGroupTable:
        """A copy for subscriptionGroup.json; what is forbidden may concern groups yet to come."""
        return self._table(dict(self._groups), self._forbidden)

    def page(self, request: PageRequest, largest: int = LARGEST_PAGE) -> GroupPage:
        """The groups that answer GET_ALL_SUBSCRIPTIONGROUP_CONFIG, and what they are forbidden."""
        entries = page(self._groups, self.data_version, request, largest)
        groups = self._forbidden if request.is_for_all else entries
        return GroupPage(self._table(entries, groups), len(self._groups))

    def _table(
        self, entries: dict[str, SubscriptionGroupConfig], groups: Collection[str]
    ) -> SubscriptionGroupTable:
        return SubscriptionGroupTable(
            data_version=self.data_version,
            forbidden_table={
                group: dict(topics) for group, topics in self._forbidden.items() if group in groups
            },
            subscription_group_table=entries,
        )


def consumption(config: SubscriptionGroupConfig) -> tuple[bool, bool]:
    """What decides whether members of a group may pull at all."""
    return config.consume_enable, config.consume_broadcast_enable
