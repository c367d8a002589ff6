"""Settings of all tests, and how they are shared between the processes that run them."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
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
#: What a test gets beyond its own limit. The limit is an exception in the test, which a library can
#: swallow and clean-up can outlast; this ends the process and shows where every thread stood.
GRACE = 60.0
#: The error stream that no test captures.
OUTSIDE = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTSIDE] = os.dup(2)  # nothing is captured yet
    config.pluginmanager.register(FailuresAtOnce(config.stash[OUTSIDE]))


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(GRACE, exit=True, file=config.stash[OUTSIDE])


class FailuresAtOnce:
    """Tells of a failure when it happens: a run that is cut short has then still said why."""

    def __init__(self, outside: int) -> None:
        self._outside = outside

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
            text = f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n"
            os.write(self._outside, text.encode())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process whose test hangs for good: the others go on, and the stacks are in the log."""
    outside = item.config.stash[OUTSIDE]
    faulthandler.dump_traceback_later(_limit(item) + GRACE, exit=True, file=outside)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


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


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    if mark is not None and mark.args:
        return float(mark.args[0])
    return float(item.config.getini("timeout") or 0)


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
