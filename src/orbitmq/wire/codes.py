"""The numbers of the protocol: requests, response codes, languages of clients.

Codes are open-ended: a peer may send one that is not listed, so commands carry plain integers and
compare equal to these members.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orbitmq.wire.frame import Frame


class RequestCode(enum.IntEnum):
    """The codes of requests."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_BROKER_OFFSET = 13
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    GET_TOPIC_CONFIG_LIST = 22
    GET_TOPIC_NAME_LIST = 23
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    TRIGGER_DELETE_FILES = 27
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_CLIENT_CONFIG = 47
    GET_TIMER_CHECK_POINT = 60
    GET_TIMER_METRICS = 61
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    SUSPEND_CONSUMER = 209
    RESUME_CONSUMER = 210
    RESET_CONSUMER_OFFSET_IN_CONSUMER = 211
    RESET_CONSUMER_OFFSET_IN_BROKER = 212
    ADJUST_CONSUMER_THREAD_POOL = 213
    WHO_CONSUME_THE_MESSAGE = 214
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    REGISTER_FILTER_SERVER = 301
    REGISTER_MESSAGE_FILTER_CLASS = 302
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    UPDATE_AND_CREATE_STATIC_TOPIC = 513
    GET_BROKER_MEMBER_GROUP = 901
    ADD_BROKER = 902
    REMOVE_BROKER = 903
    BROKER_HEARTBEAT = 904
    NOTIFY_MIN_BROKER_ID_CHANGE = 905
    EXCHANGE_BROKER_HA_INFO = 906
    GET_BROKER_HA_STATUS = 907
    RESET_MASTER_FLUSH_OFFSET = 908
    CONTROLLER_ALTER_SYNC_STATE_SET = 1001
    CONTROLLER_ELECT_MASTER = 1002
    CONTROLLER_REGISTER_BROKER = 1003
    CONTROLLER_GET_REPLICA_INFO = 1004
    CONTROLLER_GET_METADATA_INFO = 1005
    CONTROLLER_GET_SYNC_STATE_DATA = 1006
    GET_BROKER_EPOCH_CACHE = 1007
    NOTIFY_BROKER_ROLE_CHANGED = 1008
    UPDATE_CONTROLLER_CONFIG = 1009
    GET_CONTROLLER_CONFIG = 1010
    CLEAN_BROKER_DATA = 1011
    CONTROLLER_GET_NEXT_BROKER_ID = 1012
    CONTROLLER_APPLY_BROKER_ID = 1013
    UPDATE_COLD_DATA_FLOW_CTR_CONFIG = 2001
    REMOVE_COLD_DATA_FLOW_CTR_CONFIG = 2002
    GET_COLD_DATA_FLOW_CTR_INFO = 2003
    SET_COMMITLOG_READ_MODE = 2004
    AUTH_CREATE_USER = 3001
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_GET_ACL = 3009
    AUTH_LIST_ACL = 3010
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    POP_ROLLBACK = 200056
    BATCH_ACK_MESSAGE = 200151


