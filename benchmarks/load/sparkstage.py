"""What the lines about Spark share: a session, a broker, and topics that were filled."""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.load.clientprocesses import OurCluster
from benchmarks.runner import NotAtHand

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2
QUEUES = 4
_ROOT = Path(__file__).parents[2]


class SparkStage:
    """Started when the first line asks, ended after the last."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._session: SparkSession | None = None
        self._cluster: OurCluster | None = None
        self._filled: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = self._cluster = None
        self._filled.clear()
        self._stack.close()

    @property
    def spark(self) -> SparkSession:
        """A session on two cores. Raises `NotAtHand` where there is no Spark, or no Java."""
        if self._session is None:
            try:
                from orbitmq.spark.session import local_session  # noqa: PLC0415  # an extra

                # Workers import what the ready-made source is made of.
                paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
                os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PySpark's own
                    session = local_session(
                        "benchmarks", cores=CORES, settings={"spark.log.level": "ERROR"}
                    )
            except Exception as error:
                # No PySpark, no Java, a JVM that does not start: all the same to a table.
                raise NotAtHand(f"no Spark session: {error}") from error
            from benchmarks.load.sparkready import ReadySource  # noqa: PLC0415

            session.dataSource.register(ReadySource)
            self._session = session
            self._stack.callback(session.stop)
        return self._session

    @property
    def name_server(self) -> str:
        if self._cluster is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            self._cluster = self._stack.enter_context(OurCluster(Path(folder)))
        return self._cluster.name_server

    def ready(self, rows: int, body_size: int, kind: str = "batches") -> DataFrame:
        """The same messages from a source that has nothing to do."""
        options = {"rows": str(rows), "partitions": str(QUEUES), "bodySize": str(body_size)}
        return self.spark.read.format("ready").options(**options).option("as", kind).load()

    def topic(self, rows: int, body_size: int) -> str:
        """A topic with so many messages."""
        name = f"bodies-{body_size}"
        if self._filled.get(name) != rows:
            frame = self.ready(rows, body_size).select("body", "tags", "keys", "properties")
            self.write(frame, name)
            self._filled[name] = rows
        return name

    def read(self, topic: str) -> DataFrame:
        options = {"nameServer": self.name_server, "subscribe": topic}
        return self.spark.read.format("rocketmq").options(**options).load()

    def write(self, frame: DataFrame, topic: str) -> None:
        options = {"nameServer": self.name_server, "topic": topic}
        frame.write.format("rocketmq").options(**options).mode("append").save()
