"""What a store says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueState:
    """The bounds of one queue."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """Numbers of an open store; offsets are offsets of the log."""

    log_start: int
    log_end: int
    flushed: int
    durable: int  #: where recovery would begin
    dispatched: int  #: readers see everything below
    indexed: int
    indexed_ms: int  #: when the last message that can be found by key was stored
    log_files: int
    queues: int
    queue_memory: int  #: bytes of entries held in memory
    flushes: int
    used_ratio: float  #: of the disk, at the last cleaning
    refusal: str  #: why writes are refused; empty when they are not
