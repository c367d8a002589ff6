"""What a worker keeps between its tasks."""

from __future__ import annotations

import os

from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.spark.worker import WorkerCache, connections, connections_to


def test_the_least_recently_used_value_is_closed():
    closed: list[str] = []
    cache = WorkerCache(closed.append, size=2)

    for key in ("a", "b", "a", "c"):
        assert cache.get(key, key.upper) == key.upper()

    assert closed == ["B"]
    cache.clear()
    assert sorted(closed) == ["A", "B", "C"]


def test_values_of_the_parent_process_are_neither_used_nor_closed(monkeypatch):
    closed: list[str] = []
    cache = WorkerCache(closed.append, size=2)
    assert cache.get("a", lambda: "parent's") == "parent's"

    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert cache.get("a", lambda: "own") == "own"
    for key in ("b", "c", "d"):
        cache.get(key, key.upper)

    assert closed == ["own", "B"]


def test_equal_accesses_share_connections():
    connections.clear()
    one, same, other = (RangeAccess(name_servers=(name,)) for name in ("a:1", "a:1", "b:1"))

    assert connections_to(one) is connections_to(same)
    assert connections_to(other) is not connections_to(one)