class ResponseCode(enum.IntEnum):
    """The codes of answers."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    CONTROLLER_FENCED_MASTER_EPOCH = 2000
    CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH = 2001
    CONTROLLER_INVALID_MASTER = 2002
    CONTROLLER_INVALID_REPLICAS = 2003
    CONTROLLER_MASTER_NOT_AVAILABLE = 2004
    CONTROLLER_INVALID_REQUEST = 2005
    CONTROLLER_BROKER_NOT_ALIVE = 2006
    CONTROLLER_NOT_LEADER = 2007
    CONTROLLER_BROKER_METADATA_NOT_EXIST = 2008
    CONTROLLER_INVALID_CLEAN_BROKER_METADATA = 2009
    CONTROLLER_BROKER_NEED_TO_BE_REGISTERED = 2010
    CONTROLLER_MASTER_STILL_EXIST = 2011
    CONTROLLER_ELECT_MASTER_FAILED = 2012
    CONTROLLER_ALTER_SYNC_STATE_SET_FAILED = 2013
    CONTROLLER_BROKER_ID_INVALID = 2014
    CONTROLLER_JRAFT_INTERNAL_ERROR = 2015
    CONTROLLER_BROKER_LIVE_INFO_NOT_EXISTS = 2016
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002
    RPC_TIME_OUT = -1006
    RPC_SEND_TO_CHANNEL_FAILED = -1004
    RPC_ADDR_IS_NULL = -1002
    RPC_UNKNOWN = -1000


def named(codes: type[RequestCode | ResponseCode], code: int) -> str:
    """The name of a code in words, such as `send message`; `code 4711` for an unknown one."""
    try:
        return codes(code).name.lower().replace("_", " ")
    except ValueError:
        return f"code {code}"


class Flag(enum.IntFlag):
    """Bits of a command's `flag`."""

    RESPONSE = 1
    ONE_WAY = 2


class Serialization(enum.IntEnum):
    """How a header is written; the top byte of a frame's second word."""

    JSON = 0
    ROCKETMQ = 1


