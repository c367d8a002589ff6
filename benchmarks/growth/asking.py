"""What the generator of the curves can be asked for, and what it says afterwards."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from benchmarks.load.asking import Target


class Sends(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send single messages to the queues of a topic in turn."""

    topic: str
    queues: int
    body_size: int


class Reads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pull 32 at a time from places that are spread evenly over everything in a topic."""

    topic: str
    queues: int
    per_queue: int  #: messages that lie in every queue


class Follows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consume: a pull for every queue waits at the broker for what comes next.

    Every connection is a consumer. They are one group and share the queues, or each is a group of
    its own and gets everything.
    """

    topic: str
    queues: int
    is_shared: bool


Work: TypeAlias = Sends | Reads | Follows


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Work on some connections of one server."""

    target: Target
    work: Work
    connections: int
    in_flight: int = 1  #: requests on every connection; those who follow have one for every queue


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Loads at the same time, those who follow before those who send."""

    loads: tuple[Load, ...]
    seconds: float
    least: int = 0  #: messages; it takes longer if they are not done by then


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `failure` says why nothing did."""

    sent: int = 0
    read: int = 0
    seconds: float = 0.0
    cpu: float = 0.0  #: seconds of all the servers
    failure: str = ""
