"""A consumer group in a Connect session, as a process of its own: such a session wants one.

    python -m tests.support.sparkconnect NAME_SERVER GROUP TOPIC JOURNAL

Consumes what is there, prints what it did and how many dead letters there are, and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.message import ReceivedMessage
from orbitmq.spark import consume, dead_letters, judged, process, settle
from orbitmq.spark.consuming.progress import RowsRefused
from orbitmq.spark.session import prepare
from tests.support.sparkconsuming import QUICK, Journal


def main(name_server: str, group: str, topic: str, journal: str) -> None:
    prepare(os.environ)
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )

    def judge(message: ReceivedMessage) -> None:
        if message.text() == "7":
            raise DeadLetter("no such customer")

    run = consume(spark, group, name_server=name_server, consume_from="first", batch=QUICK)
    run.on(topic)(Journal(Path(journal)).writing(judge))
    with run:
        is_idle = run.until_idle(60)
        progress = run.progress()
    letters = (
        dead_letters(spark, group, name_server=name_server).select("topic", "reason").collect()
    )
    frame = (
        spark.read.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .load()
    )
    with judged(frame, judge) as rows:
        good = rows.where("outcome = 'ok'").count()
        settled = settle(rows, f"{group}-rows", name_server=name_server)
    try:
        settle(process(frame, judge), f"{group}-rows", name_server=name_server)
        refused = "nothing"
    except RowsRefused as error:
        refused = type(error).__name__
    spark.stop()
    print(is_idle, progress.done, progress.dead, *map(tuple, letters), flush=True)
    print(good, settled.dead, refused, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
