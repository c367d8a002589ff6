"""Bills paid orders: good ones go to Parquet, failed ones are tried again and at last given up.

    orbitmq pipeline run examples/pipelines/billing.py --option path=billed

The broker needs a topic `orders` whose bodies are JSON such as
{"order": 7, "cents": 1250, "account": "known"}.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from orbitmq import DeadLetter, ReceivedMessage, Retry
from orbitmq.spark import judged, with_retries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from orbitmq.spark.pipelines import Run

SCHEMA = "order BIGINT, cents BIGINT, account STRING"


def bill(message: ReceivedMessage) -> None:
    """Runs on Spark's executors, and would run the same in a `Consumer`."""
    account = message.json()["account"]
    if account == "unknown":
        raise DeadLetter("the bank knows no such account")
    if account == "busy" and message.attempt == 1:
        raise Retry("the bank is busy", delay=1.0)


def pipeline(
    run: Run,
    *,
    topic: Annotated[str, "Where orders come from."] = "orders",
    group: Annotated[str, "The consumer group."] = "billing",
    path: Annotated[Path, "Where billed orders are written."] = Path("billed"),
) -> DataStreamWriter:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    def each(batch: DataFrame, number: int) -> None:
        with judged(batch, bill, group=group) as rows:
            order = F.from_json(F.col("body").cast("string"), SCHEMA).alias("order")
            good = rows.where("outcome = 'ok'").select(order, "msgId").select("order.*", "msgId")
            # A batch that Spark repeats has its number again, and replaces what it wrote. So the
            # folder belongs to the checkpoint: with a new one, begin a new folder.
            good.write.mode("overwrite").parquet(f"{path}/batch={number}")
            run.settle(rows, group)

    topics = with_retries(topic, group=group, name_server=run.name_server)
    orders = run.stream(topics, group=group, startingOffsets="earliest")
    return orders.writeStream.foreachBatch(each)
