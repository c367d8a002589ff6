"""A FastStream broker.

from faststream import FastStream
from orbitmq.integrations.faststream import RocketMQBroker

broker = RocketMQBroker("127.0.0.1:9876", group="billing")
app = FastStream(broker)

@broker.subscriber("orders")
@broker.publisher("invoices")
async def bill(order: Order) -> Invoice: ...
"""

from __future__ import annotations

import importlib.util

from orbitmq.errors import MissingExtra

if importlib.util.find_spec("faststream") is None:
    raise MissingExtra("the FastStream broker", "faststream", "faststream")

from orbitmq.integrations.faststream.annotations import RocketMQMessage
from orbitmq.integrations.faststream.broker import (
    RocketMQBroker,
    RocketMQPublisher,
    RocketMQRoute,
    RocketMQRouter,
)
from orbitmq.integrations.faststream.message import RocketMQResponse
from orbitmq.integrations.faststream.testing import TestRocketMQBroker

__all__ = (
    "RocketMQBroker",
    "RocketMQMessage",
    "RocketMQPublisher",
    "RocketMQResponse",
    "RocketMQRoute",
    "RocketMQRouter",
    "TestRocketMQBroker",
)
