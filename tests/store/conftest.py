"""Fixtures of the store's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orbitmq.store.store import Store
from tests.support.store import SMALL, FailingFiles, HandClock, QuickFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orbitmq.store.files import DiskFiles
    from orbitmq.store.settings import StoreSettings

    OpenStore = Callable[..., Store]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def disk() -> FailingFiles:
    return FailingFiles()


@pytest.fixture
def open_store(tmp_path: Path, clock: HandClock) -> Iterator[OpenStore]:
    """Opens stores without threads and leaves none open."""
    opened: list[Store] = []

    def open_one(
        settings: StoreSettings = SMALL,
        *,
        root: Path | None = None,
        files: DiskFiles | None = None,
        background: bool = False,
    ) -> Store:
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
