"""Settings of all tests, and how they are shared between the processes that run them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# How long one example takes says more about the neighbours on the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).parent
#: Folders whose tests share something dear: a Spark session, an environment of other clients, a
#: browser. The longest come first, so that nobody waits for them at the end.
TOGETHER = {"spark": "spark", "examples": "spark", "clients": "clients", "browser": "browser"}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each file to one process (`-n 2 --dist loadgroup`), and some folders as a whole."""
    order = [*dict.fromkeys(TOGETHER.values()), ""]

    def place(item: pytest.Item) -> int:
        return order.index(TOGETHER.get(_folder(item), ""))

    items.sort(key=place)
    for item in items:
        name = TOGETHER.get(_folder(item)) or str(item.path.relative_to(ROOT))
        item.add_marker(pytest.mark.xdist_group(name))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
