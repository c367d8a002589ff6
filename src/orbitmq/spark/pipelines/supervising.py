"""Runs a pipeline: starts it, watches it, brings it to rest, and starts it again when it failed.

To stop, streams are told to take no more (`drainFile`) and are ended when no batch runs any more:
Spark's own stop cuts off the batch that runs, which would then be repeated by the next start. One
that does not come to rest in time is cut off all the same. Either way the checkpoint says where
the next start goes on.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbitmq.client.errors import SettingError
from orbitmq.clock import Clock, SystemClock
from orbitmq.spark.errors import cause_of
from orbitmq.spark.pipelines.definition import Definition
from orbitmq.spark.pipelines.errors import PipelineBroken
from orbitmq.spark.pipelines.progress import Progress
from orbitmq.spark.pipelines.run import Run
from orbitmq.spark.pipelines.targets import Target, started

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a pipeline that failed is started again, and how soon."""

    restarts: int = 5  #: one after the other; 0: never
    first_pause: float = 1.0  #: doubles each time
    longest_pause: float = 60.0
    #: Seconds after which a pipeline that runs is well again: earlier failures count no more.
    healthy_after: float = 300.0

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise SettingError(f"restarts must be 0 or more, got {self.restarts!r}")
        for name in ("first_pause", "longest_pause", "healthy_after"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)!r}")

    def pause(self, failures: int) -> float:
        """How long to wait before the next start, after so many failures in a row."""
        return float(min(self.longest_pause, self.first_pause * 2 ** min(failures - 1, 60)))


class End(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"  #: by itself: everything that was there is done
    STOPPED = "stopped"  #: because it was told to


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a run."""

    end: End
    progress: tuple[Progress, ...]
    restarts: int
    #: Whether every batch that had begun was finished.
    is_clean: bool
    shown: DataFrame | None = None


@dataclass(frozen=True, slots=True)
class Restarting:
    """A pipeline has failed and is about to be started again."""

    problem: str
    number: int
    pause: float


class Supervisor:
    """Runs one pipeline in the thread that calls `run`."""

    def __init__(
        self,
        definition: Definition,
        values: Mapping[str, Any],
        run: Run,
        *,
        drain_file: Path,
        policy: RestartPolicy | None = None,
        stop_timeout: float = 60.0,
        look_every: float = 0.2,
        on_progress: Callable[[Sequence[Progress]], object] | None = None,
        on_restart: Callable[[Restarting], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`drain_file` is the one that the run was made with; it must not exist."""
        self._definition = definition
        self._values = dict(values)
        self._run = run
        self._drain_file = drain_file
        self._policy = policy or RestartPolicy()
        self._stop_timeout = stop_timeout
        self._look_every = look_every
        self._on_progress = on_progress or (lambda _: None)
        self._on_restart = on_restart or (lambda _: None)
        self._clock = clock or SystemClock()

    def run(self, ended: threading.Event) -> Report:
        """Run until it has finished, or until `ended` is set.

        Raises `PipelineBroken` when it fails too often, and what the function raises when it
        cannot be started even once.
        """
        failures = restarts = 0
        while True:
            began = self._clock.monotonic()
            targets: list[Target] = []
            try:
                outcome = self._definition.function(self._run, **self._values)
                targets, shown = started(outcome, self._run)
            except Exception as error:
                # Whatever somebody's function raises. The first time it is a mistake.
                if not restarts:
                    raise
                problem: str | None = cause_of(str(error) or type(error).__name__)
            else:
                problem = self._watch(targets, ended)
                is_clean = self._bring_to_rest(targets)
                if problem is None:
                    progress = tuple(target.look() for target in targets)
                    self._on_progress(progress)
                    is_finished = not ended.is_set() or not targets
                    end = End.FINISHED if is_finished else End.STOPPED
                    return Report(end, progress, restarts, is_clean, shown)
            if self._clock.monotonic() - began >= self._policy.healthy_after:
                failures = 0
            failures += 1
            if failures > self._policy.restarts:
                raise PipelineBroken(self._run.name, problem or "", restarts=restarts)
            pause = self._policy.pause(failures)
            restarts += 1
            self._on_restart(Restarting(problem or "", restarts, pause))
            if ended.wait(pause):
                return Report(End.STOPPED, (), restarts, is_clean=True)

    def _watch(self, targets: Sequence[Target], ended: threading.Event) -> str | None:
        """Wait for the end of all, for the wish to stop, or for a failure, which is returned."""
        last: tuple[Progress, ...] = ()
        while targets:
            progress = tuple(target.look() for target in targets)
            if progress != last:
                self._on_progress(progress)
                last = progress
            # Before failures are looked for: one that comes in between would pass for a good end.
            is_over = all(target.is_over for target in targets)
            for target in targets:
                if (failure := target.failure) is not None:
                    return failure
            if is_over:
                return None
            if ended.wait(self._look_every):
                return None
        return None

    def _bring_to_rest(self, targets: Sequence[Target]) -> bool:
        """End what runs between two of its batches; False when one took too long, or failed."""
        running = [target for target in targets if not target.is_over]
        if not running:
            has_failed = _has_failed(targets)
            for target in targets:
                target.stop()
            return not has_failed
        self._drain_file.parent.mkdir(parents=True, exist_ok=True)
        self._drain_file.touch()
        try:
            is_clean = self._until_at_rest(running) and not _has_failed(targets)
        finally:
            for target in targets:
                target.stop()
            self._drain_file.unlink(missing_ok=True)
        return is_clean

    def _until_at_rest(self, targets: Sequence[Target]) -> bool:
        """Wait until none runs a batch, seen twice: between two batches there is a short gap."""
        deadline = self._clock.monotonic() + self._stop_timeout
        pause = threading.Event()
        times = dict.fromkeys(range(len(targets)), 0)
        while any(number < 2 for number in times.values()):
            if self._clock.monotonic() >= deadline:
                return False
            for place, target in enumerate(targets):
                if times[place] < 2:
                    times[place] = times[place] + 1 if target.is_at_rest else 0
            pause.wait(self._look_every)
        return True


def _has_failed(targets: Sequence[Target]) -> bool:
    return any(target.failure is not None for target in targets)
