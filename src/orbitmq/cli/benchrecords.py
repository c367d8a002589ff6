"""What `orbitmq bench` prints: a line while it measures, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbitmq.cli.benchcounts import Counts
from orbitmq.cli.wording import NOTHING, count, duration, rate, several, size


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """What was measured: in a second with the event `progress`, in all with `result`."""

    event: str
    kind: str  #: produce, consume or end-to-end
    at_seconds: float  #: since the beginning of the measurement
    seconds: float  #: that this is about
    messages: int
    bytes: int
    messages_per_second: float
    bytes_per_second: float
    failed: int
    #: Of a message: produce: until it was acknowledged, from when it was due with --rate; consume:
    #: its age; end-to-end: from sending to receiving. Null when there were none.
    mean_seconds: float | None
    p50_seconds: float | None
    p95_seconds: float | None
    p99_seconds: float | None
    p999_seconds: float | None
    max_seconds: float | None
    error: str | None = None  #: why the last one failed

    @classmethod
    def of(
        cls,
        event: str,
        kind: str,
        counts: Counts,
        *,
        at: float,
        seconds: float,
        error: str | None = None,
    ) -> BenchRecord:
        times = counts.times
        span = max(seconds, 1e-9)
        return cls(
            event=event,
            kind=kind,
            at_seconds=at,
            seconds=seconds,
            messages=counts.messages,
            bytes=counts.bytes,
            messages_per_second=counts.messages / span,
            bytes_per_second=counts.bytes / span,
            failed=counts.failed,
            mean_seconds=times.mean,
            p50_seconds=times.percentile(0.5),
            p95_seconds=times.percentile(0.95),
            p99_seconds=times.percentile(0.99),
            p999_seconds=times.percentile(0.999),
            max_seconds=times.longest if times.count else None,
            error=error,
        )

    def line(self) -> str:
        """The same for somebody who watches."""
        failed = f"  {count(self.failed)} failed" if self.failed else ""
        return (
            f"{duration(self.at_seconds):>8}  {rate(self.messages_per_second):>12}/s  "
            f"{size(self.bytes_per_second):>10}/s  p50 {brief(self.p50_seconds)}  "
            f"p99 {brief(self.p99_seconds)}  max {brief(self.max_seconds)}{failed}"
        )

    def facts(self) -> Sequence[tuple[str, str]]:
        """The same as a result."""
        found = [
            ("messages", count(self.messages)),
            ("time", duration(self.seconds)),
            ("rate", f"{rate(self.messages_per_second)}/s, {size(self.bytes_per_second)}/s"),
            ("mean", brief(self.mean_seconds)),
            ("p50", brief(self.p50_seconds)),
            ("p95", brief(self.p95_seconds)),
            ("p99", brief(self.p99_seconds)),
            ("p99.9", brief(self.p999_seconds)),
            ("max", brief(self.max_seconds)),
        ]
        if self.failed:
            why = f", the last: {self.error}" if self.error else ""
            found.append(("failed", f"{several(self.failed, 'message')}{why}"))
        return found


def brief(seconds: float | None) -> str:
    """A time to three figures: `1.23 ms`, `45.6 ms`, `7.89 s`."""
    if seconds is None:
        return NOTHING
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        value = seconds * factor
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else duration(seconds)
