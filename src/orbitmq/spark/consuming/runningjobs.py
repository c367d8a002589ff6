"""The Spark jobs of a pipeline: cancelled from any thread, and waited for to their last task.

A job that fails or is cancelled is over for its caller at once; its other tasks are not. A Python
worker is not told: Spark looks every two seconds whether a task is to be ended, gives its worker
`spark.python.task.killTimeout` more, and kills it. All the while the handler works. In order,
nobody may get the queues before that: not the next batch, and no other member of the group.

How many tasks of a job still run is known to a classic session: a task counts until its worker is
gone. In Connect it is not known, and the time is waited out that Spark takes at most.

A task on an executor that Spark has lost counts no more, and may be at work all the same. Whether
there may be one is all that is known of it.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
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
#: The masters of sessions that have no executors to lose. With them one task that fails, as when
#: its process dies, is enough for the job to fail.
_LOCAL: Final = re.compile(r"local(\[.*)?$")


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
        self._is_cancelled = False

    def begin(self) -> None:
        """What this thread runs from now on is the job that is meant."""
        # Tags of a session are of no use in a classic one: they are found by the thread alone that
        # has set them.
        self._tag = f"orbitmq-{uuid.uuid4().hex}"
        self.is_running, self._is_cancelled = True, False
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
        self._is_cancelled = True
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

    def may_have_lost_tasks(self) -> bool:
        """Whether a task of a job that has failed may be at work where Spark has lost it.

        Tasks that fail without that are not told apart from it; those that were cancelled are. When
        nothing is known, a job that we have cancelled has most likely ended for no other reason.
        """
        if _LOCAL.match(str(getattr(self._context, "master", ""))):
            return False
        jobs = self._jobs()
        if jobs is None:
            return not self._is_cancelled
        return any(stage.numFailedTasks for _, stages in jobs for stage in stages)

    def _running(self) -> int | None:
        """Tasks that run; None when it is not known."""
        jobs = self._jobs()
        # What Spark tells about jobs comes late, but in order: when the end of a job is known, so
        # are its tasks.
        if not jobs or any(status == _RUNNING for status, _ in jobs):
            return None
        return sum(int(stage.numActiveTasks) for _, stages in jobs for stage in stages)

    def _jobs(self) -> list[tuple[str, list[Any]]] | None:
        """The status of jobs, and what is known of their tasks; None when nothing is."""
        if self._context is None or self._tag is None:
            return None
        try:
            tracker = self._context.statusTracker()
            numbers = self._context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)
            jobs = [job for number in numbers if (job := tracker.getJobInfo(number)) is not None]
            stages = [map(tracker.getStageInfo, job.stageIds) for job in jobs]
            return [
                (job.status, [each for each in some if each is not None])
                for job, some in zip(jobs, stages, strict=True)
            ]
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says.
            log.debug("running tasks are not known: %s", error)
            return None

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
