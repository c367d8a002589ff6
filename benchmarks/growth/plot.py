"""Plots of curves: one picture for everything that grows with the same thing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.growth.curve import Grown, Point
from benchmarks.growth.wording import amount_text, size_text

_OURS, _BAD, _FLOOR, _GUIDE = "#2f6690", "#b5523b", "#8a8a8a", "#bbbbbb"
_PANEL = (4.6, 3.4)
_COLUMNS = 2
#: From here on a linear scale shows the last point only.
_WIDE = 20.0


def plot_axis(curves: Sequence[Grown], path: Path) -> None:
    """A panel for each curve, two side by side: the page is no wider."""
    width, height = _PANEL
    columns = min(_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, curve in zip_longest(panels, curves):
        if curve is None:
            axes.set_visible(False)
        else:
            _panel(axes, curve)
    # Without a date and with fixed ids the file changes only when the figures do.
    with mpl.rc_context({"svg.hashsalt": "orbitmq"}):
        figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, curve: Grown) -> None:
    places = range(len(curve.points))
    colour = _OURS if curve.ok else _BAD
    medians = [point.median for point in curve.points]
    if curve.is_rate:
        axes.bar(places, medians, width=0.5, color=colour)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _with_spread(axes, curve.points, "#222222", "")
    else:
        _with_spread(axes, curve.points, colour, "o-", label="OrbitMQ")
    if curve.floor_points:
        _with_spread(axes, curve.floor_points, _FLOOR, "s--", label=curve.floor)
    if max(medians) > _WIDE * min(medians):
        _as_logarithms(axes, curve, colour)
    else:
        axes.set_ylim(0, 1.2 * max(point.spread[1] for point in curve.points))
        for place in (0, len(medians) - 1):
            _say(axes, place, curve.points[place], colour)
    if axes.get_legend_handles_labels()[0] and (curve.floor_points or axes.get_yscale() == "log"):
        axes.legend(fontsize=8, frameon=False)
    # Sizes grow by factors: equal steps are a logarithmic axis, and 0 has a place on it.
    axes.set_xticks(list(places), [size_text(curve.axis, point.size) for point in curve.points])
    axes.tick_params(labelsize=8)
    axes.set_xlim(-0.4, len(medians) - 0.6)
    axes.set_xlabel(curve.axis, fontsize=9)
    axes.set_ylabel(curve.unit if curve.is_rate else f"{curve.unit} per message", fontsize=9)
    axes.set_title("\n".join([*textwrap.wrap(curve.name, 46), _verdict(curve)]), fontsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _verdict(curve: Grown) -> str:
    if curve.is_rate:
        return f"({1 / curve.growth.last_to_first:.2f} times as many)"
    return f"({curve.verdict})"


def _with_spread(
    axes: Axes, points: Sequence[Point], colour: str, style: str, *, label: str = ""
) -> None:
    """Medians with their quartiles."""
    medians = [point.median for point in points]
    below = [point.median - point.spread[0] for point in points]
    above = [point.spread[1] - point.median for point in points]
    axes.errorbar(
        range(len(points)),
        medians,
        yerr=[below, above],
        fmt=style or "none",
        color=colour,
        capsize=3,
        linewidth=1.6,
        elinewidth=1,
        markersize=4,
        label=label or None,
    )


def _as_logarithms(axes: Axes, curve: Grown, colour: str) -> None:
    """Both ways, with a guide that shows what in proportion would look like."""
    first, last = curve.points[0], curve.points[-1]
    medians = [point.median for point in curve.points]
    axes.set_yscale("log")
    if first.size:
        guide = [last.median * point.size / last.size for point in curve.points]
        axes.plot(range(len(guide)), guide, ":", color=_GUIDE, label="in proportion")
    axes.set_ylim(min(medians) / 2, max(medians) * 3)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for place, point in enumerate(curve.points):
        _say(axes, place, point, colour)


def _say(axes: Axes, place: int, point: Point, colour: str) -> None:
    """The median in figures, above the spread."""
    axes.annotate(
        amount_text(point.median),
        (place, point.spread[1]),
        textcoords="offset points",
        xytext=(0, 5),
        ha="center",
        fontsize=8,
        color=colour,
    )
