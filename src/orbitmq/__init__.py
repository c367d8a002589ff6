"""OrbitMQ: RocketMQ-compatible messaging for Python people whose data pipelines run on Spark.

The names here are what applications need. Each is imported when it is first used, so that
`import orbitmq` costs next to nothing, and a program that sends pays nothing for consuming.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orbitmq.errors import OrbitError, SettingError

if TYPE_CHECKING:
    from orbitmq.client.admin.admin import Admin, AsyncAdmin
    from orbitmq.client.admin.deadletters import DeadLetterFilter
    from orbitmq.client.admin.resets import ResetFailed, ResetTo
    from orbitmq.client.consumer.consumer import AsyncConsumer, Consumer
    from orbitmq.client.consumer.progress import ConsumeFrom, ProgressFileError
    from orbitmq.client.consumer.pull import SubscriptionRefused
    from orbitmq.client.consumer.settings import (
        ConsumeSettings,
        FlowSettings,
        PullSettings,
        RebalanceSettings,
    )
    from orbitmq.client.consumer.statistics import ConsumerStatistics
    from orbitmq.client.consumer.verdict import ConsumeContext, DeadLetter, Retry, Verdict
    from orbitmq.client.errors import (
        AccessDenied,
        AdminError,
        AlreadyRunning,
        ArrowMissing,
        BadRequest,
        BatchFailed,
        BodyUnreadable,
        BrokerNotFound,
        BrokerRefused,
        BrokerUnavailable,
        ClientError,
        ConsumerNotOnline,
        GroupNotFound,
        GroupRefused,
        MessageNotFound,
        MessageRefused,
        NoNameServer,
        NoReply,
        NoRoute,
        NotANameServer,
        NotARequest,
        NotEffective,
        NotRunning,
        NotSupported,
        OffsetOutOfRange,
        PartlyDone,
        QueueNotAssigned,
        QueueNotFound,
        RecallHandleInvalid,
        RecallUnsupported,
        SendFailed,
        TimesUnsupported,
        TopicExists,
        TopicNotFound,
        UsedAfterFork,
        WrongUse,
    )
    from orbitmq.client.idempotence import Idempotence, SeenInMemory, SeenInSqlite
    from orbitmq.client.message import Message, ReceivedMessage
    from orbitmq.client.middleware import Delivery, LogDeliveries, TimeLimit, TimeLimitExceeded
    from orbitmq.client.producer.core import Compression, SendSettings
    from orbitmq.client.producer.producer import AsyncProducer, Producer
    from orbitmq.client.producer.send import SendResult, SendStatus
    from orbitmq.client.producer.submit import TooManyInFlight
    from orbitmq.client.producer.transactions import VerdictUnknown
    from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings, PullConsumer
    from orbitmq.client.routes import Queue
    from orbitmq.client.settings import ClientSettings
    from orbitmq.client.tracing import TracingUnavailable
    from orbitmq.filter.tags import InvalidFilter
    from orbitmq.remoting.settings import (
        ConnectFailed,
        ConnectionLost,
        RemotingError,
        RequestTimedOut,
    )
    from orbitmq.remoting.tls import ClientTls
    from orbitmq.wire.command import Credentials

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
    "Admin": "orbitmq.client.admin.admin",
    "AdminError": "orbitmq.client.errors",
    "AlreadyRunning": "orbitmq.client.errors",
    "ArrowMissing": "orbitmq.client.errors",
    "AsyncAdmin": "orbitmq.client.admin.admin",
    "AsyncConsumer": "orbitmq.client.consumer.consumer",
    "AsyncProducer": "orbitmq.client.producer.producer",
    "AsyncPullConsumer": "orbitmq.client.pullconsumer.consumer",
    "BadRequest": "orbitmq.client.errors",
    "BatchFailed": "orbitmq.client.errors",
    "BodyUnreadable": "orbitmq.client.errors",
    "BrokerNotFound": "orbitmq.client.errors",
    "BrokerRefused": "orbitmq.client.errors",
    "BrokerUnavailable": "orbitmq.client.errors",
    "ClientError": "orbitmq.client.errors",
    "ClientSettings": "orbitmq.client.settings",
    "ClientTls": "orbitmq.remoting.tls",
    "Compression": "orbitmq.client.producer.core",
    "ConnectFailed": "orbitmq.remoting.settings",
    "ConnectionLost": "orbitmq.remoting.settings",
    "ConsumeContext": "orbitmq.client.consumer.verdict",
    "ConsumeFrom": "orbitmq.client.consumer.progress",
    "ConsumeSettings": "orbitmq.client.consumer.settings",
    "Consumer": "orbitmq.client.consumer.consumer",
    "ConsumerNotOnline": "orbitmq.client.errors",
    "ConsumerStatistics": "orbitmq.client.consumer.statistics",
    "Credentials": "orbitmq.wire.command",
    "DeadLetter": "orbitmq.client.consumer.verdict",
    "DeadLetterFilter": "orbitmq.client.admin.deadletters",
    "Delivery": "orbitmq.client.middleware",
    "FlowSettings": "orbitmq.client.consumer.settings",
    "GroupNotFound": "orbitmq.client.errors",
    "GroupRefused": "orbitmq.client.errors",
    "Idempotence": "orbitmq.client.idempotence",
    "InvalidFilter": "orbitmq.filter.tags",
    "LogDeliveries": "orbitmq.client.middleware",
    "Message": "orbitmq.client.message",
    "MessageNotFound": "orbitmq.client.errors",
    "MessageRefused": "orbitmq.client.errors",
    "NoNameServer": "orbitmq.client.errors",
    "NoReply": "orbitmq.client.errors",
    "NoRoute": "orbitmq.client.errors",
    "NotANameServer": "orbitmq.client.errors",
    "NotARequest": "orbitmq.client.errors",
    "NotEffective": "orbitmq.client.errors",
    "NotRunning": "orbitmq.client.errors",
    "NotSupported": "orbitmq.client.errors",
    "OffsetOutOfRange": "orbitmq.client.errors",
    "PartlyDone": "orbitmq.client.errors",
    "PollSettings": "orbitmq.client.pullconsumer.consumer",
    "Producer": "orbitmq.client.producer.producer",
    "ProgressFileError": "orbitmq.client.consumer.progress",
    "PullConsumer": "orbitmq.client.pullconsumer.consumer",
    "PullSettings": "orbitmq.client.consumer.settings",
    "Queue": "orbitmq.client.routes",
    "QueueNotAssigned": "orbitmq.client.errors",
    "QueueNotFound": "orbitmq.client.errors",
    "RebalanceSettings": "orbitmq.client.consumer.settings",
    "RecallHandleInvalid": "orbitmq.client.errors",
    "RecallUnsupported": "orbitmq.client.errors",
    "ReceivedMessage": "orbitmq.client.message",
    "RemotingError": "orbitmq.remoting.settings",
    "RequestTimedOut": "orbitmq.remoting.settings",
    "ResetFailed": "orbitmq.client.admin.resets",
    "ResetTo": "orbitmq.client.admin.resets",
    "Retry": "orbitmq.client.consumer.verdict",
    "SeenInMemory": "orbitmq.client.idempotence",
    "SeenInSqlite": "orbitmq.client.idempotence",
    "SendFailed": "orbitmq.client.errors",
    "SendResult": "orbitmq.client.producer.send",
    "SendSettings": "orbitmq.client.producer.core",
    "SendStatus": "orbitmq.client.producer.send",
    "SubscriptionRefused": "orbitmq.client.consumer.pull",
    "TimeLimit": "orbitmq.client.middleware",
    "TimeLimitExceeded": "orbitmq.client.middleware",
    "TimesUnsupported": "orbitmq.client.errors",
    "TooManyInFlight": "orbitmq.client.producer.submit",
    "TopicExists": "orbitmq.client.errors",
    "TopicNotFound": "orbitmq.client.errors",
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
