"""The Spark jobs of a pipeline: cancelled from any thread, and waited for to their last task.

A job that fails or is cancelled is over for its caller at once; its other tasks are not. A Python
worker is not told: Spark looks every two seconds whether a task is to be ended, gives its worker
`spark.python.task.killTimeout` more, and kills it. All the while the handler works. In order,
nobody may get the queues before that: not the next batch, and no other member of the group.

How many tasks of a job still run is known to a classic session: a task counts until its worker is
gone. In Connect it is not known, and the time is waited out that Spark takes at most.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from orbitmq.clock import Clock, SystemClock
from orbitmq.spark.errors import OptionRefused
from orbitmq.spark.optiontext import OptionTexts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_KILL_TIMEOUT: Final = "spark.python.task.killTimeout"
#: Spark's default for it, and how often it looks whether a task is to be ended.
_KILL: Final = 2.0
_LOOKS: Final = 2.0
#: For the signal to arrive, on a machine that has much to do.
_MARGIN: Final = 2.0
#: Tasks that count for so long after they should be dead do not run: Spark dropped the news.
_FORGOTTEN: Final = 30.0
#: Between two looks at what runs.
_PAUSE: Final = 0.05
#: What a job's status is while it may still begin tasks.
_RUNNING: Final = "RUNNING"


class RunningJobs:
    """Jobs that run one after the other on one thread."""

    def __init__(self, spark: SparkSession, *, clock: Clock | None = None) -> None:
        self._spark = spark
        #: None in a Connect session.
        self._context: Any = getattr(spark, "sparkContext", None)
        self._clock = clock or SystemClock()
        #: Of the last job, also when it is over: its tasks may not be.
        self._tag: str | None = None
        self.is_running = False

    def begin(self) -> None:
        """What this thread runs from now on is the job that is meant."""
        # Tags of a session are of no use in a classic one: they are found by the thread alone that
        # has set them.
        self._tag = f"orbitmq-{uuid.uuid4().hex}"
        self.is_running = True
        add = self._spark.addTag if self._context is None else self._context.addJobTag
        add(self._tag)

    def end(self) -> None:
        """What this thread runs from now on is none of it, and is not cancelled with it."""
        self.is_running = False
        if self._tag is None:
            return
        remove = self._spark.removeTag if self._context is None else self._context.removeJobTag
        try:
            remove(self._tag)
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says: nothing runs then.
            log.debug("the tag of a job stays: %s", error)

    def cancel(self) -> None:
        """End the job, from any thread; its tasks end some time later."""
        if self._tag is None:
            return
        try:
            if self._context is None:
                self._spark.interruptTag(self._tag)
            else:
                self._context.cancelJobsWithTag(self._tag)
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says: nothing runs then.
            log.warning("a job could not be cancelled: %s", error)

    @property
    def longest(self) -> float:
        """How long the tasks of a job that has failed may live on."""
        return self._kill_timeout() + _LOOKS + _MARGIN

    def until_over(self) -> None:
        """Return when no task runs of a job that has failed or was cancelled."""
        began, longest = self._clock.monotonic(), self.longest
        pause = threading.Event()
        while (running := self._running()) != 0:
            waited = self._clock.monotonic() - began
            if running is None and waited >= longest:
                return
            if waited >= longest + _FORGOTTEN:
                log.error("%d task(s) of a job that has failed do not end", running)
                return
            pause.wait(_PAUSE)

    def _running(self) -> int | None:
        """Tasks that run; None when it is not known."""
        if self._context is None or self._tag is None:
            return None
        try:
            jobs = list(self._jobs())
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says.
            log.debug("running tasks are not known: %s", error)
            return None
        # What Spark tells about jobs comes late, but in order: when the end of a job is known, so
        # are its tasks.
        if not jobs or any(status == _RUNNING for status, _ in jobs):
            return None
        return sum(tasks for _, tasks in jobs)

    def _jobs(self) -> Iterator[tuple[str, int]]:
        """The status of jobs, and how many of their tasks run."""
        tracker = self._context.statusTracker()
        for number in self._context._jsc.sc().statusTracker().getJobIdsForTag(self._tag):
            job = tracker.getJobInfo(number)
            if job is not None:
                stages = map(tracker.getStageInfo, job.stageIds)
                yield job.status, sum(stage.numActiveTasks for stage in stages if stage is not None)

    def _kill_timeout(self) -> float:
        try:
            text = str(self._spark.conf.get(_KILL_TIMEOUT, "2s"))
        except Exception as error:  # noqa: BLE001
            # As above.
            log.debug("it is not known how long tasks are given to end: %s", error)
            return _KILL
        try:
            return OptionTexts({_KILL_TIMEOUT: text}).duration(_KILL_TIMEOUT, _KILL)
        except OptionRefused:
            # Spark also takes a bare number, of milliseconds, and other spellings of units.
            return float(text) / 1000 if text.isdecimal() else _KILL
