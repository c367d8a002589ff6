"""A streaming job as a process of its own: topic to topic, exactly once, until it is ended.

    python -m tests.support.sparkcopy NAME_SERVER TOPIC GROUP FOLDER TARGET EXACTLY_ONCE

Prints a line for every batch. A task sends several frames, so that kills fall between them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.sparkpipeline import follow, messages, session


def main(name_server: str, topic: str, group: str, folder: str, target: str, exact: str) -> None:
    spark = session()
    writer = messages(spark, name_server, topic, group, most=500).select("body").writeStream
    writer = (
        writer.format("rocketmq")
        .option("nameServer", name_server)
        .option("topic", target)
        .option("createTopic", "true")
        .option("exactlyOnce", exact)
        .option("sendBatchBytes", "512")
        .option("checkpointLocation", str(Path(folder) / "checkpoint"))
    )
    follow(spark, writer.start(), writer.start)


if __name__ == "__main__":
    main(*sys.argv[1:])
