"""A consumer group on Spark as a process of its own, until it is ended.

    python -m tests.support.sparkconsumer NAME_SERVER GROUP TOPIC JOURNAL

Prints a line for every batch. Handlers write down what they were called with.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from orbitmq.client.message import ReceivedMessage
from orbitmq.spark import BatchSettings, consume
from orbitmq.spark.consuming.progress import BatchReport
from orbitmq.spark.session import local_session
from tests.support.sparkconsuming import SOON, Journal


def main(name_server: str, group: str, topic: str, journal: str) -> None:
    spark = local_session(
        "killed",
        cores=2,
        settings={
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.log.level": "ERROR",
        },
    )

    def work(message: ReceivedMessage) -> None:
        threading.Event().wait(0.005)

    def tell(report: BatchReport) -> None:
        print(f"batch {report.number}", flush=True)

    run = consume(
        spark,
        group,
        name_server=name_server,
        consume_from="first",
        workers=4,
        batch=BatchSettings(messages=100, idle=0.05),
        rebalance=SOON,
        on_batch=tell,
    )
    run.on(topic)(Journal(Path(journal)).writing(work))
    run.run()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
