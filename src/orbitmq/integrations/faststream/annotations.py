"""Annotations of handler parameters that FastStream fills in."""

from __future__ import annotations

from typing import Annotated

from faststream._internal.context import Context
from faststream.annotations import ContextRepo, Logger
from faststream.params import NoCast

from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.integrations.faststream import broker as brokers
from orbitmq.integrations.faststream import message as messages

__all__ = (
    "ContextRepo",
    "Logger",
    "NoCast",
    "RocketMQBroker",
    "RocketMQMessage",
    "RocketMQProducer",
)

RocketMQMessage = Annotated[messages.RocketMQMessage, Context("message")]
RocketMQBroker = Annotated[brokers.RocketMQBroker, Context("broker")]
#: OrbitMQ's own producer, which the broker sends with. FastStream also looks for names in callers'
#: frames, where `Producer` may be something else.
RocketMQProducer = Annotated[AsyncProducer, Context("broker._connection.producer")]
