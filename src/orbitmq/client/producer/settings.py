"""How a producer sends."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from orbitmq.client.checks import Fields
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
        fields = Fields(self, "sending")
        fields.whole("max_message_size", "max_in_flight", "max_in_flight_bytes")
        fields.whole("auto_create_queues", "check_workers")
        fields.whole("retries", "compress_from", least=0)
        fields.durations("timeout")
        fields.durations("retry_pause", least=0)
        fields.durations("attempt_timeout", optional=True)
        fields.switches("retry_not_stored_ok", "avoid_failed", "avoid_slow")
        if self.compression not in tuple(Compression):
            allowed = ", ".join(f"Compression.{each.name}" for each in Compression)
            raise SettingError(
                f"sending.compression must be one of {allowed}, got {self.compression!r}"
            )
        fields.whole("compression_level", least=0, most=9)
