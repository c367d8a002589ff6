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
    name: module
    for module, names in {
        "orbitmq.client.admin.admin": ("AsyncAdmin",),
        "orbitmq.client.admin.deadletters": ("DeadLetterFilter",),
        "orbitmq.client.admin.errors": (
            "AdminError",
            "BadRequest",
            "BrokerNotFound",
            "ConsumerNotOnline",
            "GroupNotFound",
            "MessageNotFound",
            "NotEffective",
            "NotSupported",
            "PartlyDone",
            "QueueNotFound",
            "TopicExists",
            "TopicNotFound",
        ),
        "orbitmq.client.admin.resetplan": (
            "ResetFailed",
            "ResetTo",
        ),
        "orbitmq.client.admin.sync": ("Admin",),
        "orbitmq.client.consumer.asyncconsumer": ("AsyncConsumer",),
        "orbitmq.client.consumer.consumer": ("Consumer",),
        "orbitmq.client.consumer.flowcontrol": ("FlowSettings",),
        "orbitmq.client.consumer.localprogress": ("ProgressFileError",),
        "orbitmq.client.consumer.pullsettings": ("PullSettings",),
        "orbitmq.client.consumer.rebalancesettings": ("RebalanceSettings",),
        "orbitmq.client.consumer.settings": ("ConsumeSettings",),
        "orbitmq.client.consumer.starting": ("ConsumeFrom",),
        "orbitmq.client.consumer.statistics": ("ConsumerStatistics",),
        "orbitmq.client.consumer.subscriptioncheck": ("SubscriptionRefused",),
        "orbitmq.client.consumer.verdict": (
            "ConsumeContext",
            "DeadLetter",
            "Retry",
            "Verdict",
        ),
        "orbitmq.client.errors": (
            "AccessDenied",
            "AlreadyRunning",
            "BodyUnreadable",
            "BrokerRefused",
            "BrokerUnavailable",
            "ClientError",
            "GroupRefused",
            "MessageRefused",
            "NoNameServer",
            "NoRoute",
            "NotANameServer",
            "NotRunning",
            "SendFailed",
            "UsedAfterFork",
            "WrongUse",
        ),
        "orbitmq.client.idempotence": ("Idempotence",),
        "orbitmq.client.message": ("Message",),
        "orbitmq.client.middleware": (
            "Delivery",
            "LogDeliveries",
        ),
        "orbitmq.client.producer.asyncproducer": ("AsyncProducer",),
        "orbitmq.client.producer.errors": (
            "BatchFailed",
            "NoReply",
            "NotARequest",
            "RecallHandleInvalid",
            "RecallUnsupported",
            "TimesUnsupported",
        ),
        "orbitmq.client.producer.inflight": ("TooManyInFlight",),
        "orbitmq.client.producer.producer": ("Producer",),
        "orbitmq.client.producer.results": (
            "SendResult",
            "SendStatus",
        ),
        "orbitmq.client.producer.settings": (
            "Compression",
            "SendSettings",
        ),
        "orbitmq.client.producer.transactions": ("VerdictUnknown",),
        "orbitmq.client.pullconsumer.asyncpullconsumer": ("AsyncPullConsumer",),
        "orbitmq.client.pullconsumer.errors": (
            "ArrowMissing",
            "OffsetOutOfRange",
            "QueueNotAssigned",
        ),
        "orbitmq.client.pullconsumer.pullconsumer": ("PullConsumer",),
        "orbitmq.client.pullconsumer.settings": ("PollSettings",),
        "orbitmq.client.queue": ("Queue",),
        "orbitmq.client.received": ("ReceivedMessage",),
        "orbitmq.client.seenstores": (
            "SeenInMemory",
            "SeenInSqlite",
        ),
        "orbitmq.client.settings": ("ClientSettings",),
        "orbitmq.client.timelimit": (
            "TimeLimit",
            "TimeLimitExceeded",
        ),
        "orbitmq.client.tracing": ("TracingUnavailable",),
        "orbitmq.filter.errors": ("InvalidFilter",),
        "orbitmq.remoting.errors": (
            "ConnectFailed",
            "ConnectionLost",
            "RemotingError",
            "RequestTimedOut",
        ),
        "orbitmq.remoting.tls": ("ClientTls",),
        "orbitmq.wire.acl": ("Credentials",),
    }.items()
    for name in names
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
