"""The table of a run says what was found, and its exit code whether that is good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import environment
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
from tools.chaos.figures import at_least, at_most, judged, none_of, told
from tools.chaos.report import Outcome, Run, as_markdown, put_into_docs, read, write

ROOT = Path(__file__).parents[2]


def _run(*outcomes: Outcome) -> Run:
    return Run("abc123", "2 cores", 1, 3.0, outcomes)


def _good() -> Outcome:
    return Outcome("kill", "kills", figures=[at_most("R1", "start", 1.5, 2, "s")])


def _bad() -> Outcome:
    return Outcome("kill", "kills", figures=[none_of("R1", "lost", ["p/1/k is gone"])])


def test_bounds_are_kept_at_their_edge_and_not_beyond() -> None:
    assert at_most("R1", "x", 2.0, 2.0).is_kept
    assert not at_most("R1", "x", 2.001, 2.0).is_kept
    assert not at_most("R1", "x", float("inf"), 5.0).is_kept
    assert at_least("R1", "x", 2.0, 2.0).is_kept
    assert not at_least("R1", "x", 1.0, 2.0).is_kept
    assert told("R1", "x", 1.0).is_kept


def test_what_never_happened_is_not_a_matter_of_speed() -> None:
    assert at_most("R1", "x", 9.0, 5.0, "s").is_timing
    assert not at_most("R1", "x", float("inf"), 5.0, "s").is_timing
    assert not at_most("R1", "x", 9.0, 5.0).is_timing


KINDS = {SENT_OUT_OF_ORDER, HANDLED_OUT_OF_ORDER, SKIPPED, STEPPED_BACK, OVERLAPS}


@pytest.mark.parametrize("kind", sorted({*Analysis().anomalies, *KINDS}))
def test_every_kind_of_anomaly_breaks_a_rule(kind: str) -> None:
    analysis = Analysis()
    analysis.looked_for |= KINDS
    analysis.anomalies[kind].append("planted")

    broken = [figure for figure in judged("R5", analysis) if not figure.is_kept]

    assert [figure.what for figure in broken] == [kind]


def test_a_run_is_good_when_every_rule_was_kept() -> None:
    assert _run(_good()).is_kept
    assert not _run(_good(), _bad()).is_kept
    assert not _run(_good(), Outcome("x", "y", failure="ScenarioFailed: no")).is_kept


def test_a_table_shows_what_broke() -> None:
    text = as_markdown(_run(_good(), _bad(), Outcome("x", "y", failure="it | fell")))

    assert "| kill | R1 | start | 1.500 s | ≤ 2 s | yes |" in text
    assert "| kill | R1 | lost | 1: p/1/k is gone | = 0 | **no** |" in text
    assert "it \\| fell" in text
    assert "1 of 3 scenarios" in text
    assert "`abc123`" in text


def test_a_run_can_be_read_again(tmp_path: Path) -> None:
    run = _run(_good(), _bad())

    write(run, tmp_path / "chaos")

    assert as_markdown(read(tmp_path / "chaos")) == as_markdown(run)


def test_the_documentation_gets_the_table_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "guarantees.md"
    page.write_text((ROOT / "docs" / "guarantees.md").read_text())
    before, _, rest = page.read_text().partition("<!-- figures")
    after = rest.partition("<!-- end of figures -->")[2]

    put_into_docs(_run(_good()), page)

    assert page.read_text().startswith(before)
    assert page.read_text().endswith(after)
    assert "`abc123`" in page.read_text()


def test_scenarios_have_names_of_their_own_and_share_the_time() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert sum(scenario.seconds(3600) for scenario in SCENARIOS) <= 3600 * 1.2


def test_the_command_lists_what_it_has() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tools.chaos", "--list"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    for scenario in SCENARIOS:
        assert scenario.name in listed.stdout


def test_scenarios_are_chosen_by_name_or_by_how_names_begin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--list", "--only", "orderly", "disk"])

    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]

    assert listed == ["orderly", "disk-full", "disk-tiny", "disk-read-only"]


def test_the_command_refuses_a_scenario_that_it_does_not_have() -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "tools.chaos", "--only", "earthquake"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert refused.returncode == 2
    assert "earthquake" in refused.stdout
