"""What a load generator can be asked to do, and what it says afterwards."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server: where it listens, and the process whose CPU time counts."""

    port: int
    pid: int


class Sends(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send messages, one or a whole batch in a request."""

    topic: str
    body_size: int
    queues: int = 4
    per_request: int = 1


class Pulls(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pull what lies in the queues of a topic, over and over."""

    topic: str
    queues: int
    per_request: int
    messages: int  #: in every queue


Requests: TypeAlias = Sends | Pulls


class Drive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """As fast as the server answers, for some time or some requests."""

    target: Target
    requests: Requests
    connections: int
    in_flight: int  #: on every connection
    seconds: float = 0.0
    count: int = 0  #: requests, when no time is given


class Driven(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of it."""

    messages: int
    bytes: int  #: of answers
    seconds: float
    cpu: float  #: seconds of the server
    refused: int
    refusal: str = ""


class Pace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many messages a second; how long each takes from its sender to its receiver."""

    target: Target
    way: Literal["broker", "relay"]
    topic: str
    body_size: int
    rate: float
    seconds: float


class Paced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of it, in seconds."""

    messages: int
    median: float
    p99: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It could not be done."""

    reason: str


Wish: TypeAlias = Drive | Pace
Outcome: TypeAlias = Driven | Paced | Failed
