"""Curves in words and figures, for the table, the page and the plots."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.growth.curve import Grown, Growth, Point

BYTES_AXIS = "bytes in a message"


def by_axis(curves: Sequence[Grown]) -> list[tuple[str, list[Grown]]]:
    """The curves grouped by what grows, in the order in which that first appears."""
    axes: dict[str, list[Grown]] = {}
    for curve in curves:
        axes.setdefault(curve.axis, []).append(curve)
    return list(axes.items())


def size_text(axis: str, size: int) -> str:
    if axis == BYTES_AXIS:
        for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
            if size >= unit:
                return f"{size / unit:g} {name}"
        return f"{size} B"
    if size >= 1_000_000:
        return f"{size / 1_000_000:g} M"
    return f"{size // 1000} k" if size >= 10_000 else f"{size:,}"


def amount_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def point_text(point: Point) -> str:
    low, high = point.spread
    return f"{amount_text(point.median)} ({amount_text(low)} to {amount_text(high)})"


def growth_text(growth: Growth) -> str:
    low, high = growth.spread
    return f"{growth.last_to_first:.2f} ({low:.2f} to {high:.2f})"


def gain_text(growth: Growth) -> str:
    """The same of rates: what they are multiplied by."""
    low, high = growth.spread
    return f"{1 / growth.last_to_first:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def change_text(curve: Grown) -> str:
    return gain_text(curve.growth) if curve.is_rate else growth_text(curve.growth)


def judgement_text(curve: Grown) -> str:
    """One sentence about a curve: whether it is flat, and if not, why."""
    growth = curve.growth
    if curve.is_rate:
        told = f"the rate at the last is {gain_text(growth)} times that at the first"
        if curve.least_gain is not None:
            told += f"; wanted: at least {curve.least_gain:g} times"
    elif curve.verdict == "flat":
        told = f"flat: no point is more than {growth.rise:.2f} times as dear as one before it"
    elif curve.verdict == "falls":
        told = f"falls: the last costs {growth_text(growth)} times the first"
    else:
        first, last = (size_text(curve.axis, size) for size in growth.risen)
        told = f"rises {growth.rise:.2f} times between {first} and {last}"
    if curve.verdict == "rises for a reason":
        told += f". The reason: {curve.reason}"
    elif curve.verdict == "rises" and curve.reason:
        told += f". That is more than the known reason explains ({curve.limit}): {curve.reason}"
    elif curve.verdict == "rises":
        told += f", for which no reason is known; up to {curve.limit} would count as flat"
    if curve.floor_growth is not None:
        told += f". {curve.floor.capitalize()}: {growth_text(curve.floor_growth)} times"
    return told
