"""What a process with a client can be asked to do, and what it says afterwards.

The clients that are compared (ours, the C++ one from PyPI, Apache's for Java, two for Kafka in
Python) read the same wishes, one JSON object a line, and answer each with a line. A client is kept
between wishes, so that connections and compiled code are warm; a consumer is not, because each wish
is for a group of its own that begins at the beginning.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from benchmarks.load.asking import Failed, Paced

#: How messages are sent. Of clients for RocketMQ: `blocking` only; of those for Kafka: the last
#: three, each as far as it has them. These three send bodies alone, without tags and keys.
Sending: TypeAlias = Literal[
    "blocking",  #: `send` of as many threads as are given
    "threadsafe",  #: the same by `run_coroutine_threadsafe`, on an asyncio producer
    "awaited",  #: `await send`, one after the other
    "pipelined",  #: `await submit`
    "batched",  #: `await send_batch` of 32
    "frames",  #: frames that were encoded before, on a bare socket
    "submitted",  #: `submit` of one thread, or `produce`; then every outcome is looked at
    "gathered",  #: the same on an event loop: `await submit`, or `await send` of aiokafka
    "many",  #: `send_many`, or `produce` of the same list
]
#: How messages are consumed. Of clients for RocketMQ: `sync` only; of those for Kafka, which have
#: no handlers: `sync`, where a function is called for each message, and `bodies`.
Consuming: TypeAlias = Literal[
    "sync",  #: a `def` handler
    "async",  #: an `async def` handler
    "batch",  #: a `def` handler for lists of messages
    "poll",  #: a pull consumer's objects
    "bodies",  #: the same, and the body of each is looked at
    "arrow",  #: a pull consumer's record batches
    "bare",  #: pulls on a bare socket, records cut by the decoder, a function called for each
]


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send so many messages."""

    name_server: str  #: of Kafka: the broker
    broker_port: int
    topic: str
    way: Sending
    count: int
    threads: int = 1
    body_size: int = 1024  #: of our client and those for Kafka; of others 1 KiB


class Consume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consume so many messages of a topic, from the beginning, and do nothing with them."""

    name_server: str
    broker_port: int
    topic: str
    group: str
    way: Consuming
    count: int


class Deliver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send so many messages a second; how long each takes from there to its handler."""

    name_server: str
    topic: str
    rate: float
    seconds: float


class Spent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What it took, from the first message to the last."""

    messages: int
    began: float  #: by the clock that all processes of a machine share
    ended: float
    cpu: float  #: seconds, of all threads of the client's process

    @property
    def seconds(self) -> float:
        return self.ended - self.began


ClientWish: TypeAlias = Send | Consume | Deliver
ClientOutcome: TypeAlias = Spent | Paced | Failed
