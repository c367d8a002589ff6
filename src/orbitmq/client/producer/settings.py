"""How a producer sends."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from orbitmq.client.errors import SettingError
from orbitmq.client.names import AUTO_CREATE_TOPIC
from orbitmq.message.compression import DEFAULT_LEVEL
from orbitmq.message.sysflag import COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD

KIB = 1024
MIB = 1024 * KIB


class Compression(enum.IntEnum):
    """How large bodies are compressed; clients in C++, Go and Node can read zlib only."""

    ZLIB = COMPRESSION_ZLIB
    LZ4 = COMPRESSION_LZ4  #: needs orbitmq[lz4]
    ZSTD = COMPRESSION_ZSTD  #: needs orbitmq[zstd]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettings:
    """Deadlines, retries and limits of one producer."""

    timeout: float = 3.0  #: for a whole call, retries included
    retries: int = 2  #: further attempts after the first, on another broker where there is one
    #: Most that one attempt may take while another could follow; None: half of what is left, if
    #: another broker is there. Java gives the first attempt everything unless told otherwise.
    attempt_timeout: float | None = None
    retry_pause: float = 0.05  #: before a broker is tried again within one call; doubles
    #: Try again when a message was stored without the safety that the broker promises.
    retry_not_stored_ok: bool = False
    #: Prefer other brokers for a while after one has failed.
    avoid_failed: bool = True
    #: Prefer other brokers for a while after one was slow, by Java's table (`sendLatencyEnable`).
    avoid_slow: bool = False
    max_message_size: int = 4 * MIB  #: of a body or a batch, before compression
    compress_from: int = 4 * KIB  #: bodies of this size and more are compressed; 0: none
    compression: Compression = Compression.ZLIB
    compression_level: int = DEFAULT_LEVEL
    max_in_flight: int = 1024  #: submitted messages without an answer; above, `submit` waits
    max_in_flight_bytes: int = 32 * MIB  #: the same for their bodies
    auto_create_topic: str = AUTO_CREATE_TOPIC  #: template of topics made by sending to them
    auto_create_queues: int = 4  #: queues per broker of such a topic
    check_workers: int = 4  #: checks of transactions that run at a time

    def __post_init__(self) -> None:
        for name in ("timeout", "max_message_size", "max_in_flight", "max_in_flight_bytes"):
            _check(name, getattr(self, name))
        for name in ("auto_create_queues", "check_workers"):
            _check(name, getattr(self, name))
        for name in ("retries", "retry_pause", "compress_from"):
            _check(name, getattr(self, name), or_zero=True)
        if self.attempt_timeout is not None:
            _check("attempt_timeout", self.attempt_timeout)
        if self.compression not in tuple(Compression):
            allowed = ", ".join(f"Compression.{each.name}" for each in Compression)
            raise SettingError(
                f"sending.compression must be one of {allowed}, got {self.compression!r}"
            )
        if self.compression_level not in range(10):
            raise SettingError(
                f"sending.compression_level must be 0 to 9, got {self.compression_level!r}"
            )


def _check(name: str, value: float, *, or_zero: bool = False) -> None:
    if isinstance(value, bool) or not (value > 0 or (or_zero and value == 0)):
        allowed = "0 or more" if or_zero else "positive"
        raise SettingError(f"sending.{name} must be {allowed}, got {value!r}")
