"""What the tests of `orbitmq doctor` share."""

from __future__ import annotations

from typing import Any

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.testing import EmbeddedCluster
from tests.support.orbitmqcli import Cli

#: Only the cluster, and no time spent on waiting.
QUICK = ("--no-spark", "--watch", "0")


def findings(cli: Cli, *words: str) -> dict[str, list[Any]]:
    """What is wrong, by check."""
    record = cli.record("doctor", *(words or QUICK), code=1)
    assert not record["is_well"]
    found: dict[str, list[Any]] = {}
    for each in record["findings"]:
        assert each["problem"]
        assert each["remedy"]
        found.setdefault(each["check"], []).append(each)
    bad = {each["check"] for each in record["checks"] if not each["is_well"]}
    assert bad == set(found)
    return found


def consume(cluster: EmbeddedCluster, started: list[Consumer], group: str, **options: Any) -> None:
    tags = options.pop("tags", "*")
    topic = options.pop("topic", "orders")
    consumer = Consumer(group, name_server=cluster.name_server, **options)
    consumer.on(topic, tags=tags)(lambda _message: None)
    consumer.start()
    started.append(consumer)
