"""Every limit and interval of the network side, with its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from orbitmq.errors import OrbitError, SettingError, TimedOut, Unavailable
from orbitmq.wire.codes import DEFAULT_LIMITS, RequestCode, ResponseCode, WireLimits, named

if TYPE_CHECKING:
    from orbitmq.remoting.tls import ServerTls


KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """How much one connection may hold, and how long it waits."""

    read_size: int = 64 * KIB  #: bytes of one read; larger buffers cost a mapping each
    flush_bytes: int = 256 * KIB  #: answers collected within a turn before they are written
    slow_bytes: int = 1 * MIB  #: unwritten bytes at which the peer counts as slow: not read from
    resume_bytes: int = 256 * KIB  #: unwritten bytes below which it is read from again
    unwritten_bytes: int = 64 * MIB  #: unwritten bytes at which the connection is aborted
    open_requests: int = 32_768  #: requests of the peer left open; above it is not read from
    open_bytes: int = 64 * MIB  #: of those requests; above it is not read from
    pending_requests: int = 65_535  #: requests of ours without an answer; above they are refused
    request_timeout: float = 3.0  #: for a request of ours that names none
    limits: WireLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        check_positive("connection", self, "read_size", "flush_bytes", "slow_bytes", "resume_bytes")
        check_positive("connection", self, "unwritten_bytes", "open_requests", "open_bytes")
        check_positive("connection", self, "pending_requests", "request_timeout")
        check_ordered("connection", self, "resume_bytes", "slow_bytes", "unwritten_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and its limits."""

    host: str = "127.0.0.1"  #: the address to bind; 0.0.0.0 or :: for every interface
    port: int = 0  #: the port to bind; 0: any free one
    backlog: int = 1024  #: connections that may wait to be accepted
    connections: int = 10_000  #: above this, new ones are refused; a broker's two ports share it
    host_connections: int = 5_000  #: of one address; above this, new ones of it are refused
    #: Memory for frames longer than a read that have begun to arrive; above it, others are not read
    #: from until there is room. A host alone gets half of it. Apache has no bound.
    unfinished_bytes: int = 128 * MIB
    #: Bytes a second by which a frame that has begun has to go on, or its connection is closed.
    frame_rate: int = 16 * KIB
    frame: float = 60.0  #: over how long that is judged: no shorter break does harm
    crowded_frame: float = 5.0  #: the same for a long one while others wait for its memory
    first_byte: float = 30.0  #: how long a new connection may stay silent
    handshake: float = 10.0  #: how long a TLS handshake may take
    #: Closes a connection without any read or write for this time, or whose peer takes nothing of
    #: what is written to it.
    idle: float = 120.0
    sweep: float = 5.0  #: how often idle connections and frames that take long are looked for
    accept_pause: float = 1.0  #: how long to wait when no file handles are left
    grace: float = 5.0  #: how long a stop waits for answers that are on their way
    tls: ServerTls | None = None
    connection: ConnectionSettings = field(default_factory=ConnectionSettings)

    def __post_init__(self) -> None:
        check_positive("server", self, "backlog", "connections", "first_byte", "handshake", "idle")
        check_positive("server", self, "sweep", "accept_pause", "host_connections", "frame")
        check_positive("server", self, "crowded_frame", "frame_rate")
        check_ordered("server", self, "crowded_frame", "frame")
        longest = self.connection.limits.frame + 4
        if self.unfinished_bytes < longest:
            raise SettingError(
                f"server.unfinished_bytes must have room for the longest frame, {longest} bytes, "
                f"got {self.unfinished_bytes}"
            )
        if self.grace < 0:
            raise SettingError(f"server.grace must not be negative, got {self.grace}")
        if not 0 <= self.port <= 65535:
            raise SettingError(f"server.port must be 0 to 65535, got {self.port}")

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """How a peer is reached, and how soon again after a failure."""

    connect_timeout: float = 3.0
    idle: float = 120.0  #: closes a connection without any read or write for this time
    sweep: float = 5.0  #: how often idle connections are looked for
    #: Requests unanswered and nothing heard for this time: the peer gets a request that any server
    #: answers. Nothing heard for this time again: the connection is given up and replaced.
    silence: float = 2.5
    first_pause: float = 0.1  #: after the first failed attempt; doubles with each further one
    longest_pause: float = 2.0
    jitter: float = 0.3  #: share of a pause that chance may take away
    settled: float = 1.0  #: a connection that ends sooner counts as a failed attempt
    #: Connections to one broker for threads that block, beside that of the event loop. Each thread
    #: that sends uses one; when all are in use, the next thread waits for one within its timeout.
    blocking_connections: int = 64
    blocking_idle: float = 20.0  #: those that were not used for this time are closed
    connection: ConnectionSettings = field(default_factory=ConnectionSettings)

    def __post_init__(self) -> None:
        check_positive(
            "channel", self, "connect_timeout", "idle", "sweep", "first_pause", "silence"
        )
        check_positive("channel", self, "blocking_connections", "blocking_idle")
        check_ordered("channel", self, "first_pause", "longest_pause")
        if not 0 <= self.jitter < 1:
            raise SettingError(f"channel.jitter must be from 0 to below 1, got {self.jitter}")
        if self.settled < 0:
            raise SettingError(f"channel.settled must not be negative, got {self.settled}")


