"""How a consumer calls its handlers, and what it does when they fail."""

from __future__ import annotations

from dataclasses import dataclass

from orbitmq.client.errors import SettingError

#: The largest number of workers, as with Apache's clients.
MOST_WORKERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeSettings:
    """Numbers and seconds of consumption. The defaults are RocketMQ's unless a comment says so.

    How long a stop waits for handlers that run is `RebalanceSettings.handover`: longer than that
    nobody waits for their queues.
    """

    workers: int = 20  #: handler calls at once
    #: Messages of one call. None: 1, and 32 for a handler that takes a batch.
    batch_size: int | None = None
    #: Attempts after the first. None: as the group is set at the broker (16); in order, no limit.
    max_retries: int | None = None
    #: A call that takes longer is given up: its messages come again, whatever it does in the end.
    timeout: float = 900.0
    send_back_timeout: float = 5.0  #: for one attempt to send a failed message back
    local_retry: float = 5.0  #: pause before a failed message that could not be sent back
    suspend: float = 1.0  #: in order: pause of a queue after a failure, 0.01 to 30
    time_slice: float = 60.0  #: in order: how long a queue may keep a worker before others

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not 1 <= self.workers <= MOST_WORKERS:
            raise SettingError(f"consume.workers must be 1 to {MOST_WORKERS}, got {self.workers!r}")
        if self.batch_size is not None and not 1 <= self.batch_size <= 1024:
            raise SettingError(f"consume.batch_size must be 1 to 1024, got {self.batch_size!r}")
        if self.max_retries is not None and self.max_retries < 0:
            raise SettingError(f"consume.max_retries must be 0 or more, got {self.max_retries!r}")
        if not 0.01 <= self.suspend <= 30:
            raise SettingError(f"consume.suspend must be 0.01 to 30 seconds, got {self.suspend!r}")
        for name in ("timeout", "send_back_timeout", "local_retry", "time_slice"):
            self._check_positive(name)

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not value > 0:
            raise SettingError(f"consume.{name} must be positive, got {value!r}")
