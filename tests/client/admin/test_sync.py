"""The sync face: the same methods, without an event loop."""

from __future__ import annotations

import inspect

import pytest

from orbitmq.client.admin import admin as sync
from orbitmq.client.admin.admin import Admin, AsyncAdmin
from orbitmq.client.admin.config import AsyncConfig
from orbitmq.client.admin.deadletters import AsyncDeadLetters
from orbitmq.client.admin.groups import AsyncGroups
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.resets import AsyncProgress, ResetTo
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.errors import TopicNotFound
from orbitmq.client.routes import Queue
from orbitmq.errors import NotRunning

#: Methods that other parts use, and that people have better ones for.
INTERNAL = {"look", "running_info_of"}


@pytest.mark.parametrize(
    ("face", "waiting"),
    [
        (AsyncTopics, sync.Topics),
        (AsyncGroups, sync.Groups),
        (AsyncProgress, sync.Progress),
        (AsyncMessages, sync.Messages),
        (AsyncDeadLetters, sync.DeadLetters),
        (AsyncConsumers, sync.Consumers),
        (AsyncConfig, sync.Config),
        (AsyncAdmin, Admin),
    ],
)
def test_both_faces_have_the_same_methods(face, waiting):
    def methods(kind):
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in INTERNAL
        }

    assert methods(face) == methods(waiting)
    for name in methods(waiting):
        assert getattr(waiting, name).__doc__ == getattr(face, name).__doc__ or waiting is Admin


def test_administration_without_an_event_loop(orbit_shared_cluster, orbit_shared_topic):
    with Admin(name_server=orbit_shared_cluster.name_server) as admin:
        assert orbit_shared_topic in [topic.name for topic in admin.topics.list()]
        admin.groups.create("sync")
        report = admin.progress.reset("sync", orbit_shared_topic, ResetTo.end())
        assert report.is_effective
        assert admin.cluster().is_healthy
        assert admin.runtime("broker-a").is_orbitmq
        assert list(admin.messages.browse(orbit_shared_topic)) == []
        assert list(admin.dead_letters.list("sync")) == []
        assert admin.config.broker("broker-a")["brokerName"] == "broker-a"
        assert len(admin.consumers.producers("nobody")) == 0
        with pytest.raises(TopicNotFound):
            admin.topics.get("nothing")
        assert admin.requests > 10
    with pytest.raises(NotRunning):
        admin.cluster()
    admin.stop()


def test_an_iteration_that_is_left_ends_in_order(orbit_cluster):
    orbit_cluster.create_topic("orders")
    with Admin(name_server=orbit_cluster.name_server) as admin:
        orbit_cluster.send("orders", *"01234", queue=Queue("orders", "broker-a", 0))
        first = admin.messages.browse("orders")
        assert next(first).body == b"0"
        first.close()
        second = admin.messages.browse("orders")
        assert next(second).body == b"0"
        with pytest.raises(TopicNotFound):
            next(admin.messages.browse("nothing"))
    # The admin is gone; leaving the iteration does no harm.
    second.close()