def check_positive(role: str, settings: object, *names: str) -> None:
    """Raise `SettingError` for the first of these settings that is not above 0."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            raise SettingError(f"{role}.{name} must be positive, got {value}")


def check_not_negative(role: str, settings: object, *names: str) -> None:
    """Raise `SettingError` for the first of these settings that is below 0."""
    for name in names:
        value = getattr(settings, name)
        if value < 0:
            raise SettingError(f"{role}.{name} must not be negative, got {value}")


def check_ordered(role: str, settings: object, *names: str) -> None:
    """Raise `SettingError` unless each of these settings is at most the next."""
    values = [getattr(settings, name) for name in names]
    if values != sorted(values):
        shown = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
        raise SettingError(f"{role}: each must be at most the next, got {shown}")


class Address(NamedTuple):
    """A host (name or number, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


#: Stands for an address that is not known.
NOWHERE = Address("", 0)


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """`host:port`, `[IPv6]:port`, or without the port when there is a default for it."""
    if "://" in text:
        rest = text.partition("://")[2].strip().rstrip("/")
        raise AddressError(f"an address has no scheme: write {rest}, not {text!r}")
    host, port = _split(text.strip())
    if not host or any(character.isspace() or character in "/@" for character in host):
        raise AddressError(f"an address must be host:port or [IPv6]:port, got {text!r}")
    if port is None:
        if host.isdecimal():
            raise AddressError(f"a number alone is no address: write host:port, not {text!r}")
        if default_port is None:
            raise AddressError(f"an address needs a port, as in {host}:9876, got {text!r}")
        return Address(host, default_port)
    if not (port.isascii() and port.isdigit()) or not 0 <= int(port[:6]) <= 65535:
        raise AddressError(f"a port must be a number from 0 to 65535, got {port!r} in {text!r}")
    return Address(host, int(port))


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise AddressError(f"an IPv6 address must be [address]:port, got {text!r}")
        return host, rest[1:] if rest else None
    host, colon, port = text.partition(":")
    if ":" in port:
        raise AddressError(f"an IPv6 address must stand in brackets: [address]:port, got {text!r}")
    return host, port if colon else None


def socket_address(name: Any) -> Address:
    """A socket's name as an address; IPv4 in the clothes of IPv6 without them."""
    if not isinstance(name, tuple) or len(name) < 2:
        return NOWHERE
    host = str(name[0])
    return Address(host.removeprefix("::ffff:") if "." in host else host, int(name[1]))


class RemotingError(OrbitError):
    """Something about talking to a peer that the caller can act on."""


class AddressError(RemotingError):
    """A text that names no address."""


class ListenFailed(RemotingError):
    """The address cannot be listened on."""

    def __init__(self, address: Address, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(
            f"cannot listen on {address}: {reason}; choose another address, or port 0 for any"
        )


class ConnectFailed(RemotingError, Unavailable):
    """The address could not be connected to."""

    def __init__(self, address: Address, reason: str, *, retry_in: float = 0.0) -> None:
        self.address = address
        self.reason = reason
        #: Seconds until a channel would try again. Not in the text: a command that ends
        #: with it tries nothing any more.
        self.retry_in = retry_in
        super().__init__(f"cannot connect to {address}: {reason}")


class ConnectionLost(RemotingError, Unavailable):
    """The connection ended before the answer: whether the request was carried out is unknown."""

    def __init__(self, remote: Address, reason: str) -> None:
        self.remote = remote
        self.reason = reason
        super().__init__(f"the connection to {remote} ended: {reason}")


class RequestTimedOut(RemotingError, TimedOut):
    """No answer came in time: whether the request was carried out is unknown."""

    def __init__(self, remote: Address, code: int, timeout: float) -> None:
        self.remote = remote
        self.code = code
        self.timeout = timeout
        request = f" {named(RequestCode, code)!r}" if code else ""
        super().__init__(f"{remote} did not answer{request} within {timeout:g} s")


class TooManyRequests(RemotingError):
    """The limit of requests that wait for the peer is reached: this one was not sent."""

    retriable: ClassVar[bool] = True

    def __init__(self, remote: Address, limit: int) -> None:
        self.remote = remote
        self.limit = limit
        super().__init__(
            f"{limit} requests already wait for answers of {remote}; send fewer at a time"
        )


class Refused(RemotingError):
    """Raised by a handler: the request is answered with this code and remark."""

    def __init__(self, code: int, remark: str) -> None:
        self.code = int(code)
        self.remark = remark
        super().__init__(f"refused, {named(ResponseCode, self.code)}: {remark}")
