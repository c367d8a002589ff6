"""What a pipeline works with: a session, a cluster, and where its checkpoints are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbitmq.client.durations import Duration, positive_seconds
from orbitmq.client.errors import SettingError
from orbitmq.spark.consuming.reaching import options_of, reach
from orbitmq.spark.streamreturns import ReturnCounts, batch_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from orbitmq.client.rangeaccess import ClientTls, Credentials, RangeAccess
    from orbitmq.spark.consolelink import ConsoleLink
    from orbitmq.spark.consuming.settling import Settled


class Run:
    """One run of a pipeline.

    run = Run(spark, name_server="localhost:9876", checkpoint="checkpoints")
    query = archive(run, topic="orders", path=Path("lake"))

    `once` is for streams that take what is there and end; `trigger` the seconds from the start of
    one batch to the next, as soon as possible by default. While `drain_file` exists, streams that
    were made by `stream` begin no batch. `console` is told of consumer groups that the run starts.

    A function for `foreachBatch` may use the run. In a Connect session it works with a copy, in a
    process of the server: what goes back is in `Settled`, and not among the counts of this one.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        name: str = "pipeline",
        name_server: str | Iterable[str] | None = None,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
        checkpoint: Path | str | None = None,
        once: bool = False,
        trigger: Duration | None = None,
        drain_file: Path | None = None,
        console: ConsoleLink | None = None,
    ) -> None:
        if once and trigger is not None:
            raise SettingError("once and trigger cannot be given together")
        self._spark: SparkSession | None = spark
        self.name = name
        self.once = once
        self.trigger = None if trigger is None else positive_seconds(trigger, "trigger")
        self.access: RangeAccess = reach(name_server, credentials, tls)
        self._checkpoint = None if checkpoint is None else str(checkpoint).rstrip("/")
        self._drain_file = drain_file
        self.console = console
        #: How many rows went back so far, by stream.
        self.returned = ReturnCounts()

    def __getstate__(self) -> dict[str, Any]:
        """For the process of another: the session, the console and the counts stay here."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_spark", "console", "returned")
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._spark = None
        self.console = None
        self.returned = ReturnCounts()

    @property
    def spark(self) -> SparkSession:
        """The session of the run; of a copy, the one that the batch belongs to.

        A copy asks each time: when it is made the session is still that of the query, and batches
        have one of their own, with which frames of the other cannot be joined. Tasks have none.
        """
        if self._spark is not None:
            return self._spark
        from pyspark.sql import SparkSession  # noqa: PLC0415  # where Spark is

        return SparkSession.active()

    @property
    def options(self) -> dict[str, str]:
        """How the `rocketmq` source reaches the cluster, to be given to any reader or writer."""
        return options_of(self.access)

    @property
    def name_server(self) -> str:
        return ";".join(self.access.name_servers)

    # ---- reading

    def read(self, topic: str, *, schema: str | None = None, **options: str) -> DataFrame:
        """A topic as it is now."""
        reader = self.spark.read.format("rocketmq").options(**self.options)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**{"subscribe": topic, **options}).load()

    def stream(
        self, topic: str, *, group: str | None = None, schema: str | None = None, **options: str
    ) -> DataFrame:
        """A topic as a stream; with a group, brokers are told of its progress."""
        reader = self.spark.readStream.format("rocketmq").options(**self.options)
        if schema is not None:
            reader = reader.schema(schema)
        if group is not None:
            reader = reader.option("group", group)
        if self._drain_file is not None:
            reader = reader.option("drainFile", str(self._drain_file))
        return reader.options(**{"subscribe": topic, **options}).load()

    # ---- running

    def checkpoint(self, name: str | None = None) -> str:
        """Where the stream of this name keeps its progress. Raises `SettingError`."""
        if self._checkpoint is None:
            raise SettingError(
                "this run has no checkpoint; make it with Run(spark, checkpoint='folder', ...)"
            )
        return self._checkpoint if name is None else f"{self._checkpoint}/{name}"

    def start(
        self, writer: DataStreamWriter, name: str | None = None, *, once: bool | None = None
    ) -> StreamingQuery:
        """Start a stream under its name, with its checkpoint and with the trigger of the run.

        Streams of one run need different names; without one it has the name of the run. `once`
        is for streams that have an end by their nature.
        """
        writer = writer.queryName(name or self.name)
        writer = writer.option("checkpointLocation", self.checkpoint(name or self.name))
        if self.once if once is None else once:
            writer = writer.trigger(availableNow=True)
        elif self.trigger is not None:
            writer = writer.trigger(processingTime=f"{round(self.trigger * 1000)} milliseconds")
        return writer.start()

    # ---- rows that fail

    def settle(self, frame: DataFrame, group: str, *, max_retries: int | None = None) -> Settled:
        """As `orbitmq.spark.settle`; what goes back is counted, and shown with the progress.

        It counts for the stream whose batch the calling thread works on. In a thread of your own,
        that is known when its function is wrapped in `pyspark.inheritable_thread_target`.
        """
        from orbitmq.spark.consuming.settling import settle  # noqa: PLC0415  # needs Spark

        access = self.access
        settled = settle(
            frame,
            group,
            name_server=access.name_servers,
            credentials=access.credentials,
            tls=access.tls,
            max_retries=max_retries,
        )
        self.returned.add(batch_of(frame), settled)
        return settled
