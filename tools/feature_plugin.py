"""A pytest plugin that notes which rows of docs/features.md a run has proven.

Used as `pytest -p tools.feature_plugin --features-to=build`. A test names its rows with
`@pytest.mark.feature("A1")`; the notes go to `features.json`, those on tests against Apache's own
programs to `features-interop.json`, because the two kinds are seldom run together and neither
should wipe out what is known of the other.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TypedDict

import pytest

RESULTS = "features.json"
INTEROP_RESULTS = "features-interop.json"

#: What a test's reports say about its rows. A test whose set-up or tear-down failed has failed.
_RANK = {"skipped": 0, "passed": 1, "failed": 2}
#: Travels with the reports, so that a run over several processes needs nothing else.
_PROPERTY = "orbitmq-features"


class MarkedTest(TypedDict):
    """One test that names rows, and how it ended."""

    ids: list[str]
    outcome: str


class Notes(TypedDict):
    """What a run leaves behind."""

    tests: dict[str, MarkedTest]
    #: Files that could not even be imported: whatever they would have proven is unknown.
    broken: list[str]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("features")
    group.addoption("--features-to", metavar="DIR", help="write what the marked tests proved here")
    group.addoption("--features-only", action="store_true", help="run no other tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(id): the row of docs/features.md that this proves")
    config.addinivalue_line("markers", "interop: runs against Apache RocketMQ itself")
    if config.getoption("features_to"):
        recorder = Recorder(
            Path(config.getoption("features_to")), even_if_empty=config.getoption("features_only")
        )
        config.pluginmanager.register(recorder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if ids := _ids(item):
            item.user_properties.append((_PROPERTY, {"ids": ids, "interop": _is_interop(item)}))
    if config.getoption("features_only"):
        others = [item for item in items if not _ids(item)]
        items[:] = [item for item in items if _ids(item)]
        config.hook.pytest_deselected(items=others)


def _ids(item: pytest.Item) -> list[str]:
    return sorted(
        {str(name) for mark in item.iter_markers("feature") for name in mark.args or ("",)}
    )


def _is_interop(item: pytest.Item) -> bool:
    return item.get_closest_marker("interop") is not None or _is_in_interop(item.nodeid)


def _is_in_interop(nodeid: str) -> bool:
    return "interop" in PurePosixPath(nodeid.partition("::")[0]).parts


class Recorder:
    """Gathers the outcomes of a session and writes them when it ends."""

    def __init__(self, folder: Path, *, even_if_empty: bool) -> None:
        self._folder = folder
        self._even_if_empty = even_if_empty  # then the file tells that the session came to its end
        self._notes: dict[bool, Notes] = {
            False: {"tests": {}, "broken": []},
            True: {"tests": {}, "broken": []},
        }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._notes[_is_in_interop(report.nodeid)]["broken"].append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, dict):
                tests = self._notes[value["interop"]]["tests"]
                test = tests.setdefault(report.nodeid, {"ids": value["ids"], "outcome": "skipped"})
                outcome = _outcome(report)
                if _RANK[outcome] > _RANK[test["outcome"]]:
                    test["outcome"] = outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # one of several processes: the one that started them has all the reports
        self._folder.mkdir(parents=True, exist_ok=True)
        for is_interop, name in ((False, RESULTS), (True, INTEROP_RESULTS)):
            notes = self._notes[is_interop]
            if notes["tests"] or notes["broken"] or (self._even_if_empty and not is_interop):
                text = json.dumps(notes, indent=1, sort_keys=True)
                (self._folder / name).write_text(text + "\n", encoding="utf-8")


def _outcome(report: pytest.TestReport) -> str:
    if report.failed:
        return "failed"
    # An expected failure proves nothing, and neither does the end of set-up alone.
    if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
        return "passed"
    return "skipped"
