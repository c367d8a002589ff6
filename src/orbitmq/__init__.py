"""OrbitMQ: RocketMQ-compatible messaging for Python, and for data pipelines on Spark.

These are the names that applications need; errors are in `orbitmq.errors`. A name is imported at
its first use: `import orbitmq` is cheap, and a program that only sends loads no consumer.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Final

from orbitmq import errors as errors

if TYPE_CHECKING:
    from orbitmq.client.admin.admin import Admin as Admin
    from orbitmq.client.admin.admin import AsyncAdmin as AsyncAdmin
    from orbitmq.client.admin.deadletters import DeadLetterFilter as DeadLetterFilter
    from orbitmq.client.admin.resets import ResetTo as ResetTo
    from orbitmq.client.consumer.consumer import AsyncConsumer as AsyncConsumer
    from orbitmq.client.consumer.consumer import Consumer as Consumer
    from orbitmq.client.consumer.settings import ConsumeSettings as ConsumeSettings
    from orbitmq.client.consumer.settings import FlowSettings as FlowSettings
    from orbitmq.client.consumer.settings import PullSettings as PullSettings
    from orbitmq.client.consumer.settings import RebalanceSettings as RebalanceSettings
    from orbitmq.client.consumer.statistics import ConsumerStatistics as ConsumerStatistics
    from orbitmq.client.consumer.verdict import ConsumeContext as ConsumeContext
    from orbitmq.client.consumer.verdict import DeadLetter as DeadLetter
    from orbitmq.client.consumer.verdict import Retry as Retry
    from orbitmq.client.consumer.verdict import Verdict as Verdict
    from orbitmq.client.idempotence import Idempotence as Idempotence
    from orbitmq.client.idempotence import SeenInMemory as SeenInMemory
    from orbitmq.client.idempotence import SeenInSqlite as SeenInSqlite
    from orbitmq.client.message import Message as Message
    from orbitmq.client.message import ReceivedMessage as ReceivedMessage
    from orbitmq.client.middleware import Delivery as Delivery
    from orbitmq.client.middleware import LogDeliveries as LogDeliveries
    from orbitmq.client.middleware import TimeLimit as TimeLimit
    from orbitmq.client.middleware import TimeLimitExceeded as TimeLimitExceeded
    from orbitmq.client.producer.core import Compression as Compression
    from orbitmq.client.producer.core import ProducerStatistics as ProducerStatistics
    from orbitmq.client.producer.core import SendSettings as SendSettings
    from orbitmq.client.producer.producer import AsyncProducer as AsyncProducer
    from orbitmq.client.producer.producer import Producer as Producer
    from orbitmq.client.producer.send import SendResult as SendResult
    from orbitmq.client.producer.send import SendStatus as SendStatus
    from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer as AsyncPullConsumer
    from orbitmq.client.pullconsumer.consumer import PollSettings as PollSettings
    from orbitmq.client.pullconsumer.consumer import PullConsumer as PullConsumer
    from orbitmq.client.routes import Queue as Queue
    from orbitmq.client.settings import ClientSettings as ClientSettings
    from orbitmq.client.tracing import Tracing as Tracing
    from orbitmq.parsing import Position as Position
    from orbitmq.remoting.tls import ClientTls as ClientTls
    from orbitmq.wire.codes import TransactionState as TransactionState
    from orbitmq.wire.command import Credentials as Credentials

__version__ = "0.1.0"

#: The module of each name, below `orbitmq`; the imports above say the same to type checkers.
_MODULES: Final = {
    # Messages
    "Message": "client.message",
    "ReceivedMessage": "client.message",
    "Queue": "client.routes",
    # Sending
    "Producer": "client.producer.producer",
    "AsyncProducer": "client.producer.producer",
    "Compression": "client.producer.core",
    "ProducerStatistics": "client.producer.core",
    "SendResult": "client.producer.send",
    "SendSettings": "client.producer.core",
    "SendStatus": "client.producer.send",
    "TransactionState": "wire.codes",
    # Consuming
    "Consumer": "client.consumer.consumer",
    "AsyncConsumer": "client.consumer.consumer",
    "ConsumeContext": "client.consumer.verdict",
    "Position": "parsing",
    "ConsumeSettings": "client.consumer.settings",
    "ConsumerStatistics": "client.consumer.statistics",
    "DeadLetter": "client.consumer.verdict",
    "FlowSettings": "client.consumer.settings",
    "PullSettings": "client.consumer.settings",
    "RebalanceSettings": "client.consumer.settings",
    "Retry": "client.consumer.verdict",
    "Verdict": "client.consumer.verdict",
    # Around the handlers
    "Delivery": "client.middleware",
    "Idempotence": "client.idempotence",
    "LogDeliveries": "client.middleware",
    "SeenInMemory": "client.idempotence",
    "SeenInSqlite": "client.idempotence",
    "TimeLimit": "client.middleware",
    "TimeLimitExceeded": "client.middleware",
    "Tracing": "client.tracing",
    # Pulling
    "PullConsumer": "client.pullconsumer.consumer",
    "AsyncPullConsumer": "client.pullconsumer.consumer",
    "PollSettings": "client.pullconsumer.consumer",
    # Administration
    "Admin": "client.admin.admin",
    "AsyncAdmin": "client.admin.admin",
    "DeadLetterFilter": "client.admin.deadletters",
    "ResetTo": "client.admin.resets",
    # Connecting
    "ClientSettings": "client.settings",
    "ClientTls": "remoting.tls",
    "Credentials": "wire.command",
}
__all__ = [*_MODULES, "__version__", "errors"]  # noqa: PLE0604  # names of the table

#: Former names of errors: the class in `orbitmq.errors` to catch instead, and the module below
#: `orbitmq` where the narrower class is, if it still exists. See docs/deprecations.md.
_DEPRECATED_ERRORS: Final[dict[str, tuple[str, str | None]]] = {
    "AccessDenied": ("AccessDenied", None),
    "AdminError": ("ClientError", "client.errors"),
    "AlreadyRunning": ("WrongUse", None),
    "ArrowMissing": ("MissingExtra", None),
    "BadRequest": ("SettingError", "client.errors"),
    "BatchFailed": ("SendFailed", None),
    "BodyUnreadable": ("BodyUnreadable", None),
    "BrokerNotFound": ("NotFound", "client.errors"),
    "BrokerRefused": ("BrokerRefused", None),
    "BrokerUnavailable": ("Unavailable", "client.errors"),
    "ClientError": ("ClientError", None),
    "ConnectFailed": ("Unavailable", "remoting.settings"),
    "ConnectionLost": ("Unavailable", "remoting.settings"),
    "ConsumerNotOnline": ("Unavailable", "client.errors"),
    "GroupNotFound": ("NotFound", "client.errors"),
    "GroupRefused": ("BrokerRefused", "client.errors"),
    "InvalidFilter": ("InvalidFilter", None),
    "MessageNotFound": ("NotFound", "client.errors"),
    "MessageRefused": ("MessageRefused", None),
    "NoNameServer": ("Unavailable", "client.errors"),
    "NoReply": ("TimedOut", "client.errors"),
    "NoRoute": ("NoRoute", None),
    "NotANameServer": ("BrokerRefused", "client.errors"),
    "NotARequest": ("WrongUse", None),
    "NotEffective": ("PartlyDone", "client.errors"),
    "NotRunning": ("NotRunning", None),
    "NotSupported": ("NotSupported", None),
    "OffsetOutOfRange": ("OffsetOutOfRange", None),
    "OrbitError": ("OrbitError", None),
    "PartlyDone": ("PartlyDone", None),
    "ProgressFileError": ("ClientError", "client.consumer.progress"),
    "QueueNotAssigned": ("WrongUse", "client.errors"),
    "QueueNotFound": ("NotFound", "client.errors"),
    "RecallHandleInvalid": ("SettingError", "client.errors"),
    "RecallUnsupported": ("NotSupported", "client.errors"),
    "RemotingError": ("OrbitError", "remoting.settings"),
    "RequestTimedOut": ("TimedOut", "remoting.settings"),
    "ResetFailed": ("PartlyDone", "client.admin.resets"),
    "SendFailed": ("SendFailed", None),
    "SettingError": ("SettingError", None),
    "SubscriptionRefused": ("NotSupported", "client.consumer.subscriptions"),
    "TimesUnsupported": ("MessageRefused", "client.errors"),
    "TooManyInFlight": ("TooManyInFlight", None),
    "TopicExists": ("AlreadyExists", "client.errors"),
    "TopicNotFound": ("NotFound", "client.errors"),
    "TracingUnavailable": ("MissingExtra", None),
    "UsedAfterFork": ("WrongUse", "client.errors"),
    "VerdictUnknown": ("WrongUse", "client.producer.transactions"),
    "WrongUse": ("WrongUse", None),
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        return _deprecated(name)
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def _deprecated(name: str) -> object:
    if name == "ConsumeFrom":
        warnings.warn(
            "orbitmq.ConsumeFrom is deprecated; use orbitmq.Position",
            DeprecationWarning,
            stacklevel=3,
        )
        return __getattr__("Position")
    if name not in _DEPRECATED_ERRORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    replacement, module = _DEPRECATED_ERRORS[name]
    warnings.warn(
        f"orbitmq.{name} is deprecated; use orbitmq.errors.{replacement}",
        DeprecationWarning,
        stacklevel=3,
    )
    home = errors if module is None else importlib.import_module(f"{__name__}.{module}")
    return getattr(home, replacement if module is None else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
