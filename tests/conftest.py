"""Settings of all tests, and how they are shared between the processes that run them."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections.abc import Generator
from pathlib import PurePosixPath

import pytest
from hypothesis import settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# How long one example takes says more about the neighbours on the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

#: Folders whose tests share something dear: a Spark session, an environment of other clients, a
#: browser.
TOGETHER = {"spark": "spark", "examples": "spark", "clients": "clients", "browser": "browser"}
#: What a test gets beyond its own limit. The limit is an exception in the test, which a library can
#: swallow and clean-up can outlast; this ends the process and shows where every thread stood.
GRACE = 60.0
#: For Java: Spark is started often here and lives shortly. The second compiler and threads of a
#: collector take more of few cores than they give back.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
#: The error stream that no test captures.
OUTSIDE = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTSIDE] = os.dup(2)  # nothing is captured yet
    os.environ.setdefault("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A run in the background ignores Ctrl-C, and so would every process that it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(FailuresAtOnce(config.stash[OUTSIDE]))


def pytest_unconfigure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return  # it waits for the others, and is ended by the process that started it
    faulthandler.dump_traceback_later(GRACE, exit=True, file=config.stash[OUTSIDE])


class FailuresAtOnce:
    """Tells of a failure when it happens: a run that is cut short has then still said why."""

    def __init__(self, outside: int) -> None:
        self._outside = outside

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
            text = f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n"
            os.write(self._outside, text.encode("utf-8", "backslashreplace"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process whose test hangs for good: the others go on, and the stacks are in the log."""
    outside = item.config.stash[OUTSIDE]
    faulthandler.dump_traceback_later(_limit(item) + GRACE, exit=True, file=outside)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The dear folders first: they take longest, and nobody should wait for them at the end."""
    order = [*dict.fromkeys(TOGETHER.values()), ""]
    items.sort(key=lambda item: order.index(TOGETHER.get(_folder(item.nodeid), "")))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later collection of garbage.

    It is half a million objects that live to the end. To look at them all takes a third of a second
    of work, which would come in the middle of some test, whatever that one is timing.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByFile(config, log)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it says nothing of its types
    """Gives each file to one process, and some folders as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(_folder(nodeid)) or nodeid.partition("::")[0]


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    if mark is not None and mark.args:
        return float(mark.args[0])
    return float(item.config.getini("timeout") or 0)


def _folder(nodeid: str) -> str:
    """Which folder of `tests` a test is in."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else ""
