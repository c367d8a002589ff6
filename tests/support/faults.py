"""Judges the figures of a scenario as a test does."""

from __future__ import annotations

from collections.abc import Sequence

from tools.chaos.figures import Figure


def assert_kept(figures: Sequence[Figure]) -> None:
    """Fail with every rule that was broken, and with the figures beside it.

    How fast things were is for `make chaos` on a quiet machine; that they came about at all is not.
    """
    broken = [figure for figure in figures if not figure.is_kept and not figure.is_timing]
    shown = "\n".join(f"{each.what}: {each.value} (rule {each.rule})" for each in broken)
    rest = "; ".join(f"{each.what}: {each.value}" for each in figures if each.is_kept)
    assert not broken, f"{shown}\nthe rest: {rest}"
