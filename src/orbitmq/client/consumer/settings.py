"""How a consumer calls its handlers, and what it does when they fail."""

from __future__ import annotations

from dataclasses import dataclass

from orbitmq.client.checks import Fields

#: The largest number of workers, as with Apache's clients.
MOST_WORKERS = 1000
#: The largest number of messages of one call, likewise.
LARGEST_BATCH = 1024


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
        fields = Fields(self, "consume")
        fields.whole("workers", most=MOST_WORKERS)
        fields.whole("batch_size", most=LARGEST_BATCH, optional=True)
        fields.whole("max_retries", least=0, optional=True)
        fields.durations("suspend", least=0.01, most=30.0)
        fields.durations("timeout", "send_back_timeout", "local_retry", "time_slice")
