"""What the lines about Spark share: a session, brokers, and topics that were filled."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, cast

from benchmarks.load.asking import Drive, Driven, Sends, Target
from benchmarks.load.clientprocesses import OurCluster
from benchmarks.load.kafka import KafkaBroker, KafkaJars
from benchmarks.load.processes import Child, Generator
from benchmarks.runner import NotAtHand, Scale

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from orbitmq.client.ranges.cluster import RangeCluster

CORES = 2
QUEUES = 4
_ROOT = Path(__file__).parents[2]
#: Of a ready-made record batch: what was best for Spark.
_READY_ROWS = 10_000
#: Messages in a request when a topic is filled.
_PER_REQUEST = 32
#: Milliseconds. By default a producer that gets no answer goes on for two minutes.
_KAFKA_PATIENCE = {"kafka.request.timeout.ms": "15000", "kafka.delivery.timeout.ms": "45000"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Filled:
    """A topic with messages in it, and what the first of them look like in Spark."""

    topic: str
    rows: int
    sample: Path


class SparkStage:
    """Started when the first line asks, ended after the last."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, object] = {}
        self._scale = Scale()
        self._topics = 0
        #: What a stream lagged behind when its throughput was measured, in seconds.
        self.lags: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        self.lags.clear()
        self._stack.close()

    def at(self, scale: Scale) -> Self:
        """The same, with what it makes from now on on a scale."""
        self._scale = scale
        return self

    # ---- Spark

    @property
    def spark(self) -> SparkSession:
        """A session on two cores. Raises `NotAtHand` where there is no Spark, or no Java."""
        return self._once("spark", self._session)

    def ready(self, filled: Filled, rows: int | None = None, kind: str = "batches") -> DataFrame:
        """Rows like those of a topic from a source that has nothing to do."""
        return (
            self.spark.read.format("ready")
            .options(file=str(filled.sample), rows=rows or filled.rows, partitions=QUEUES)
            .option("as", kind)
            .load()
        )

    def read(self, topic: str, schema: str | None = None, **options: str) -> DataFrame:
        reader = self.spark.read.format("rocketmq").options(**self.source(topic), **options)
        return (reader if schema is None else reader.schema(schema)).load()

    def source(self, topic: str) -> dict[str, str]:
        """The options that say what is read."""
        return {"nameServer": self.cluster.name_server, "subscribe": topic}

    def write(self, frame: DataFrame, topic: str) -> None:
        options = {"nameServer": self.cluster.name_server, "topic": topic, "createTopic": "true"}
        frame.write.format("rocketmq").options(**options).mode("append").save()

    def checkpoint(self) -> str:
        """A new folder."""
        return self._stack.enter_context(tempfile.TemporaryDirectory())

    # ---- our broker

    @property
    def cluster(self) -> OurCluster:
        return self._once("cluster", lambda: OurCluster(Path(self.checkpoint())))

    @property
    def target(self) -> Target:
        return Target(port=self.cluster.broker_port, pid=self.cluster.pid)

    @property
    def planner(self) -> RangeCluster:
        """Somebody who can be asked where queues end."""
        from orbitmq.client.ranges.cluster import RangeCluster  # noqa: PLC0415
        from orbitmq.client.ranges.connections import RangeAccess  # noqa: PLC0415

        access = RangeAccess(name_servers=(self.cluster.name_server,))
        return self._once("planner", lambda: RangeCluster(access, "bench-planner"))

    def topic(self, rows: int, body_size: int) -> Filled:
        """A topic with about so many messages."""
        name = f"bodies-{body_size}-{rows}"
        return self._once(name, lambda: self._filled(name, rows, body_size))

    def new_topic(self) -> str:
        """A name that no topic has yet."""
        self._topics += 1
        return f"topic-{self._topics}"

    def fed(self, topic: str, body_size: int, rate: float) -> AbstractContextManager[Child]:
        """Somebody who sends so many messages a second to a topic."""
        feed = Child(
            *("-m", "benchmarks.load.sparkfeed"),
            *map(str, (self.cluster.broker_port, topic, body_size, rate)),
        )
        feed.line()
        return feed

    # ---- Kafka

    @property
    def kafka(self) -> KafkaBroker:
        """Raises `NotAtHand`."""
        jars = self._kafka_jars
        if isinstance(jars, NotAtHand):
            raise jars
        return self._once("kafka broker", lambda: KafkaBroker(jars))

    def kafka_source(self, topic: str) -> dict[str, str]:
        """The options that say what is read."""
        return {"kafka.bootstrap.servers": self.kafka.address, "subscribe": topic}

    def new_kafka_topic(self, partitions: int = CORES) -> str:
        """A new topic with so many partitions: in real-time mode each one needs a slot."""
        from confluent_kafka import admin as kafka  # noqa: PLC0415  # of few lines

        topic = self.new_topic()
        admin = kafka.AdminClient({"bootstrap.servers": self.kafka.address})
        wanted = kafka.NewTopic(topic, num_partitions=partitions, replication_factor=1)  # type: ignore[attr-defined]  # typed so
        admin.create_topics([wanted])[topic].result()
        return topic

    def write_to_kafka(self, frame: DataFrame, topic: str) -> None:
        """A frame with a column `value`, and perhaps `key` and `headers`."""
        address = self.kafka.address
        options = {"kafka.bootstrap.servers": address, "topic": topic, **_KAFKA_PATIENCE}
        frame.write.format("kafka").options(**options).mode("append").save()

    def kafka_topic(self, filled: Filled) -> tuple[str, str]:
        """The address of a Kafka broker and a topic with the same messages; or `NotAtHand`."""
        return self._once(f"kafka {filled.topic}", lambda: self._kafka_filled(filled))

    # ---- making

    def _session(self) -> SparkSession:
        try:
            from orbitmq.spark.session import local_session  # noqa: PLC0415  # an extra

            # Workers import what the ready-made source is made of.
            paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            settings = {"spark.log.level": "ERROR", **self._with_kafka()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PySpark's own
                session = local_session("benchmarks", cores=CORES, settings=settings)
        except Exception as error:
            # No PySpark, no Java, a JVM that does not start: all the same to a table.
            raise NotAtHand(f"no Spark session: {error}") from error
        from benchmarks.load.sparkready import ReadySource  # noqa: PLC0415

        session.dataSource.register(ReadySource)
        return session

    def _with_kafka(self) -> dict[str, str]:
        """The setting with which a session knows Kafka; nothing where that is not to be had."""
        jars = self._kafka_jars
        if isinstance(jars, NotAtHand):
            return {}  # said by the lines that need it
        return {"spark.driver.extraClassPath": str(jars.source / "*")}

    @property
    def _kafka_jars(self) -> KafkaJars | NotAtHand:
        return self._once("kafka jars", self._obtained_jars)

    def _obtained_jars(self) -> KafkaJars | NotAtHand:
        try:
            return KafkaJars.obtain()
        except NotAtHand as reason:
            return reason  # which is not found out anew for every line

    def _filled(self, name: str, rows: int, body_size: int) -> Filled:
        sends = Sends(topic=name, body_size=body_size, queues=QUEUES, per_request=_PER_REQUEST)
        with Generator() as generator:
            drive = Drive(
                target=self.target,
                requests=sends,
                connections=2,
                in_flight=4,
                count=rows // _PER_REQUEST,
            )
            outcome = generator.ask(drive)
        assert isinstance(outcome, Driven)
        if outcome.refused:
            raise ChildProcessError(f"the broker refused: {outcome.refusal}")
        folder = Path(self.checkpoint())
        count, sample = self._looked_at(name)
        with (folder / "sample.arrow").open("wb") as file:
            import pyarrow as pa  # noqa: PLC0415  # an extra

            with pa.ipc.new_file(file, sample.schema) as writer:
                writer.write_batch(sample)
        return Filled(name, count, folder / "sample.arrow")

    def _looked_at(self, topic: str) -> tuple[int, pa.RecordBatch]:
        """How many messages a topic has, and the rows of the first as they reach Spark."""
        import pyarrow as pa  # noqa: PLC0415

        from orbitmq.spark.readers import RangePartition  # noqa: PLC0415
        from orbitmq.spark.source import RocketMQSource, full_schema  # noqa: PLC0415

        source = RocketMQSource(self.source(topic))
        reader = source.reader(full_schema())
        parts = [each for each in reader.partitions() if isinstance(each, RangePartition)]
        batches: list[pa.RecordBatch] = []
        rows = 0
        for batch in reader.read(parts[0]):
            batches.append(batch)
            rows += batch.num_rows
            if rows >= _READY_ROWS:
                break
        table = pa.Table.from_batches(batches).slice(0, _READY_ROWS).combine_chunks()
        return sum(len(each) for part in parts for each in part.ranges), table.to_batches()[0]

    def _kafka_filled(self, filled: Filled) -> tuple[str, str]:
        address = self.kafka.address
        spark = self.spark  # expressions need a session that is there
        from pyspark.sql import functions as sql  # noqa: PLC0415

        headers = sql.expr(
            "transform(map_entries(properties), "
            "each -> struct(each.key as key, cast(each.value as binary) as value))"
        )
        frame = self.ready(filled).select(
            sql.col("keys").alias("key"), sql.col("body").alias("value"), headers.alias("headers")
        )
        topic = filled.topic
        self.write_to_kafka(frame, topic)
        wanted = filled.rows // QUEUES * QUEUES
        found = spark.read.format("kafka").options(**self.kafka_source(topic)).load().count()
        if found != wanted:
            # A task that was repeated has written twice: not the same messages any more.
            raise ChildProcessError(f"Kafka's topic has {found} messages instead of {wanted}")
        return address, topic

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What is made when it is first asked for, and left with the stage if it is entered."""
        if name not in self._made:
            made = make()
            if isinstance(made, AbstractContextManager):
                made = self._stack.enter_context(made)
            self._made[name] = made
        return cast("T", self._made[name])