class Language(enum.IntEnum):
    """What a peer is written in; the name in JSON headers, the number in binary ones."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


class ForbiddenType(enum.IntEnum):
    """Why a pull was refused with `NO_PERMISSION`."""

    BROKER = 1
    GROUP = 2
    TOPIC = 3
    BROADCASTING = 4
    SUBSCRIPTION = 5


class TransactionState(enum.IntEnum):
    """The outcome of a transaction by its producer: `commitOrRollback` of END_TRANSACTION."""

    UNKNOWN = 0
    COMMIT = 8
    ROLLBACK = 12


# The ordinals by which RocketMQ releases announce themselves, and what depends on them.
#
# Apache numbers a release by its place in an enumeration that has a snapshot before every release.
# From 3.0.1 on the releases of a minor line therefore lie two apart, and only the place at which
# each line begins has to be known.


class Gate(enum.IntEnum):
    """Versions at which peers begin to behave differently."""

    #: Clients that understand a pushed reset of offsets.
    CLIENT_RESETS_OFFSETS = 28
    #: Clients that answer GET_CONSUMER_RUNNING_INFO and CONSUME_MESSAGE_DIRECTLY.
    CLIENT_TELLS_STATE = 62
    #: Requests whose `maxReconsumeTimes` counts.
    MAX_RECONSUME_TIMES = 121
    #: Brokers to which a Java client sends subscriptions other than tags.
    SQL_SUBSCRIPTIONS = 232
    #: The last clients that leave `_UNIQUE_KEY_QUERY` out of what they sign.
    UNSIGNED_UNIQUE_KEY_QUERY = 399
    #: Requesters of a route that read quoted integer keys.
    STANDARD_JSON = 401
    #: Brokers whose registration may carry queue mappings.
    QUEUE_MAPPINGS = 413
    #: The last clients that do not know GO_AWAY.
    BEFORE_GO_AWAY = 475


#: Announced on every command of ours: 5.3.3, the release whose protocol this package speaks.
OUR_VERSION = 479

#: Apache's name for every ordinal above its last release.
HIGHER_VERSION = 612


class Release(NamedTuple):
    """A release of RocketMQ, or the snapshot before it."""

    major: int
    minor: int
    patch: int
    is_snapshot: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}{'-SNAPSHOT' if self.is_snapshot else ''}"


class _Line(NamedTuple):
    """Where a minor line begins: the ordinal of the snapshot before its first patch release."""

    ordinal: int
    first_patch: int
    last_patch: int = 9


_LINES: dict[tuple[int, int], _Line] = {
    (3, 0): _Line(16, 1, last_patch=15),
    (3, 1): _Line(46, 0),
    (3, 2): _Line(66, 0),
    # 3.3 to 3.9 begin with patch 1 and are therefore eighteen apart.
    **{(3, minor): _Line(86 + 18 * (minor - 3), 1) for minor in range(3, 10)},
    **{(4, minor): _Line(212 + 20 * minor, 0) for minor in range(10)},
    **{(5, minor): _Line(412 + 20 * minor, 0) for minor in range(10)},
}


def ordinal_of(release: Release) -> int:
    """The number under which a release announces itself."""
    line = _LINES.get((release.major, release.minor))
    if line is None or not line.first_patch <= release.patch <= line.last_patch:
        raise WireError(f"RocketMQ has no ordinal for {release}; 3.0.1 to 5.9.9 have one")
    return line.ordinal + 2 * (release.patch - line.first_patch) + (not release.is_snapshot)


def release_of(ordinal: int) -> Release | None:
    """The release behind an ordinal; None for previews of 3.0.0 and for numbers not given out."""
    for (major, minor), line in _LINES.items():
        patch, is_release = divmod(ordinal - line.ordinal, 2)
        patch += line.first_patch
        if line.first_patch <= patch <= line.last_patch:
            return Release(major, minor, patch, not is_release)
    return None


# Limits of what a peer can make this process hold, checked before memory is allocated.


#: The header length shares its word with the type byte, so 24 bits are all there is.
LARGEST_HEADER = 0xFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Upper bounds for what is read from a connection.

    Apache's decoder knows only the first. A peer that stays within these limits can make us hold
    a small multiple of the bytes that it really sent, and never more because of what it announced.
    """

    #: Bytes of one frame after its length word; Apache's default for both sides.
    frame: int = 16 * 1024 * 1024
    #: Bytes of one header. The longest regular one answers a batch send: 33 bytes a message.
    header: int = 4 * 1024 * 1024
    #: Entries of `extFields`. The widest header declared by Apache has under thirty.
    ext_fields: int = 1024
    #: Bytes of one key of `extFields`.
    ext_key: int = 1024
    #: Bytes of one value of `extFields`, and of a remark.
    ext_value: int = 4 * 1024 * 1024
    #: Values (objects, arrays, scalars) in one body that the tolerant decoder reads.
    body_values: int = 1_000_000
    #: Arrays and objects inside each other in a body that the tolerant decoder reads.
    body_depth: int = 64
    #: Bytes that a compressed body may grow to.
    inflated: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value < 1:
                raise LimitError(f"limit {setting.name!r} must be positive, got {value}")
        if self.header > LARGEST_HEADER:
            raise LimitError(f"limit 'header' must be at most {LARGEST_HEADER}, got {self.header}")
        if self.frame > 0x7FFFFFFF:
            raise LimitError(f"limit 'frame' must fit 31 bits, got {self.frame}")


DEFAULT_LIMITS = WireLimits()


# Errors of decoding and encoding, by what the caller does about them.


class WireError(OrbitError):
    """Bytes or values that the protocol does not allow."""


class FrameError(WireError):
    """The byte stream cannot be trusted any longer: log the peer and close the connection."""

    #: What was complete before the bad frame; filled in by `FrameReader.feed`.
    frames: Sequence[Frame] = ()


class OtherProtocol(FrameError):
    """The first bytes belong to another protocol."""


class HeaderError(WireError):
    """A request or answer lacks a field or has a wrong one: answer with an error, go on reading."""

    def __init__(self, header: str, field: str, allowed: str, got: str) -> None:
        self.header = header
        self.field = field
        self.allowed = allowed
        self.got = got
        super().__init__(f"{header}: field {field!r} must be {allowed}, got {got}")


class BodyError(WireError):
    """A body is not what its request code promises: answer with an error, go on reading."""

    def __init__(self, body: str, problem: str) -> None:
        self.body = body
        self.problem = problem
        super().__init__(f"{body} body: {problem}")


class EncodeError(WireError):
    """A value of ours that does not fit the wire: nothing was sent, correct the value."""


class LimitError(WireError):
    """An invalid value in `WireLimits`."""
