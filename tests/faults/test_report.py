"""The table of a run says what was found, and its exit code whether that is good."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools.chaos.__main__ import main
from tools.chaos.catalogue import SCENARIOS
from tools.chaos.checker import (
    HANDLED_OUT_OF_ORDER,
    OVERLAPS,
    SENT_OUT_OF_ORDER,
    SKIPPED,
    STEPPED_BACK,
    Analysis,
)
from tools.chaos.figures import at_most, judged, none_of, tried
from tools.chaos.history import Assigned, Event, Fault, Invoked, Read, Value, now
from tools.chaos.promises import PROMISES
from tools.chaos.report import Outcome, Run, by_rows, put_into_docs, write
from tools.chaos.scenarios.later import punctuality
from tools.chaos.scenarios.rebalancing import are_shared
from tools.chaos.suites import SUITES, Suite, have_all_passed, run_suite

ROOT = Path(__file__).parents[2]


def _run(*outcomes: Outcome, began: str = "20260102-030405", is_whole: bool = True) -> Run:
    return Run(began, "abc123", "2 cores", 1, 40.0, 3.0, is_whole, list(outcomes))


def _good() -> Outcome:
    return Outcome("kill", "kills", "R1", figures=[at_most("R1", "start", 1.5, 2, "s")])


def _bad() -> Outcome:
    return Outcome("kill", "kills", "R1", figures=[none_of("R1", "lost", ["p/1/k is gone"])])


def _row(name: str, *outcomes: Outcome) -> tuple[str, ...]:
    (found,) = (row for row in by_rows(_run(*outcomes)) if row[0] == name)
    return found


KINDS = {SENT_OUT_OF_ORDER, HANDLED_OUT_OF_ORDER, SKIPPED, STEPPED_BACK, OVERLAPS}


@pytest.mark.parametrize("kind", sorted({*Analysis().anomalies, *KINDS}))
def test_every_kind_of_anomaly_breaks_a_rule(kind):
    analysis = Analysis(acked=1000)
    analysis.looked_for |= KINDS
    analysis.anomalies[kind].append("planted")

    broken = [figure for figure in judged("R5", analysis) if not figure.is_kept]

    assert [figure.what for figure in broken] == [kind]


def test_a_run_is_good_when_every_rule_was_kept():
    assert _run(_good()).is_kept
    assert not _run(_good(), _bad()).is_kept
    assert not _run(_good(), Outcome("x", "y", failure="ScenarioFailed: no")).is_kept


def test_a_row_sums_up_what_its_scenarios_tried():
    sync = Outcome("sync", "", "R1 R5", figures=[tried("R1", "kills", 30)])
    again = Outcome("again", "", "R1", figures=[tried("R1", "kills", 12)])
    other = Outcome("other", "", "R2", figures=[tried("R2", "kills", 100)])

    row = _row("R1", sync, again, other)

    assert row[3] == "42 kills"
    assert row[-1] == "yes"


@pytest.mark.parametrize(
    "worse",
    [
        Outcome("x", "", "R1 R5", failure="it fell"),
        Outcome("x", "", "R1", figures=[none_of("R1 R5", "lost", ["one"])]),
        Outcome("x", "", "R1", figures=[tried("R1", "kills", 0)]),
    ],
)
def test_a_row_is_kept_when_all_of_its_scenarios_keep_it(worse):
    assert _row("R1", _good())[-1] == "yes"
    assert _row("R1", _good(), worse)[-1] == "**no**"
    assert _row("R9", _good(), worse)[-1] == ""


def test_every_row_is_tried_by_a_scenario_or_says_where_else():
    rows = [each.rows for each in SCENARIOS] + [each.rows for each in SUITES]

    tried_here = {row for each in rows for row in each.split()}

    assert tried_here == {each.row for each in PROMISES if not each.elsewhere}


def test_the_documentation_gets_the_table_and_keeps_the_rest(tmp_path):
    page = tmp_path / "guarantees.md"
    page.write_text((ROOT / "docs" / "guarantees.md").read_text())
    before, _, rest = page.read_text().partition("<!-- figures")
    after = rest.partition("<!-- end of figures -->")[2]

    put_into_docs(_run(_good()), page)

    assert page.read_text().startswith(before)
    assert page.read_text().endswith(after)
    assert "`abc123`" in page.read_text()


def test_the_documentation_is_not_made_from_a_part_of_a_run(tmp_path, monkeypatch, capsys):
    page = tmp_path / "guarantees.md"
    page.write_text((ROOT / "docs" / "guarantees.md").read_text())
    monkeypatch.setattr("tools.chaos.__main__._PAGE", page)
    monkeypatch.setattr("tools.chaos.__main__._FOLDER", tmp_path)
    monkeypatch.setattr("tools.chaos.__main__.ROOT", tmp_path)
    write(_run(_good(), is_whole=False), tmp_path)
    before = page.read_text()

    assert main(["--docs"]) == 2
    assert page.read_text() == before
    assert "no whole run" in capsys.readouterr().out

    write(_run(_good()), tmp_path)

    assert main(["--docs"]) == 0
    assert "`abc123`" in page.read_text()


@pytest.mark.parametrize(
    ("summary", "have_passed"),
    [
        ("12 passed", True),
        ("12 passed, 3 warnings", True),
        ("12 passed, 1 skipped", False),
        ("12 skipped", False),
        ("11 passed, 1 failed", False),
        ("1 xfailed", False),
        ("nothing was run", False),
    ],
)
def test_a_suite_has_passed_when_some_tests_did_and_all_others_too(summary, have_passed):
    assert have_all_passed(summary) is have_passed


@pytest.mark.parametrize(
    ("body", "is_kept"), [("pass", True), ("pytest.skip('not here')", False), (None, False)]
)
def test_a_suite_counts_what_it_tried_only_when_it_passed(body, is_kept, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.chaos.suites.ROOT", tmp_path)
    if body is not None:
        (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    {body}\n")
    suite = Suite("it", "R4", "a test", ("test_it.py",), 50, "rounds", at_once=1)

    outcome = Outcome("it", "", "R4", figures=run_suite(suite, 1.0, 1, tmp_path / "log"))

    assert outcome.is_kept is is_kept
    assert _row("R4", outcome)[-1] == ("yes" if is_kept else "**no**")
    assert sum(figure.amount for figure in outcome.figures) == (50 if is_kept else 0)


def test_delayed_messages_are_judged_apart_when_the_broker_was_away():
    date = time.time() - now()

    def due(at):
        return str(Value("p", int(at), f"0-{round((date + at) * 1000)}"))

    def came(value, at):
        return [Invoked(0.0, value), Read(at, "g", "c", "q", 0, value)]

    events: list[Event] = [
        Fault(20.0, "kill broker", "b", False),
        Fault(22.0, "kill broker", "b", True),
        *came(due(10), 10.5),
        *came(due(15), 14.0),
        *came(due(21), 24.0),
        *came(due(23), 24.5),
        *came(due(40), 40.25),
    ]

    times = punctuality(events, catching_up=3.0)

    assert len(times.early) == 1
    assert sorted(times.late) == pytest.approx([-1.0, 0.25, 0.5], abs=0.02)
    assert sorted(times.behind) == pytest.approx([1.5, 2.0], abs=0.02)


@pytest.mark.parametrize(
    ("owned", "is_shared"),
    [
        ({"a": ("0", "1"), "b": ("2",)}, True),
        ({"a": ("0", "1", "2")}, False),
        ({"a": ("0", "1", "2"), "b": ()}, False),
        ({"a": ("0", "1"), "b": ("1",)}, False),
        ({"a": ("0", "1", "2"), "b": ("2",)}, False),
        ({"a": ("0",), "b": ("1",)}, False),
    ],
)
def test_queues_are_shared_when_every_member_has_some_and_no_two_the_same(owned, is_shared):
    events = [Assigned(1.0, "g", name, queues) for name, queues in owned.items()]

    assert are_shared(events, {"a", "b"}, 3) is is_shared
