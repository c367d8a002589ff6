"""A streaming job whose rows may fail, as a process of its own, until it is ended.

    python -m tests.support.sparksettling NAME_SERVER TOPIC GROUP FOLDER MASTER

As the guide says: judged, the good ones written by batch, the failed ones given back. Every tenth
message fails at its first attempt, whenever it is judged first. Prints a line for every batch when
its good rows are written and its failed ones not yet given back, and stays there for a moment.
A query that fails is started again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from orbitmq.client.message import ReceivedMessage
from orbitmq.spark import judged, settle, with_retries
from tests.support.sparkpipeline import session_on

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Every so many messages one fails; once, as something that was away for a moment.
EVERY = 10
#: Between writing and giving back.
PAUSE = 0.7


def failing_once(folder: str) -> Callable[[ReceivedMessage], None]:
    """A handler whose second word about a message is another one, whoever asks and why."""

    def handle(message: ReceivedMessage) -> None:
        number = int(message.text())
        if number % EVERY:
            return
        try:
            os.close(os.open(f"{folder}/seen-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        raise ValueError("away for a moment")

    return handle


def main(name_server: str, topic: str, group: str, folder: str, master: str) -> None:
    spark = session_on(master)
    handler = failing_once(folder)
    topics = with_retries(topic, group=group, name_server=name_server)

    def each(batch: DataFrame, number: int) -> None:
        with judged(batch, handler, group=group) as rows:
            good = rows.where("outcome = 'ok'").select("body")
            good.write.mode("overwrite").parquet(f"{folder}/billed/batch={number}")
            print(f"batch {number}", flush=True)
            threading.Event().wait(PAUSE)
            settle(rows, group, name_server=name_server)

    while True:
        query = (
            spark.readStream.format("rocketmq")
            .option("nameServer", name_server)
            .option("subscribe", topics)
            .option("group", group)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "50")
            .load()
            .writeStream.foreachBatch(each)
            .option("checkpointLocation", f"{folder}/checkpoint")
            .start()
        )
        while query.isActive:
            threading.Event().wait(0.1)
        print(query.exception(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
