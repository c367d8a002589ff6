"""Fixtures of the store's tests."""

from __future__ import annotations

import pytest

from orbitmq.store.store import Store
from tests.support.store import SMALL, FailingFiles, HandClock, QuickFiles


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def disk():
    return FailingFiles()


@pytest.fixture
def open_store(tmp_path, clock):
    """Opens stores without threads and leaves none open."""
    opened: list[Store] = []

    def open_one(settings=SMALL, *, root=None, files=None, background=False):
        store = Store(
            root or tmp_path / "store",
            settings,
            clock=clock,
            files=files or QuickFiles(),
            background=background,
        )
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.abandon()
