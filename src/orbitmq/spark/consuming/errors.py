"""What can go wrong with a consumer group on Spark."""

from __future__ import annotations

from orbitmq.errors import OrbitError


class PipelineFailed(OrbitError):
    """Too many of a pipeline's jobs failed one after the other; it has left its group."""

    def __init__(self, group: str, failures: int, last: str) -> None:
        self.group = group
        self.failures = failures
        self.last = last
        super().__init__(
            f"the pipeline of group {group!r} is given up after {failures} failed jobs in a row; "
            f"what was not handled comes again at the next start. The last one said: {last}"
        )


class RowsRefused(OrbitError):
    """A DataFrame that does not have what is needed."""


class ReturnFailed(OrbitError):
    """Failed messages that no broker took back."""

    retriable = True

    def __init__(self, count: int, reason: str) -> None:
        self.count = count
        self.reason = reason
        super().__init__(
            f"{count} failed message(s) could not be sent back, the first because: {reason}; let "
            "the batch fail, so that it is repeated"
        )
