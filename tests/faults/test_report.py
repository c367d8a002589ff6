"""The table of a run says what was found, and its exit code whether that is good."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from tools.chaos.__main__ import main
from tools.chaos.catalogue import SCENARIOS, USUAL_MINUTES, Scenario
from tools.chaos.checker import (
    HANDLED_OUT_OF_ORDER,
    OVERLAPS,
    SENT_OUT_OF_ORDER,
    SKIPPED,
    STEPPED_BACK,
    Analysis,
)
from tools.chaos.figures import at_least, at_most, judged, none_of, told, tried
from tools.chaos.history import Assigned, Event, Fault, Invoked, Read, Value, now
from tools.chaos.promises import PROMISES
from tools.chaos.report import Outcome, Run, as_markdown, by_rows, last, put_into_docs, write
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


def test_bounds_are_kept_at_their_edge_and_not_beyond():
    assert at_most("R1", "x", 2.0, 2.0).is_kept
    assert not at_most("R1", "x", 2.001, 2.0).is_kept
    assert not at_most("R1", "x", float("inf"), 5.0).is_kept
    assert at_least("R1", "x", 2.0, 2.0).is_kept
    assert not at_least("R1", "x", 1.0, 2.0).is_kept
    assert told("R1", "x", 1.0).is_kept


def test_what_never_happened_is_not_a_matter_of_speed():
    assert at_most("R1", "x", 9.0, 5.0, "s").is_timing
    assert not at_most("R1", "x", float("inf"), 5.0, "s").is_timing
    assert not at_most("R1", "x", 9.0, 5.0).is_timing


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


def test_a_table_shows_what_broke():
    text = as_markdown(_run(_good(), _bad(), Outcome("x", "y", failure="it | fell")))

    assert "| kill | R1 | start | 1.500 s | ≤ 2 s | yes |" in text
    assert "| kill | R1 | lost | 1: p/1/k is gone | = 0 | **no** |" in text
    assert "it \\| fell" in text
    assert "1 of 3 scenarios" in text
    assert "`abc123`" in text


def test_a_run_of_some_scenarios_does_not_stand_for_a_whole_one(tmp_path):
    whole = _run(_good())
    later = _run(_good(), began="20260102-040000", is_whole=False)
    write(whole, tmp_path)
    write(later, tmp_path)

    assert last(tmp_path, is_whole=True) == whole
    assert last(tmp_path, is_whole=False) == later
    assert last(tmp_path / "elsewhere", is_whole=False) is None


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


def test_scenarios_have_names_of_their_own_and_a_usual_run_fits_its_time():
    names = [each.name for each in SCENARIOS] + [each.name for each in SUITES]
    scenarios = sum(each.takes(each.seconds(1.0)) for each in SCENARIOS)
    suites = sum(each.seconds(1.0) for each in SUITES if not each.is_extra)

    assert len(set(names)) == len(names)
    assert 0.8 <= (scenarios + suites) / 60 / USUAL_MINUTES <= 1.1


@pytest.mark.parametrize("minutes", [20.0, 40.0, 480.0])
def test_a_run_takes_the_time_that_it_is_given(minutes, tmp_path, monkeypatch):
    clock = [0.0]

    def run_part(part, scale, *_):
        # All take somewhat longer than they say; the later ones make up for it.
        clock[0] += 1.1 * part.seconds(scale)
        return Outcome(part.name, "", part.rows)

    monkeypatch.setattr("tools.chaos.__main__._run_part", run_part)
    monkeypatch.setattr("tools.chaos.__main__._FOLDER", tmp_path)
    monkeypatch.setattr("tools.chaos.__main__.ROOT", tmp_path)
    monkeypatch.setattr("tools.chaos.__main__.time.monotonic", lambda: clock[0])

    assert main(["--minutes", str(minutes)]) == 0

    run = last(tmp_path, is_whole=True)
    assert run is not None
    assert 0.85 * minutes <= run.minutes <= 1.1 * minutes


def test_scenarios_are_chosen_by_name_or_by_how_names_begin(capsys):
    main(["--list", "--only", "orderly", "disk"])

    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]

    assert listed == ["orderly", "disk-full", "disk-tiny", "disk-read-only"]


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


def test_a_run_that_was_cut_short_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    lived: list[str] = []

    def scenario(name, *, breaks=False):
        def run(stage, effort):
            lived.append(name)
            if breaks and lived.count(name) == 1:
                raise KeyboardInterrupt
            return [tried("R1", "kills", 1)]

        return Scenario(name, "R1", "", run, 1.0, 1.0)

    commit = ["abc123"]
    scenarios = (scenario("one"), scenario("two", breaks=True), scenario("three"))
    for name, value in {
        "SCENARIOS": scenarios,
        "SUITES": (),
        "_FOLDER": tmp_path,
        "ROOT": tmp_path,
        "Stage": contextlib.nullcontext,
        "commit_of": lambda: commit[0],
    }.items():
        monkeypatch.setattr(f"tools.chaos.__main__.{name}", value)
    with pytest.raises(KeyboardInterrupt):
        main([])
    cut = last(tmp_path, is_whole=False)

    assert main(["--resume", "--seconds", "5"]) == 2
    assert main(["--resume", "--seed", "5"]) == 2
    assert main(["--resume", "--minutes", "5"]) == 2
    for commit[0] in ("another", "abc123-dirty", "unknown"):
        assert main(["--resume"]) == 2
    assert lived == ["one", "two"]

    commit[0] = "abc123"
    assert main(["--resume"]) == 0
    assert main(["--resume"]) == 2

    whole = last(tmp_path, is_whole=True)
    assert lived == ["one", "two", "two", "three"]
    assert cut is not None
    assert [each.name for each in cut.outcomes] == ["one"]
    assert not cut.is_whole
    assert whole is not None
    assert [each.name for each in whole.outcomes] == ["one", "two", "three"]


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


def test_the_command_refuses_a_scenario_that_does_not_exist(capsys):
    assert main(["--only", "earthquake"]) == 2
    assert "earthquake" in capsys.readouterr().out
