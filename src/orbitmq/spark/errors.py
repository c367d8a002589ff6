"""What the Spark source refuses, in words that name the option and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from orbitmq.client.errors import NoRoute
from orbitmq.client.ranges import OffsetsGone
from orbitmq.errors import OrbitError
from orbitmq.spark.workerends import WorkerFailed

#: Characters of a cause that are shown.
_LONGEST: Final = 1000
_FROM_OURS: Final = f"{WorkerFailed.__module__}.{WorkerFailed.__name__}: "


def cause_of(said: str) -> str:
    """The cause of what Spark says about a failed job or query, in one line.

    What Python code raised is the line below the frames of the last traceback; in front of it are
    the tracebacks of what led there, and stacks of the JVM follow. Without any, as when a worker is
    gone, it is what the JVM says, below the line that names the call.
    """
    _, found, below = said.rpartition("Traceback (most recent call last):\n")
    if found:
        lines = [line for line in below.splitlines() if line[:1].strip()]
        if lines:
            # A worker of ours says this in front of it.
            return lines[0].removeprefix(_FROM_OURS)[:_LONGEST]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    of_java = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return next(iter(of_java + lines), said)[:_LONGEST]


class SourceError(OrbitError):
    """Something about a query on the `rocketmq` source that its author can act on."""


class NoSpark(OrbitError):
    """A session is wanted, and PySpark is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "a Spark session needs pyspark, which is not installed; pip install 'orbitmq[spark]', "
            "or 'orbitmq[spark-local]' with a Java"
        )


class OptionRefused(SourceError):
    """An option that cannot work."""

    def __init__(self, option: str, value: str | None, allowed: str) -> None:
        self.option = option
        self.value = value
        self.allowed = allowed
        got = "it is missing" if value is None else f"got {value!r}"
        super().__init__(f"option {option!r} must be {allowed}; {got}")

    def __reduce__(self) -> tuple[type[OptionRefused], tuple[Any, ...]]:
        return type(self), (self.option, self.value, self.allowed)


class OptionUnknown(OptionRefused):
    """An option that nobody knows. Its text is not shown: it may be a secret."""

    def __init__(self, option: str, meant: str | None, known: Iterable[str]) -> None:
        #: What it is called here, or nearly; None when no name is like it.
        self.meant = meant
        self.known = tuple(known)
        self.option = option
        self.value = None
        self.allowed = f"one of {', '.join(self.known)}"
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(self.known)}"
        SourceError.__init__(self, f"unknown option {option!r}; {hint}")

    def __reduce__(self) -> tuple[type[OptionUnknown], tuple[Any, ...]]:
        return type(self), (self.option, self.meant, self.known)


class OptionsNotPassed(SourceError):
    """A table, to which Spark does not pass the options that it was created with."""

    REMEDY = (
        "Spark passes a table that was made by CREATE TABLE none of its OPTIONS; say CREATE "
        "TEMPORARY VIEW name USING rocketmq OPTIONS (...) instead, or in Python spark.read"
        '.format("rocketmq").options(...).load().createOrReplaceTempView("name")'
    )

    def __init__(self, problem: str | None = None) -> None:
        """`problem` is what could not be done without any option."""
        self.problem = problem
        super().__init__(self.REMEDY if problem is None else f"{problem}. ({self.REMEDY}.)")

    def __reduce__(self) -> tuple[type[OptionsNotPassed], tuple[str | None]]:
        return type(self), (self.problem,)


class TopicMissing(SourceError):
    """Rows for a topic that does not exist; sending would create it, under a mistyped name too."""

    def __init__(self, missing: NoRoute) -> None:
        self.missing = missing
        super().__init__(f"{missing}, or set the option createTopic to true")

    def __reduce__(self) -> tuple[type[TopicMissing], tuple[NoRoute]]:
        return type(self), (self.missing,)


class TopicsNotNamed(OptionRefused):
    """A read that says nothing about its topics, or says it in more than one way."""

    WAYS = "subscribe (or topic), subscribePattern and assign"

    def __init__(self, given: Iterable[str]) -> None:
        self.given = tuple(given)
        self.option = "subscribe"
        self.value = ", ".join(self.given) or None
        self.allowed = f"the only one of {self.WAYS}"
        got = f"{' and '.join(self.given)} are given" if self.given else "none is given"
        SourceError.__init__(
            self, f"say which topics to read, with one of the options {self.WAYS}; {got}"
        )

    def __reduce__(self) -> tuple[type[TopicsNotNamed], tuple[tuple[str, ...]]]:
        return type(self), (self.given,)


class SchemaRefused(SourceError):
    """A schema that the source cannot read into, or that cannot be written."""


class UnnamedReadRefused(SourceError):
    """An account that may not read as the group by whose name reads without a group go."""

    def __init__(self, group: str, refusal: str) -> None:
        self.group = group
        self.refusal = refusal
        super().__init__(
            f"a read without option 'group' pulls as group {group}, which this account may not: "
            f"{refusal}; set option 'group' to one that it may read with, or 'groupPrefix' to the "
            f"beginning of those, or have it allowed SUB on {group}"
        )

    def __reduce__(self) -> tuple[type[UnnamedReadRefused], tuple[str, str]]:
        return type(self), (self.group, self.refusal)


class CheckpointOfOtherTopics(SourceError):
    """A checkpoint that another query made: none of the topics in it is one that this query reads.

    No option makes it right: what the checkpoint says is about other messages.
    """

    def __init__(self, topics: Iterable[str], subscription: str) -> None:
        self.topics = tuple(topics)
        #: What this query reads.
        self.subscription = subscription
        shown = ", ".join(self.topics[:10])
        if len(self.topics) > 10:
            shown += f" and {len(self.topics) - 10} more"
        noun = "topic" if len(self.topics) == 1 else "topics"
        super().__init__(
            f"the checkpoint belongs to a query on {noun} {shown}, and this query reads "
            f"{subscription}; give this query a checkpointLocation of its own"
        )

    def __reduce__(self) -> tuple[type[CheckpointOfOtherTopics], tuple[tuple[str, ...], str]]:
        return type(self), (self.topics, self.subscription)


class DataLost(SourceError):
    """Messages that the query has to read are not there any more."""

    REMEDIES = (
        "either set failOnDataLoss to false, which leaves out what is gone, reads a queue that was "
        "made anew from its beginning, and goes on at the present end of a queue that ends before "
        "the wanted offset and is not seen to be another one (it lost its end, or a checkpoint of "
        "an older version does not tell); or begin anew with a new checkpointLocation and "
        "startingOffsets=earliest, which reads all that is there; and have the broker keep "
        "messages longer than the query may lag (fileReservedTime)"
    )

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        shown = "; ".join(self.problems[:10])
        if len(self.problems) > 10:
            shown += f"; and {len(self.problems) - 10} more queues"
        super().__init__(f"messages are gone: {shown}. What to do: {self.REMEDIES}")

    @classmethod
    def of(cls, gone: OffsetsGone) -> DataLost:
        return cls([str(gone)])

    def __reduce__(self) -> tuple[type[DataLost], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)
