"""OrbitMQ: RocketMQ-compatible messaging for Python people whose data pipelines run on Spark.

The names here are what applications need. Each is imported when it is first used, so that
`import orbitmq` costs next to nothing, and a program that sends pays nothing for consuming.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orbitmq.errors import OrbitError, SettingError

if TYPE_CHECKING:
    from orbitmq.client.admin.admin import AsyncAdmin
    from orbitmq.client.admin.deadletters import DeadLetterFilter
    from orbitmq.client.admin.errors import (
        AdminError,
        BadRequest,
        BrokerNotFound,
        ConsumerNotOnline,
        GroupNotFound,
        MessageNotFound,
        NotEffective,
        NotSupported,
        PartlyDone,
        QueueNotFound,
        TopicExists,
        TopicNotFound,
    )
    from orbitmq.client.admin.resetplan import ResetFailed, ResetTo
    from orbitmq.client.admin.sync import Admin
    from orbitmq.client.consumer.asyncconsumer import AsyncConsumer
    from orbitmq.client.consumer.consumer import Consumer
    from orbitmq.client.consumer.flowcontrol import FlowSettings
    from orbitmq.client.consumer.localprogress import ProgressFileError
    from orbitmq.client.consumer.pullsettings import PullSettings
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.consumer.settings import ConsumeSettings
    from orbitmq.client.consumer.starting import ConsumeFrom
    from orbitmq.client.consumer.statistics import ConsumerStatistics
    from orbitmq.client.consumer.subscriptioncheck import SubscriptionRefused
    from orbitmq.client.consumer.verdict import ConsumeContext, DeadLetter, Retry, Verdict
    from orbitmq.client.errors import (
        AccessDenied,
        AlreadyRunning,
        BodyUnreadable,
        BrokerRefused,
        BrokerUnavailable,
        ClientError,
        GroupRefused,
        MessageRefused,
        NoNameServer,
        NoRoute,
        NotANameServer,
        NotRunning,
        SendFailed,
        UsedAfterFork,
        WrongUse,
    )
    from orbitmq.client.idempotence import Idempotence
    from orbitmq.client.message import Message
    from orbitmq.client.middleware import Delivery, LogDeliveries
    from orbitmq.client.producer.asyncproducer import AsyncProducer
    from orbitmq.client.producer.errors import (
        BatchFailed,
        NoReply,
        NotARequest,
        RecallHandleInvalid,
        RecallUnsupported,
        TimesUnsupported,
    )
    from orbitmq.client.producer.inflight import TooManyInFlight
    from orbitmq.client.producer.producer import Producer
    from orbitmq.client.producer.results import SendResult, SendStatus
    from orbitmq.client.producer.settings import Compression, SendSettings
    from orbitmq.client.producer.transactions import VerdictUnknown
    from orbitmq.client.pullconsumer.asyncpullconsumer import AsyncPullConsumer
    from orbitmq.client.pullconsumer.errors import ArrowMissing, OffsetOutOfRange, QueueNotAssigned
    from orbitmq.client.pullconsumer.pullconsumer import PullConsumer
    from orbitmq.client.pullconsumer.settings import PollSettings
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.client.seenstores import SeenInMemory, SeenInSqlite
    from orbitmq.client.settings import ClientSettings
    from orbitmq.client.timelimit import TimeLimit, TimeLimitExceeded
    from orbitmq.client.tracing import TracingUnavailable
    from orbitmq.filter.errors import InvalidFilter
    from orbitmq.remoting.errors import (
        ConnectFailed,
        ConnectionLost,
        RemotingError,
        RequestTimedOut,
    )
    from orbitmq.remoting.tls import ClientTls
    from orbitmq.wire.acl import Credentials

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  # grouped by what they are for
    # Messages
    "Message",
    "Queue",
    "ReceivedMessage",
    # Sending
    "AsyncProducer",
    "Compression",
    "Producer",
    "SendResult",
    "SendSettings",
    "SendStatus",
    # Consuming
    "AsyncConsumer",
    "ConsumeContext",
    "ConsumeFrom",
    "ConsumeSettings",
    "Consumer",
    "ConsumerStatistics",
    "DeadLetter",
    "FlowSettings",
    "PullSettings",
    "RebalanceSettings",
    "Retry",
    "Verdict",
    # Around the handlers
    "Delivery",
    "Idempotence",
    "LogDeliveries",
    "SeenInMemory",
    "SeenInSqlite",
    "TimeLimit",
    "TimeLimitExceeded",
    # Pulling
    "AsyncPullConsumer",
    "PollSettings",
    "PullConsumer",
    # Administration
    "Admin",
    "AsyncAdmin",
    "DeadLetterFilter",
    "ResetTo",
    # Connecting
    "ClientSettings",
    "ClientTls",
    "Credentials",
    # Errors
    "AccessDenied",
    "AdminError",
    "AlreadyRunning",
    "ArrowMissing",
    "BadRequest",
    "BatchFailed",
    "BodyUnreadable",
    "BrokerNotFound",
    "BrokerRefused",
    "BrokerUnavailable",
    "ClientError",
    "ConnectFailed",
    "ConnectionLost",
    "ConsumerNotOnline",
    "GroupNotFound",
    "GroupRefused",
    "InvalidFilter",
    "MessageNotFound",
    "MessageRefused",
    "NoNameServer",
    "NoReply",
    "NoRoute",
    "NotANameServer",
    "NotARequest",
    "NotEffective",
    "NotRunning",
    "NotSupported",
    "OffsetOutOfRange",
    "OrbitError",
    "PartlyDone",
    "ProgressFileError",
    "QueueNotAssigned",
    "QueueNotFound",
    "RecallHandleInvalid",
    "RecallUnsupported",
    "RemotingError",
    "RequestTimedOut",
    "ResetFailed",
    "SendFailed",
    "SettingError",
    "SubscriptionRefused",
    "TimesUnsupported",
    "TooManyInFlight",
    "TopicExists",
    "TopicNotFound",
    "TracingUnavailable",
    "UsedAfterFork",
    "VerdictUnknown",
    "WrongUse",
    # The release
    "__version__",
]

#: Where each name comes from.
_HOMES = {
    "AccessDenied": "orbitmq.client.errors",
    "Admin": "orbitmq.client.admin.sync",
    "AdminError": "orbitmq.client.admin.errors",
    "AlreadyRunning": "orbitmq.client.errors",
    "ArrowMissing": "orbitmq.client.pullconsumer.errors",
    "AsyncAdmin": "orbitmq.client.admin.admin",
    "AsyncConsumer": "orbitmq.client.consumer.asyncconsumer",
    "AsyncProducer": "orbitmq.client.producer.asyncproducer",
    "AsyncPullConsumer": "orbitmq.client.pullconsumer.asyncpullconsumer",
    "BadRequest": "orbitmq.client.admin.errors",
    "BatchFailed": "orbitmq.client.producer.errors",
    "BodyUnreadable": "orbitmq.client.errors",
    "BrokerNotFound": "orbitmq.client.admin.errors",
    "BrokerRefused": "orbitmq.client.errors",
    "BrokerUnavailable": "orbitmq.client.errors",
    "ClientError": "orbitmq.client.errors",
    "ClientSettings": "orbitmq.client.settings",
    "ClientTls": "orbitmq.remoting.tls",
    "Compression": "orbitmq.client.producer.settings",
    "ConnectFailed": "orbitmq.remoting.errors",
    "ConnectionLost": "orbitmq.remoting.errors",
    "ConsumeContext": "orbitmq.client.consumer.verdict",
    "ConsumeFrom": "orbitmq.client.consumer.starting",
    "ConsumeSettings": "orbitmq.client.consumer.settings",
    "Consumer": "orbitmq.client.consumer.consumer",
    "ConsumerNotOnline": "orbitmq.client.admin.errors",
    "ConsumerStatistics": "orbitmq.client.consumer.statistics",
    "Credentials": "orbitmq.wire.acl",
    "DeadLetter": "orbitmq.client.consumer.verdict",
    "DeadLetterFilter": "orbitmq.client.admin.deadletters",
    "Delivery": "orbitmq.client.middleware",
    "FlowSettings": "orbitmq.client.consumer.flowcontrol",
    "GroupNotFound": "orbitmq.client.admin.errors",
    "GroupRefused": "orbitmq.client.errors",
    "Idempotence": "orbitmq.client.idempotence",
    "InvalidFilter": "orbitmq.filter.errors",
    "LogDeliveries": "orbitmq.client.middleware",
    "Message": "orbitmq.client.message",
    "MessageNotFound": "orbitmq.client.admin.errors",
    "MessageRefused": "orbitmq.client.errors",
    "NoNameServer": "orbitmq.client.errors",
    "NoReply": "orbitmq.client.producer.errors",
    "NoRoute": "orbitmq.client.errors",
    "NotANameServer": "orbitmq.client.errors",
    "NotARequest": "orbitmq.client.producer.errors",
    "NotEffective": "orbitmq.client.admin.errors",
    "NotRunning": "orbitmq.client.errors",
    "NotSupported": "orbitmq.client.admin.errors",
    "OffsetOutOfRange": "orbitmq.client.pullconsumer.errors",
    "PartlyDone": "orbitmq.client.admin.errors",
    "PollSettings": "orbitmq.client.pullconsumer.settings",
    "Producer": "orbitmq.client.producer.producer",
    "ProgressFileError": "orbitmq.client.consumer.localprogress",
    "PullConsumer": "orbitmq.client.pullconsumer.pullconsumer",
    "PullSettings": "orbitmq.client.consumer.pullsettings",
    "Queue": "orbitmq.client.queue",
    "QueueNotAssigned": "orbitmq.client.pullconsumer.errors",
    "QueueNotFound": "orbitmq.client.admin.errors",
    "RebalanceSettings": "orbitmq.client.consumer.rebalancesettings",
    "RecallHandleInvalid": "orbitmq.client.producer.errors",
    "RecallUnsupported": "orbitmq.client.producer.errors",
    "ReceivedMessage": "orbitmq.client.received",
    "RemotingError": "orbitmq.remoting.errors",
    "RequestTimedOut": "orbitmq.remoting.errors",
    "ResetFailed": "orbitmq.client.admin.resetplan",
    "ResetTo": "orbitmq.client.admin.resetplan",
    "Retry": "orbitmq.client.consumer.verdict",
    "SeenInMemory": "orbitmq.client.seenstores",
    "SeenInSqlite": "orbitmq.client.seenstores",
    "SendFailed": "orbitmq.client.errors",
    "SendResult": "orbitmq.client.producer.results",
    "SendSettings": "orbitmq.client.producer.settings",
    "SendStatus": "orbitmq.client.producer.results",
    "SubscriptionRefused": "orbitmq.client.consumer.subscriptioncheck",
    "TimeLimit": "orbitmq.client.timelimit",
    "TimeLimitExceeded": "orbitmq.client.timelimit",
    "TimesUnsupported": "orbitmq.client.producer.errors",
    "TooManyInFlight": "orbitmq.client.producer.inflight",
    "TopicExists": "orbitmq.client.admin.errors",
    "TopicNotFound": "orbitmq.client.admin.errors",
    "TracingUnavailable": "orbitmq.client.tracing",
    "UsedAfterFork": "orbitmq.client.errors",
    "Verdict": "orbitmq.client.consumer.verdict",
    "VerdictUnknown": "orbitmq.client.producer.transactions",
    "WrongUse": "orbitmq.client.errors",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # found without coming here from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
