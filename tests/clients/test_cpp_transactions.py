"""librocketmq's transactional producer against our broker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbitmq.broker.settings import TransactionSettings
from orbitmq.testing import EmbeddedCluster


@pytest.fixture
def cluster(transactional_package):
    """A cluster that asks early about half messages that were left open."""
    del transactional_package  # where it cannot be had, no cluster is needed

    def impatient(settings):
        # As long as the client has sent no heartbeat nobody can be asked, which counts as asked.
        asking = TransactionSettings(check_interval=0.2, timeout=0.5, check_max=10_000)
        return replace(settings, transactions=asking)

    with EmbeddedCluster(adjust=impatient) as cluster:
        cluster.create_topic("Sagas", queues=2)
        yield cluster


def stored(cluster: EmbeddedCluster) -> list[str]:
    return sorted(message.body.decode() for message in cluster.messages("Sagas"))


def test_what_is_committed_can_be_read_and_what_is_rolled_back_cannot(
    start_client, transactional_package, cluster
):
    client = start_client(transactional_package)

    results = client.ask(
        "transact",
        group="sagas",
        name_server=cluster.name_server,
        topic="Sagas",
        bodies={"kept": "COMMIT", "dropped": "ROLLBACK", "kept too": "COMMIT"},
    )

    assert [status for status, _, _ in results] == [0, 0, 0]
    client.until(lambda: len(stored(cluster)) == 2, "both committed messages")
    assert stored(cluster) == ["kept", "kept too"]


def test_a_message_that_was_left_open_is_asked_about_until_it_is_decided(
    start_client, transactional_package, cluster
):
    client = start_client(transactional_package)
    open_one = {
        "group": "sagas",
        "name_server": cluster.name_server,
        "topic": "Sagas",
        "bodies": {"undecided": "UNKNOWN"},
        "checked": "COMMIT",
    }

    client.ask("transact", **open_one)
    # The broker can ask only after a heartbeat, which a producer may send 30 s late; a consumer
    # sends one when it starts, for all that share its instance.
    reader = {"group": "readers", "topic": "Sagas", "instance": "DEFAULT"}
    client.ask("consume", name_server=cluster.name_server, **reader)
    client.until_bodies(["undecided"])

    assert client.checked[0] == "undecided"
    assert stored(cluster) == ["undecided"]
