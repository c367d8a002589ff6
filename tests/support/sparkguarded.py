"""Everything that Spark does with a guarded cluster, as a process that says all it can say.

    python -m tests.support.sparkguarded NAME_SERVER CERTIFICATE KEY FOLDER < SECRETS

`SECRETS` is JSON: the keys of an account that may do it, a secret that is wrong, and the keys of an
account that may only read, and only without naming a group. Prints what it found as JSON, after
everything that Spark and we log.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import ClientTls, Credentials
from orbitmq.spark import consume, dead_letters
from orbitmq.spark.session import local_session
from tests.support.sparkconsuming import QUICK, Journal

DEADLINE = 60


def main(name_server: str, certificate: str, key: str, place: str) -> None:
    secrets = json.load(sys.stdin)
    folder = Path(place)
    logging.basicConfig(level=logging.DEBUG)
    # The bridge to the JVM logs every argument at this level, so also those of `option`.
    logging.getLogger("py4j").setLevel(logging.INFO)
    spark = local_session(
        "guarded",
        cores=2,
        attempts=1,
        settings={
            "spark.driver.extraJavaOptions": (
                f"-XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile=file:{logging_of(folder)}"
            )
        },
    )
    open_to_all = {"nameServer": name_server}
    over_tls = open_to_all | {
        "tls.authority": certificate,
        "tls.certificate": certificate,
        "tls.key": key,
    }
    allowed = over_tls | {"accessKey": secrets["access"], "secretKey": secrets["secret"]}
    refused = allowed | {"secretKey": secrets["wrong"]}
    archive = {"group": "archive"}
    found: dict[str, Any] = {}

    spark.range(60).selectExpr("CAST(id AS STRING) AS body").write.format("rocketmq").options(
        **allowed, topic="orders", createTopic="true"
    ).mode("append").save()
    table = (
        spark.read.format("rocketmq").options(**allowed, subscribe="orders", group="archive").load()
    )
    found["rows"] = table.count()
    table.explain("extended")
    stream = (
        spark.readStream.format("rocketmq")
        .options(**allowed, subscribe="orders", group="archive", startingOffsets="earliest")
        .load()
    )
    stream.explain("extended")
    query = (
        stream.writeStream.format("rocketmq")
        .options(**allowed, topic="copies", createTopic="true")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(DEADLINE)
    query.explain(extended=True)
    found["progress"] = [progress.json for progress in query.recentProgress]
    found["without a group"] = attempt(
        spark, over_tls | dict(zip(("accessKey", "secretKey"), secrets["unnamed"], strict=True))
    )
    copies = (
        spark.read.format("rocketmq").options(**allowed, subscribe="copies", group="archive").load()
    )
    found["copies"] = copies.count()

    tls = ClientTls(authority=Path(certificate), certificate=Path(certificate), key=Path(key))
    credentials = Credentials(access_key=secrets["access"], secret_key=secrets["secret"])
    guarded: dict[str, Any] = {"name_server": name_server, "credentials": credentials, "tls": tls}

    def handle(message: ReceivedMessage) -> None:
        if message.text() == "7":
            raise ValueError("no account")

    run = consume(spark, "billing", consume_from="first", max_retries=0, batch=QUICK, **guarded)
    run.on("orders")(Journal(folder / "journal").writing(handle))
    with run:
        found["idle"] = run.until_idle(DEADLINE)
        progress = run.progress()
    found["done"], found["dead"] = progress.done, progress.dead
    print(progress, run, credentials, tls)
    letters = dead_letters(spark, "billing", **guarded)
    letters.explain("extended")
    found["letters"] = [bytes(row.body).decode() for row in letters.collect()]

    found["refusals"] = {
        name: refusal(lambda options=options: attempt(spark, options))
        for name, options in {
            "wrong secret": refused | archive,
            "no account": over_tls | archive,
            "no TLS": open_to_all | archive,
            "no group": allowed,
        }.items()
    }
    spark.stop()
    print(json.dumps(found), flush=True)


def logging_of(folder: Path) -> Path:
    """Settings by which Spark logs all that it has to say; its own for Python leave most out."""
    file = folder / "log4j2.properties"
    file.write_text(
        "rootLogger.level = info\n"
        # Spark sets the level of the root back, not that of others.
        "logger.spark.name = org.apache.spark\n"
        "logger.spark.level = info\n"
        "rootLogger.appenderRef.stderr.ref = console\n"
        "appender.console.type = Console\n"
        "appender.console.name = console\n"
        "appender.console.target = SYSTEM_ERR\n"
        "appender.console.layout.type = PatternLayout\n"
        "appender.console.layout.pattern = %p %c{1}: %m%n%ex\n"
    )
    return file


def attempt(spark: Any, options: dict[str, str]) -> int:
    frame = spark.read.format("rocketmq").options(**options, subscribe="orders").load()
    return int(frame.count())


def refusal(act: Any) -> str:
    """What is said about something that must not work."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  # Spark has many
        return str(error)
    return "it worked"


if __name__ == "__main__":
    main(*sys.argv[1:])
