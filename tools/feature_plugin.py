"""A pytest plugin that notes which rows of docs/features.md a run has proven.

Used as `pytest -p tools.feature_plugin --features-to=build`. A test names its rows with
`@pytest.mark.feature("A1")`; the notes go to `features.json`. Tests against Apache's own programs
and tests of container images have files of their own: they are seldom run together with the
others, and none should wipe out what is known of another kind.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TypedDict

import pytest

RESULTS = "features.json"
INTEROP_RESULTS = "features-interop.json"
CONTAINER_RESULTS = "features-containers.json"
#: Where the notes go, by the folder of the tests; those of all others go to `RESULTS`.
_RESULTS_OF = {"interop": INTEROP_RESULTS, "containers": CONTAINER_RESULTS}

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
            item.user_properties.append((_PROPERTY, {"ids": ids, "results": _results_of(item)}))
    if config.getoption("features_only"):
        others = [item for item in items if not _ids(item)]
        items[:] = [item for item in items if _ids(item)]
        config.hook.pytest_deselected(items=others)


def _ids(item: pytest.Item) -> list[str]:
    return sorted(
        {str(name) for mark in item.iter_markers("feature") for name in mark.args or ("",)}
    )


def _results_of(item: pytest.Item) -> str:
    if item.get_closest_marker("interop") is not None:
        return INTEROP_RESULTS
    return _results_in(item.nodeid)


def _results_in(nodeid: str) -> str:
    folders = PurePosixPath(nodeid.partition("::")[0]).parts
    return next((_RESULTS_OF[each] for each in folders if each in _RESULTS_OF), RESULTS)


class Recorder:
    """Gathers the outcomes of a session and writes them when it ends."""

    def __init__(self, folder: Path, *, even_if_empty: bool) -> None:
        self._folder = folder
        self._even_if_empty = even_if_empty  # then the file tells that the session came to its end
        self._notes: dict[str, Notes] = {
            name: {"tests": {}, "broken": []} for name in (RESULTS, *_RESULTS_OF.values())
        }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._notes[_results_in(report.nodeid)]["broken"].append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, dict):
                tests = self._notes[value["results"]]["tests"]
                test = tests.setdefault(report.nodeid, {"ids": value["ids"], "outcome": "skipped"})
                outcome = _outcome(report)
                if _RANK[outcome] > _RANK[test["outcome"]]:
                    test["outcome"] = outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # one of several processes: the one that started them has all the reports
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, notes in self._notes.items():
            is_wanted = self._even_if_empty and name == RESULTS
            if notes["tests"] or notes["broken"] or is_wanted:
                text = json.dumps(notes, indent=1, sort_keys=True)
                (self._folder / name).write_text(text + "\n", encoding="utf-8")


def _outcome(report: pytest.TestReport) -> str:
    if report.failed:
        return "failed"
    # An expected failure proves nothing, and neither does the end of set-up alone.
    if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
        return "passed"
    return "skipped"
