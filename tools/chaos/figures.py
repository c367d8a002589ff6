"""What a scenario measured, each figure with the rule that it has to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tools.chaos.checker import Analysis
from tools.chaos.history import Event
from tools.chaos.repetitions import SETTLING, unexplained_copies, unexplained_deliveries


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one scenario."""

    row: str  #: the test of reliability.md that it belongs to
    what: str
    value: str
    rule: str  #: empty for a figure that is only told
    is_kept: bool = True
    #: Whether it says how fast the machine is as well, which is for a quiet machine to judge.
    is_timing: bool = False
    #: How much was tried, of what; summed up by rows for the comparison with what was asked for.
    amount: float = 0.0
    of: str = ""


#: Acknowledged messages with which a history says something.
_LEAST_ACKED = 100
#: Units of figures that a busy machine changes.
_TIMING = frozenset({"s", "ms", "%"})


def at_most(row: str, what: str, value: float, limit: float, unit: str = "") -> Figure:
    """A figure with an upper bound."""
    shown = f" {unit}" if unit else ""
    return Figure(
        row,
        what,
        f"{short(value)}{shown}",
        f"≤ {short(limit)}{shown}",
        value <= limit,
        is_timing=unit in _TIMING and not math.isinf(value),
    )


def at_least(row: str, what: str, value: float, limit: float, unit: str = "") -> Figure:
    """A figure with a lower bound: usually that something was tried at all."""
    shown = f" {unit}" if unit else ""
    return Figure(row, what, f"{short(value)}{shown}", f"≥ {short(limit)}{shown}", value >= limit)


def tried(row: str, of: str, amount: float, least: float = 1) -> Figure:
    """How much was tried: a run that tried nothing would prove nothing."""
    return replace(at_least(row, of, amount, least), amount=amount, of=of)


def none_of(row: str, what: str, found: Sequence[str]) -> Figure:
    """Something that must not be; the first examples are shown."""
    value = str(len(found))
    if found:
        value += ": " + "; ".join(found[:3])
    return Figure(row, what, value, "= 0", not found)


def told(row: str, what: str, value: float | str, unit: str = "") -> Figure:
    """A figure without a rule."""
    shown = value if isinstance(value, str) else short(value)
    return Figure(row, what, f"{shown} {unit}".strip(), "")


def judged(row: str, analysis: Analysis, least: int = _LEAST_ACKED) -> list[Figure]:
    """The counts of a history, and every kind of anomaly, each of which must be absent.

    They belong to R5 as well, the analysis of all histories. A history in which hardly anything was
    acknowledged has no anomalies either, and says nothing.
    """
    row = f"{row} R5"
    counts = (
        f"{analysis.acked:,} acknowledged, {analysis.unknown:,} unknown, "
        f"{analysis.refused:,} refused, {analysis.reads:,} reads"
    )
    messages = replace(
        tried(row, "acknowledged messages", analysis.acked, least), what="messages", value=counts
    )
    figures = [messages]
    figures += [none_of(row, what, found) for what, found in analysis.anomalies.items()]
    return figures


def repeated(
    row: str,
    events: Sequence[Event],
    groups: Iterable[str],
    settling: float = SETTLING,
    patience: float = math.inf,
) -> list[Figure]:
    """What came twice without a fault that explains it, which must be nothing.

    `patience` is how long producers wait for an answer before they try again.
    """
    row = f"{row} R5"
    given = unexplained_deliveries(events, groups, settling)
    return [
        none_of(row, "given again without a reason", given),
        none_of(row, "stored twice without a reason", unexplained_copies(events, patience)),
    ]


def are_kept(figures: Iterable[Figure]) -> bool:
    return all(figure.is_kept for figure in figures)


def short(value: float) -> str:
    """A number as tables show it."""
    if math.isinf(value):
        return "never"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
