"""Every setting of a broker, with RocketMQ's default unless a comment says otherwise.

Units are seconds and bytes. The comment has Apache's name where it differs much. A value that
cannot work fails at construction, and the error names the setting.

Some settings may be changed while the broker runs (`Parts.change_settings`): the permission, and
those of `SendSettings` and `PullSettings`. The others need a restart.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orbitmq import names
from orbitmq.broker.groups import CLIENT_LIFE, CONNECTION_ROOM, PRODUCER_GROUPS
from orbitmq.broker.locks import MOST_LOCKS
from orbitmq.broker.progress import CommitRule
from orbitmq.broker.topics import READ_WRITE, TopicSettings
from orbitmq.errors import OrbitError, SettingError
from orbitmq.remoting.settings import (
    Address,
    AddressError,
    ServerSettings,
    check_not_negative,
    check_positive,
    parse_address,
)
from orbitmq.remoting.tls import ClientTls
from orbitmq.store.queues import ENTRY_SIZE
from orbitmq.store.settings import FlushPolicy, StoreSettings

KIB = 1024
MIB = 1024 * KIB

DEFAULT_PORT = 10911
NAME_SERVER_PORT = 9876
#: From the port that a broker listens on to the one on which it serves slaves.
HA_DISTANCE = 1

#: In seconds. Apache keeps its `registerNameServerPeriod` between 10 and 60 s.
LONGEST_REGISTRATION_INTERVAL = 60.0

#: Addresses that mean "every interface", to which clients cannot connect.
WILDCARDS = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104  # compared with, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettings:
    """What producers may send, and how they are answered."""

    max_message_size: int = 4 * MIB  #: body of a message, or of a whole batch
    region: str = "DefaultRegion"  #: is part of every message and answer (`regionId`)
    trace_on: bool = True  #: likewise
    accept_from: float = 0.0  #: epoch seconds before which sends are refused
    reject_transactions: bool = False  #: `rejectTransactionMessage`
    flush_timeout: float = 5.0  #: wait for a synchronous flush, then FLUSH_DISK_TIMEOUT
    waiting_messages: int = 10_000  #: sends that wait for a flush; above, others get SYSTEM_BUSY
    waiting_bytes: int = 256 * MIB  #: of their bodies; above, likewise

    def __post_init__(self) -> None:
        check_positive("send", self, "max_message_size", "flush_timeout", "waiting_messages")
        check_positive("send", self, "waiting_bytes")
        if not self.region.replace("-", "").replace("_", "").isalnum():
            raise SettingError(
                f"send.region must consist of letters, digits, - and _, got {self.region!r}"
            )


class Transfer(enum.Enum):
    """The way of pulled messages from the log to a socket."""

    #: Through the heap: copied first. A file that is deleted meanwhile is given up at once, and a
    #: disk that fails does so here and not in the middle of a write.
    HEAP = "heap"
    #: Straight from the file, which is mapped, as Apache's broker does it; `sendfile` was measured
    #: and is no faster. Stretches below 16 KiB are gathered first: a copy costs less than a vector.
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """What consumers may pull, and how long pulls may wait."""

    long_polling: bool = True  #: off: empty pulls are held for `short_hold`, whatever they ask
    short_hold: float = 1.0  #: without `long_polling`, and for pulls without room to wait longer
    longest_hold: float = 120.0  #: whatever a client asks; clients ask for 15 s
    #: Pulls that may wait for messages. Beyond that, connections with more than an equal share have
    #: pulls answered after `short_hold`. Apache has no bound.
    held_requests: int = 100_000
    held_per_connection: int = 16_384  #: of one connection; more are answered after `short_hold`
    #: Pulls that may wait for that answer, which also limits such answers in `short_hold`. Further
    #: ones are answered SYSTEM_BUSY, after which Java's clients wait for seconds.
    put_off_requests: int = 10_000
    put_off_per_connection: int = 2_500  #: of one connection; likewise
    #: Whether messages are copied on their way to a socket (`transferMsgByHeap`; Apache's do).
    transfer: Transfer = Transfer.FILE
    lite_pull: bool = True  #: whether code 361 is served
    slave_read_enable: bool = False  #: whether slaves are suggested, and serve reads
    reject_pull_consumer: bool = False  #: serve only groups that send heartbeats
    #: SQL92 subscriptions. Apache's default is off, which surprises users.
    enable_property_filter: bool = True
    #: Bytes that the pulls of a connection may send in one turn. The rest waits for the next, so
    #: that a consumer with a long backlog does not delay those at the tail.
    step_bytes: int = 256 * KIB

    def __post_init__(self) -> None:
        check_positive("pull", self, "short_hold", "longest_hold", "step_bytes")
        check_not_negative("pull", self, "held_requests", "held_per_connection")
        check_not_negative("pull", self, "put_off_requests", "put_off_per_connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSettings:
    """How the progress of groups is kept."""

    save_interval: float = 5.0  #: a crash loses at most this much of it
    rule: CommitRule = field(default_factory=CommitRule)  #: which commits may move it back
    #: A group without progress begins at 0 in a queue whose first message is still there and in
    #: memory, even if it asks for the last offset, as Apache does. Strict: it begins at the end.
    strict_last: bool = False
    #: Whether the answer for a queue that never had a message is 0, as in 4.x, and not "not found",
    #: as in 5.x: Apache's clients then ask for the end, and skip what came in between.
    zero_for_empty: bool = True

    def __post_init__(self) -> None:
        check_positive("progress", self, "save_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class DelaySettings:
    """How delayed and timer messages are delivered. The delays of levels are the store's."""

    save_interval: float = 10.0  #: a crash repeats at most what was delivered in this time
    step_messages: int = 256  #: delivered in one step of the loop
    timer_max_delay: float = 259_200.0  #: never longer than messages are kept (`timerMaxDelaySec`)
    #: Timer messages that may wait; each takes about 45 bytes of memory. Apache limits the rate.
    timer_max_pending: int = 5_000_000
    #: Whether timer messages can be taken back (`recallMessageEnable`, which is off in Apache).
    recall: bool = True

    def __post_init__(self) -> None:
        check_positive("delays", self, "save_interval", "step_messages", "timer_max_delay")
        check_positive("delays", self, "timer_max_pending")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSettings:
    """When producers are asked about open half messages."""

    check_interval: float = 30.0  #: how often half messages are checked
    timeout: float = 6.0  #: time since its birth without questions about a half message
    check_max: int = 15  #: after this number of questions it is given up
    step_messages: int = 256  #: half messages examined in one step of the loop

    def __post_init__(self) -> None:
        check_positive("transactions", self, "check_interval", "check_max", "step_messages")
        check_not_negative("transactions", self, "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupSettings:
    """How long producers' ids of messages (`dedup_id`) are remembered. Not in Apache."""

    enabled: bool = True  #: off: ids are stored and mean nothing
    window: float = 86_400.0  #: seconds for which an id is remembered, while its message is kept
    topic_ids: int = 1_000_000  #: ids of one topic; above this, the oldest are forgotten
    #: Ids of all topics; above this, the largest one's oldest. Each takes about 160 bytes of
    #: memory, and 20 on the disk.
    ids: int = 2_000_000

    def __post_init__(self) -> None:
        check_positive("dedup", self, "window", "topic_ids", "ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """How replies reach the requesters."""

    store: bool = True  #: whether replies are stored as well (`storeReplyMessageEnable`)
    push_timeout: float = 10.0  #: for the requester to take it

    def __post_init__(self) -> None:
        check_positive("replies", self, "push_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationSettings:
    """How the broker registers with name servers."""

    interval: float = 30.0  #: between complete registrations; at most 60 s, as with Apache
    timeout: float = 6.0  #: for one name server to answer; Apache waits for 24 s
    #: Silence after which name servers forget the broker; None leaves it to them (120 s).
    heartbeat_timeout: float | None = None

    def __post_init__(self) -> None:
        check_positive("registration", self, "interval", "timeout")
        if self.interval > LONGEST_REGISTRATION_INTERVAL:
            raise SettingError(
                f"registration.interval must be at most {LONGEST_REGISTRATION_INTERVAL:g} s, got "
                f"{self.interval}; name servers forget a broker that is silent for 120 s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Which accounts may use the broker."""

    accounts: Path | None = None  #: a file of accounts; None: all clients may use the broker
    check_interval: float = 2.0  #: how often the file is checked for changes

    def __post_init__(self) -> None:
        check_positive("access", self, "check_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutwardSettings:
    """How the broker shows itself to others: name servers, and the master that it follows."""

    tls: ClientTls | None = None  #: None: without TLS
    access_key: str | None = None  #: of an account at the master, for a slave
    secret_key: str | None = field(default=None, repr=False)  #: of that account

    def __post_init__(self) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise SettingError("outward.access_key and outward.secret_key belong together")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationSettings:
    """How a master's log gets to its slaves. A broker with `broker_id` above 0 is a slave."""

    serve: bool = False  #: whether slaves may connect; Apache's brokers always listen
    #: Where; None: the port that the broker listens on + 1 (`haListenPort`), 0: any free one.
    port: int | None = None
    replicas: int = 16  #: connected slaves; above this, others are turned away
    #: Brokers that must have a message before its sender is answered, including the master; 1:
    #: no waiting. Apache's SYNC_MASTER with `inSyncReplicas`.
    in_sync_replicas: int = 1
    copy_timeout: float = 3.0  #: wait for them, then FLUSH_SLAVE_TIMEOUT (`slaveTimeout`)
    max_gap: int = 256 * MIB  #: a slave further behind is not in sync (`haMaxGapNotInSync`)
    transfer_size: int = 32 * KIB  #: of one frame, at most (`haTransferBatchSize`)
    #: Send an empty slave everything. By default it gets the newest file of the log and what
    #: follows, as from Apache's master.
    whole_log: bool = False
    heartbeat: float = 5.0  #: silence after which master and slave each send a heartbeat
    silence: float = 20.0  #: silence after which each closes the connection
    #: The master's address, for a slave without name servers, and where it serves slaves.
    master: str | None = None
    master_ha: str | None = None  #: None: its port + 1
    retry: float = 5.0  #: pause before a slave connects again
    state_interval: float = 60.0  #: how often a slave copies topics, groups and progress

    def __post_init__(self) -> None:
        check_positive(
            "replication", self, "replicas", "in_sync_replicas", "copy_timeout", "max_gap"
        )
        check_positive("replication", self, "transfer_size", "heartbeat", "silence", "retry")
        check_positive("replication", self, "state_interval")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise SettingError(f"replication.port must be from 0 to 65535, got {self.port}")
        if self.transfer_size > 4 * MIB - 12:
            raise SettingError(
                f"replication.transfer_size must leave a frame within 4 MiB, which is what slaves "
                f"take, got {self.transfer_size}"
            )
        if self.heartbeat >= self.silence:
            raise SettingError(
                f"replication.heartbeat must be below replication.silence, got {self.heartbeat} "
                f"and {self.silence}"
            )
        if self.in_sync_replicas > 1 and not self.serve:
            raise SettingError(
                f"replication.in_sync_replicas is {self.in_sync_replicas}, but no slave may "
                "connect; set replication.serve"
            )
        _address("replication.master", self.master)
        _address("replication.master_ha", self.master_ha)


class ArchiveWriter(enum.Enum):
    """Which of the brokers of one name writes the archive; the others wait for it."""

    MASTER = "master"
    SLAVE = "slave"
    #: None of them, but `orbitmq archive run`.
    COMMAND = "command"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """Closed log files as Parquet. With a folder, only archived log files are deleted."""

    #: A folder, or a URI such as s3://bucket/archive; None: nothing is archived.
    folder: str | None = None
    writer: ArchiveWriter = ArchiveWriter.MASTER  #: which broker of a name writes
    interval: float = 10.0  #: between searches for closed log files
    share: float = 0.5  #: of the time of one thread, at most
    #: Whether log files may be deleted that are not archived, when the disk is fuller than
    #: `store.retention.forced_ratio`. By default sends are refused when the disk is full.
    delete_unarchived: bool = False

    def __post_init__(self) -> None:
        check_positive("archive", self, "interval")
        if not 0 < self.share <= 1:
            raise SettingError(f"archive.share must be above 0 and at most 1, got {self.share}")
        if self.folder == "":
            raise SettingError("archive.folder must name a folder or a URI, got an empty text")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Where metrics and health are served."""

    port: int | None = None  #: None: not served; 0: any free one. Apache serves metrics on 5557
    host: str = "127.0.0.1"  #: the pages need no credentials
    connections: int = 32  #: above this, others are turned away
    timeout: float = 10.0  #: for a client to send its request, and to read the answer

    def __post_init__(self) -> None:
        check_positive("http", self, "connections", "timeout")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise SettingError(f"http.port must be from 0 to 65535, got {self.port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """A broker's identity, its data and its behaviour."""

    root: Path  #: the folder of the store, and of `config`
    name: str = "broker-a"  #: its name in routes; a master and its slaves share one
    cluster: str = "DefaultCluster"  #: the cluster that it belongs to
    broker_id: int = 0  #: 0: the master
    #: `host:port` of every name server; none: clients are given the broker's address directly.
    name_servers: tuple[str, ...] = ()
    #: The address for clients, `host` or `host:port`. It is written into every message, and
    #: clients send back to it. By default the one listened on, or the machine's own.
    advertised: str | None = None
    #: Whether the port two below the one listened on is served as well, as by Apache's brokers, for
    #: clients with `vipChannelEnabled` and for Apache's slaves; not when the latter is any free
    #: one. Clients subtract two from what they are given: an `advertised` port has to lead there.
    vip: bool = True
    permission: int = READ_WRITE  #: 6: read and write; 4: read; 2: write; 0: nothing
    auto_create_topic: bool = True  #: whether sending to an unknown topic creates it
    auto_create_group: bool = True  #: whether consuming as an unknown group creates it
    #: Topics, including those of groups, from which on sends create none; administration may.
    max_auto_topics: int = 30_000
    max_auto_groups: int = 10_000  #: groups from which on consumers create none; likewise
    #: Producer groups of one connection; heartbeats that name more are refused after these.
    max_producer_groups: int = PRODUCER_GROUPS
    #: Bytes of memory, about, for the consumer groups of one connection: 1,024 for each group, 512
    #: for each subscription, and their texts; what heartbeats name beyond that is refused.
    max_consumer_bytes: int = CONNECTION_ROOM
    #: Queues that may be locked at the same time, of all groups; more are not granted until some
    #: are free. Each takes about 300 bytes of memory, for up to a minute.
    max_order_locks: int = MOST_LOCKS
    default_topic_queues: int = 8  #: of a topic that a send creates, at most
    max_topic_queues: int = 16_384  #: of any topic that is created or changed; Apache has no bound
    cluster_topic: bool = True  #: whether there is a topic of the cluster's name
    broker_topic: bool = True  #: whether there is a topic of the broker's name
    trace_topic: bool = False  #: whether there is a topic for traces of messages
    timer: bool = True  #: whether messages may be delivered at any time (`timerWheelEnable`)
    client_life: float = CLIENT_LIFE  #: silence after which a client is removed
    notify_consumers: bool = True  #: notify the members of a group when one joins or leaves
    #: Seconds after a start without grants of order locks. Locks are not saved: after a restart a
    #: queue may be given to another client while its owner relies on its lock for up to 30 s, or is
    #: in the middle of a message that it began by then. 60 s close the gap, and orderly consumers
    #: wait for them; 30 s are enough for handlers that take no longer. Apache leaves it open.
    lock_pause: float = 0.0
    clean_interval: float = 10.0  #: between searches for old files
    scan_interval: float = 10.0  #: between searches for silent clients
    tick: float = 0.1  #: how often the store does a part of its own work
    stop_grace: float = 3.0  #: how long a stop waits for answers that are on their way
    send: SendSettings = field(default_factory=SendSettings)
    pull: PullSettings = field(default_factory=PullSettings)
    progress: ProgressSettings = field(default_factory=ProgressSettings)
    delays: DelaySettings = field(default_factory=DelaySettings)
    transactions: TransactionSettings = field(default_factory=TransactionSettings)
    dedup: DedupSettings = field(default_factory=DedupSettings)
    replies: ReplySettings = field(default_factory=ReplySettings)
    registration: RegistrationSettings = field(default_factory=RegistrationSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    outward: OutwardSettings = field(default_factory=OutwardSettings)
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=DEFAULT_PORT))

    def __post_init__(self) -> None:
        check_positive("broker", self, "default_topic_queues", "client_life", "clean_interval")
        check_positive("broker", self, "scan_interval", "tick", "max_topic_queues")
        check_positive("broker", self, "max_auto_topics", "max_auto_groups")
        check_positive("broker", self, "max_producer_groups", "max_order_locks")
        check_positive("broker", self, "max_consumer_bytes")
        check_not_negative("broker", self, "stop_grace", "lock_pause")
        if self.broker_id < 0:
            raise SettingError(f"broker.broker_id must be 0 or more, got {self.broker_id}")
        if not 0 <= self.permission <= 7:
            raise SettingError(f"broker.permission must be from 0 to 7, got {self.permission}")
        for setting in ("name", "cluster"):
            problem = names.topic_problem(getattr(self, setting))
            if problem is not None:
                raise SettingError(f"broker.{setting}: {problem}")
        _address("broker.advertised", self.advertised)
        if self.advertised is not None and _host(self.advertised) in WILDCARDS:
            raise SettingError(
                f"broker.advertised must be an address that clients can reach, got "
                f"{self.advertised!r}; clients would send back to it"
            )
        for name_server in self.name_servers:
            _address("broker.name_servers", name_server)

    @property
    def is_slave(self) -> bool:
        return self.broker_id > 0

    @property
    def topics(self) -> TopicSettings:
        """The settings of the table of topics."""
        return TopicSettings(
            cluster=self.cluster,
            broker_name=self.name,
            auto_create=self.auto_create_topic,
            max_auto=self.max_auto_topics,
            default_queues=self.default_topic_queues,
            max_queues=self.max_topic_queues,
            cluster_topic_enabled=self.cluster_topic,
            broker_topic_enabled=self.broker_topic,
            trace_topic_enabled=self.trace_topic,
            timer_enabled=self.timer,
            delay_levels=len(self.store.delay_levels),
        )

    def name_server_addresses(self) -> tuple[Address, ...]:
        return tuple(
            parse_address(text, default_port=NAME_SERVER_PORT) for text in self.name_servers
        )


def _address(setting: str, text: str | None) -> None:
    if text is None:
        return
    try:
        parse_address(text, default_port=NAME_SERVER_PORT)
    except AddressError as error:
        raise SettingError(f"{setting}: {error}") from error


def _host(text: str) -> str:
    return parse_address(text, default_port=0).host


# The settings of a broker under RocketMQ's names: shown as text, and changed while it runs.
#
# One table (`SETTINGS`) has the name of each setting, its place, how its text is read and written,
# and whether it can be changed while the broker runs, or why not. A setting that RocketMQ does not
# have, or has with another meaning, has its name in `BrokerSettings`. A change lasts until the
# broker stops. (Apache's broker writes it into its configuration file.)


#: Never changed by a request; Apache's own list.
BLACK_LIST = frozenset({"brokerConfigPath", "configBlackList", "rocketmqHome"})


class BlackListed(SettingError):
    """A setting that requests must not change."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Converts a value to text and back."""

    text: Callable[[Any], str]
    value: Callable[[str], Any]
    allowed: str


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _level(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


BOOLEAN = Kind(lambda value: "true" if value else "false", _boolean, "true or false")
NUMBER = Kind(str, int, "a whole number")
TEXT = Kind(str, str, "a text")
MILLIS = Kind(
    lambda value: str(round(value * 1000)), lambda text: int(text) / 1000, "whole milliseconds"
)
SECONDS = Kind(lambda value: str(round(value)), lambda text: float(int(text)), "whole seconds")
HOURS = Kind(lambda value: f"{value / 3600:g}", lambda text: float(text) * 3600, "hours")
PERCENT = Kind(lambda value: f"{value * 100:g}", lambda text: float(text) / 100, "percent")
LIST = Kind(";".join, lambda text: tuple(filter(None, text.split(";"))), "texts with ; between")
CLOCK_HOURS = Kind(
    lambda value: ";".join(f"{hour:02d}" for hour in value),
    lambda text: tuple(int(hour) for hour in text.split(";")),
    "hours of the day with ; between",
)
FLUSH = Kind(
    lambda value: f"{value.name}_FLUSH",
    lambda text: FlushPolicy[text.removesuffix("_FLUSH")],
    "ASYNC_FLUSH or SYNC_FLUSH",
)
BY_HEAP = Kind(
    lambda value: "true" if value is Transfer.HEAP else "false",
    lambda text: Transfer.HEAP if _boolean(text) else Transfer.FILE,
    "true or false",
)
ENTRIES = Kind(lambda value: str(value * ENTRY_SIZE), lambda text: int(text) // ENTRY_SIZE, "bytes")
LEVELS = Kind(
    lambda value: " ".join(map(_level, value)), lambda text: tuple(text.split()), "delays"
)

#: Why a setting cannot be changed while the broker runs.
IDENTITY = "it is part of the broker's identity; stop it and start it with another value"
STORE = "the store was opened with it; stop the broker and start it with another value"
START = "it is read when the broker starts; stop it and start it with another value"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: `path` leads to it from `BrokerSettings`; `fixed` says why it does not change."""

    path: str
    kind: Kind
    fixed: str | None = None


SETTINGS: Mapping[str, Setting] = {
    # The broker.
    "brokerName": Setting("name", TEXT, IDENTITY),
    "brokerClusterName": Setting("cluster", TEXT, IDENTITY),
    "brokerId": Setting("broker_id", NUMBER, IDENTITY),
    "namesrvAddr": Setting("name_servers", LIST, IDENTITY),
    "storePathRootDir": Setting("root", TEXT, IDENTITY),
    "brokerPermission": Setting("permission", NUMBER),
    "autoCreateTopicEnable": Setting("auto_create_topic", BOOLEAN, START),
    "autoCreateSubscriptionGroup": Setting("auto_create_group", BOOLEAN, START),
    "defaultTopicQueueNums": Setting("default_topic_queues", NUMBER, START),
    "clusterTopicEnable": Setting("cluster_topic", BOOLEAN, START),
    "brokerTopicEnable": Setting("broker_topic", BOOLEAN, START),
    "traceTopicEnable": Setting("trace_topic", BOOLEAN, START),
    "timerWheelEnable": Setting("timer", BOOLEAN, START),
    "channelExpiredTimeout": Setting("client_life", MILLIS, START),
    "notifyConsumerIdsChangedEnable": Setting("notify_consumers", BOOLEAN),
    "cleanResourceInterval": Setting("clean_interval", MILLIS, START),
    "scanInterval": Setting("scan_interval", MILLIS, START),
    # Sending.
    "maxMessageSize": Setting("send.max_message_size", NUMBER),
    "regionId": Setting("send.region", TEXT),
    "traceOn": Setting("send.trace_on", BOOLEAN),
    "startAcceptSendRequestTimeStamp": Setting("send.accept_from", MILLIS),
    "rejectTransactionMessage": Setting("send.reject_transactions", BOOLEAN),
    "syncFlushTimeout": Setting("send.flush_timeout", MILLIS),
    "sendThreadPoolQueueCapacity": Setting("send.waiting_messages", NUMBER),
    "sendWaitingBytes": Setting("send.waiting_bytes", NUMBER),
    # Pulling.
    "longPollingEnable": Setting("pull.long_polling", BOOLEAN),
    "shortPollingTimeMills": Setting("pull.short_hold", MILLIS),
    "longestHoldMills": Setting("pull.longest_hold", MILLIS),
    "pullThreadPoolQueueCapacity": Setting("pull.held_requests", NUMBER),
    "heldPerConnection": Setting("pull.held_per_connection", NUMBER),
    "putOffRequests": Setting("pull.put_off_requests", NUMBER),
    "putOffPerConnection": Setting("pull.put_off_per_connection", NUMBER),
    "transferMsgByHeap": Setting("pull.transfer", BY_HEAP),
    "litePullMessageEnable": Setting("pull.lite_pull", BOOLEAN),
    "slaveReadEnable": Setting("pull.slave_read_enable", BOOLEAN),
    "rejectPullConsumerEnable": Setting("pull.reject_pull_consumer", BOOLEAN),
    "enablePropertyFilter": Setting("pull.enable_property_filter", BOOLEAN),
    "pullStepBytes": Setting("pull.step_bytes", NUMBER),
    # Progress.
    "flushConsumerOffsetInterval": Setting("progress.save_interval", MILLIS, START),
    "strictLastOffset": Setting("progress.strict_last", BOOLEAN),
    "zeroForEmptyQueue": Setting("progress.zero_for_empty", BOOLEAN),
    # Delays, transactions, replies.
    "flushDelayOffsetInterval": Setting("delays.save_interval", MILLIS, START),
    "timerMaxDelaySec": Setting("delays.timer_max_delay", SECONDS),
    "timerMaxPending": Setting("delays.timer_max_pending", NUMBER),
    "recallMessageEnable": Setting("delays.recall", BOOLEAN),
    "transactionCheckInterval": Setting("transactions.check_interval", MILLIS),
    "transactionTimeOut": Setting("transactions.timeout", MILLIS),
    "transactionCheckMax": Setting("transactions.check_max", NUMBER),
    "storeReplyMessageEnable": Setting("replies.store", BOOLEAN),
    # Registration.
    "registerNameServerPeriod": Setting("registration.interval", MILLIS, START),
    "registerBrokerTimeoutMills": Setting("registration.timeout", MILLIS),
    # The store.
    "mappedFileSizeCommitLog": Setting("store.file_size", NUMBER, STORE),
    "mappedFileSizeConsumeQueue": Setting("store.queue_file_entries", ENTRIES, STORE),
    "messageIndexEnable": Setting("store.index", BOOLEAN, STORE),
    "maxHashSlotNum": Setting("store.index_file.slots", NUMBER, STORE),
    "maxIndexNum": Setting("store.index_file.entries", NUMBER, STORE),
    "messageDelayLevel": Setting("store.delay_levels", LEVELS, STORE),
    "flushDiskType": Setting("store.flush.policy", FLUSH, STORE),
    "flushIntervalCommitLog": Setting("store.flush.interval", MILLIS, STORE),
    "flushCommitLogThoroughInterval": Setting("store.flush.thorough_interval", MILLIS, STORE),
    "maxTransferCountOnMessageInMemory": Setting("store.read.memory_count", NUMBER, STORE),
    "maxTransferBytesOnMessageInMemory": Setting("store.read.memory_bytes", NUMBER, STORE),
    "maxTransferCountOnMessageInDisk": Setting("store.read.disk_count", NUMBER, STORE),
    "maxTransferBytesOnMessageInDisk": Setting("store.read.disk_bytes", NUMBER, STORE),
    "maxFilterMessageSize": Setting("store.read.scan_bytes", NUMBER, STORE),
    "fileReservedTime": Setting("store.retention.keep", HOURS, STORE),
    "deleteWhen": Setting("store.retention.delete_hours", CLOCK_HOURS, STORE),
    "diskMaxUsedSpaceRatio": Setting("store.retention.expired_ratio", PERCENT, STORE),
    "diskSpaceCleanForciblyRatio": Setting("store.retention.forced_ratio", PERCENT, STORE),
    "diskSpaceWarningLevelRatio": Setting("store.retention.full_ratio", PERCENT, STORE),
    "deleteFileBatchMax": Setting("store.retention.files_per_run", NUMBER, STORE),
}


def shown(settings: BrokerSettings, address: Address) -> dict[str, str]:
    """All settings as text. `address` is the address for clients."""
    table = {
        name: setting.kind.text(_at(settings, setting.path)) for name, setting in SETTINGS.items()
    }
    return table | _derived(settings, address)


def changed(
    settings: BrokerSettings, address: Address, wanted: Mapping[str, str]
) -> BrokerSettings:
    """The settings with all of these changes.

    A value that is in force already is taken for every setting. Raises `BlackListed` or
    `SettingError`, which names the setting and what is allowed.
    """
    if not BLACK_LIST.isdisjoint(wanted):
        raise BlackListed("Can not update config in black list.")
    current = shown(settings, address)
    for name, text in wanted.items():
        if name not in current:
            raise SettingError(f"this broker has no setting {name!r}")
        if text.strip() == current[name]:
            continue
        setting = SETTINGS.get(name)
        if setting is None or setting.fixed is not None:
            reason = IDENTITY if setting is None else setting.fixed
            raise SettingError(f"{name} cannot be changed while the broker runs: {reason}")
        settings = _with(settings, setting.path, _value(name, setting.kind, text))
    if settings.send.max_message_size > settings.store.max_record:
        raise SettingError(
            f"maxMessageSize must be at most {settings.store.max_record}, which is what the store "
            f"takes, got {settings.send.max_message_size}"
        )
    return settings


def _value(name: str, kind: Kind, text: str) -> Any:
    try:
        return kind.value(text.strip())
    except (ValueError, KeyError) as error:
        raise SettingError(f"{name} must be {kind.allowed}, got {text!r}") from error


def _derived(settings: BrokerSettings, address: Address) -> dict[str, str]:
    """Values that follow from other settings."""
    return {
        "brokerIP1": address.host,
        "listenPort": str(address.port),
        "bindAddress": settings.server.host,
        "storePathCommitLog": str(settings.root / "commitlog"),
        "brokerRole": _role(settings),
        "backwardRule": settings.progress.rule.backward.value,
        # Constant here; tools check it.
        "useServerSideResetOffset": "true",
    }


def _role(settings: BrokerSettings) -> str:
    if settings.is_slave:
        return "SLAVE"
    return "SYNC_MASTER" if settings.replication.in_sync_replicas > 1 else "ASYNC_MASTER"


def _at(settings: object, path: str) -> Any:
    for step in path.split("."):
        settings = getattr(settings, step)
    return settings


def _with(settings: BrokerSettings, path: str, value: Any) -> BrokerSettings:
    """Settings that differ in one place."""
    role, _, name = path.rpartition(".")
    try:
        if role:
            role_settings: Any = getattr(settings, role)
            name, value = role, replace(role_settings, **{name: value})
        return replace(settings, **{name: value})
    except SettingError:
        raise
    except OrbitError as error:
        raise SettingError(str(error)) from error
