"""How a group is consumed in batches."""

from __future__ import annotations

from dataclasses import dataclass, fields

from orbitmq.client.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Numbers and seconds of batches."""

    messages: int = 50_000  #: of one batch, at most; all queues together
    #: After so long a task begins no more calls of handlers; what it did not come to is planned
    #: again. Below `RebalanceSettings.handover`, so that queues change hands without repetition.
    seconds: float = 5.0
    tasks: int | None = None  #: of one batch; None: as many as the session runs at once
    bytes_in_task: int = 64 * 1024 * 1024  #: of messages that wait for a handler in one task
    idle: float = 0.25  #: between two looks for new messages when there are none
    stop: float = 30.0  #: how long a stop waits for the running batch before it is cancelled
    first_pause: float = 0.5  #: after a job that failed; doubles each time
    longest_pause: float = 30.0
    #: Jobs that may fail, with nothing done between them, before the pipeline is given up. One in
    #: which a task failed has not, as long as another got something done.
    failures: int = 10
    #: How long a task waits for a broker that gives nothing; no longer than it may begin calls.
    patience: float = 20.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "tasks":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SettingError(f"batch.{field.name} must be positive, got {value!r}")
