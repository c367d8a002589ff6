"""`docs/performance.md` and its plots, made from the results of the last run."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.growth.curve import Grown
from benchmarks.growth.plot import plot_axis
from benchmarks.growth.wording import (
    by_axis,
    change_text,
    judgement_text,
    point_text,
    size_text,
)
from benchmarks.load.processes import APACHE_JAVA_TEXT
from benchmarks.machine import Machine
from benchmarks.report import (
    Report,
    by_room,
    figure_text,
    published,
    ratio_text,
    target_text,
    write_data,
)
from benchmarks.runner import Result, Scale, verdict

_METHOD = """\
# Performance

This page is made by `python -m benchmarks --docs` from the results of `make bench`; edit the
benches, not the page.

## How it is measured

A rate by itself depends on the machine and on who else uses it. Every bench therefore runs its
candidate and a floor in turns, round by round, in one process. A round gives one ratio: the speed
of the candidate divided by that of the floor. The table shows the median of the rounds and, in
brackets, their quartiles. A ratio above 1 means faster than what it is compared with. Time is CPU
time unless the line says otherwise, so that neighbours on a shared machine do not count.

The floor is the least that anybody would have to do with the same bytes: copy them, write them to
a file one after the other, wait for the disk, or parse a header with the standard library. It is
not a rival; it shows how much of the machine is left. Messages all differ in key, tag, time and
unique id, up to 1,024 of them (64 batches of 32), which are then sent again. Targets are lower
limits of ratios, and in one case of a rate, that the project sets itself.

The broker is measured as a process of its own, under load from another process whose requests were
encoded before. There a ratio is made of the CPU time that the two servers used for the same
requests, unless the line is about waiting, and the figure is the rate that clients saw. Floors run
on the same event loop as the broker. Apache's broker, where it can be had, gets the same requests
in turns with ours, and is compared twice: by what clients see, and by what it costs. Ratios are
made within a line. Without "(wall time)" behind it a rate of the broker is what clients saw, too,
and only its ratio is by CPU time. Figures of the same load in two sections differ: beside Apache's
broker ours shares cores, caches and the disk with a second broker, which goes on writing in our
turn. The more is written, the more of it goes to memory that was not in use before. In a virtual
machine the host may have to find that first: here a page of a growing file then took 5 to 12 µs of
CPU to write instead of 2, and batches, which fill one with every third message, feel that most.

Java compiles what it runs often, and takes CPU time for it. Apache's broker and client, and Spark
for either source, therefore work under the load of a line before it is measured: until five slots
of it in a row were no more than 5 % faster than the best before them, for {least:g} s at least and
{longest:g} s at most. Rounds beside them take {round:g} s or more on each side. The figures of both
sides, round by round, are in the data: a peer that was still getting faster would show it.

Apache's broker runs with `{java}`, which is the collector of its own start script with a quarter of
the heap and without `-XX:+AlwaysPreTouch`. Its files have their default sizes, its flush is
asynchronous, which is its default, and it waits longer than by default before it refuses a send.
Ours has asynchronous flush as well, unless a line says otherwise, and runs with the extras `broker`
and `speed` (`pip install '.[broker,speed]'`: uvloop as its event loop, isal for checksums). Memory
is anonymous memory, which nobody else can have; of resident memory, the parts of mapped files can
be taken back.

`make bench` runs everything and takes about half an hour, `make bench QUICK=1` takes fewer rounds,
smaller sizes and at most twelve minutes; what it drops is named on its page, and it is not
published. What others have made is fetched first, and once: Apache's jars and Kafka's from Maven
Central (needs Java and Maven) into `build/interop` and `build/kafka`, the C++ client from PyPI into
`build/clients`. Where that cannot be done a line says so, and the rest is measured. Both write
`build/bench.json`, which holds the figures of every round, and the same as a page with plots in
`build/bench`. `make bench ARGS="--only growth"` measures a part.
The data of this page: [bench.json](data/bench.json).

`make profile` says where the time goes: it runs our side of the hot paths (sends, pulls, decoding,
the hand-over to handlers, Spark) under a sampling profiler, shows which functions of which process
have the largest shares, and leaves flame graphs in `build/profile`, as files for speedscope (`npx
speedscope FILE`, or its web page). To look at some of them for longer: `make profile ARGS="send
decode --seconds 20"`.
"""

_GROWTH = """\
## How cost grows

What one message costs the broker when something around it grows: CPU time of the broker process,
with its system calls, under load from another process. Every round visits all sizes, forwards and
backwards in turn; points are medians of the rounds with their quartiles, and growth is the cost at
the last size relative to the first. Growth and rises are made round by round, so that what differs
between rounds is left out: they are not the quotients of the points' medians. The exponent is that
of the power law that fits best: 0 is flat, 1 is proportional. The rule is that no curve bends
upwards without a reason: a rise of more than a quarter between any two points, one before the
other, is told here with its reason, and the reason says how far it reaches.
"""

_PLAIN, _GOOD, _BAD = "#5b7f9e", "#3f8f5f", "#b5523b"


def write_page(report: Report, docs: Path) -> list[Path]:
    """Write the page, its data and the plots; where they are."""
    report = published(report)
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    page = docs / "performance.md"
    written = [page]
    written.append(write_data(report, docs / "data" / "bench.json"))
    parts = [_method_text(report), _machine_text(report), _missing_text(report)]
    for room, results in by_room(report.results):
        parts.append(f"## {room.capitalize()}\n")
        if any(result.ratio is not None for result in results):
            plot = images / f"performance-{_slug(room)}.svg"
            _plot(room, results, plot)
            written.append(plot)
            parts.append(f"![{room}: speed relative to the floor](images/{plot.name})\n")
        parts.append(_table(results))
    if report.curves:
        parts.append(_GROWTH)
    for axis, curves in by_axis(report.curves):
        plot = images / f"performance-growth-{_slug(axis)}.svg"
        plot_axis(curves, plot)
        written.append(plot)
        parts += [
            f"### {axis.capitalize()}\n",
            f"![cost of a message by {axis}](images/{plot.name})\n",
            _growth_table(curves),
            _judgements(curves),
        ]
    page.write_text("\n".join(parts), encoding="utf-8")
    return written


def _method_text(report: Report) -> str:
    scale = Scale.quick() if report.quick else Scale()
    return _METHOD.format(
        least=scale.warming.least,
        longest=scale.warming.longest,
        round=scale.java_round,
        java=APACHE_JAVA_TEXT,
    )


def _machine_text(report: Report) -> str:
    machine: Machine = report.machine
    build = "" if machine.optimised_build else ", built without profile-guided optimisation"
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    if machine.java:
        packages += f", {machine.java}"
    run = "a quick run" if report.quick else "a full run"
    run += f" on {machine.day}," if machine.day else ""
    memory = f" and {machine.memory / (1 << 30):.0f} GiB of memory" if machine.memory else ""
    changes = " with changes" if machine.has_changes else ""
    return (
        f"Measured in {run} on {machine.cores} cores of {machine.cpu}{memory}, {machine.system}, "
        f"with {machine.python}{build}; {packages}; commit {machine.commit}{changes}. "
        f"{machine.load:.1f} other processes wanted these cores in the minutes before.\n"
    )


def _missing_text(report: Report) -> str:
    """What the tables below do not hold, and what in them is not as it should be."""
    parts = [f"Targets and curves: {report.score}.\n"]
    if report.missed:
        lines = "".join(f"- {title}\n" for title in report.missed)
        parts.append(f"Missed what is wanted:\n\n{lines}")
    if report.not_measured:
        lines = "".join(f"- {title}\n" for title in report.not_measured)
        parts.append(f"Have a target and were not measured:\n\n{lines}")
    if report.dropped:
        lines = "".join(f"- {each}\n" for each in report.dropped)
        parts.append(f"A quick run has no time for all sizes:\n\n{lines}")
    if report.failures:
        lines = "".join(f"- {failure}\n" for failure in report.failures)
        parts.append(f"Not measured, because the line failed:\n\n{lines}")
    if report.left_out:
        lines = "".join(f"- {title}\n" for title in report.left_out)
        parts.append(f"Not measured, because the time was up:\n\n{lines}")
    return "\n".join(parts)


def _growth_table(curves: list[Grown]) -> str:
    """A row for each size, a column for each curve."""
    names = [f"{curve.name} ({curve.unit})" for curve in curves]
    lines = [
        f"| {' | '.join([curves[0].axis, *names])} |",
        f"|---:|{'---:|' * len(curves)}",
    ]
    sizes = sorted({point.size for curve in curves for point in curve.points})
    found = [{point.size: point_text(point) for point in curve.points} for curve in curves]
    for size in sizes:
        cells = [size_text(curves[0].axis, size), *(texts.get(size, "") for texts in found)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| growth | {' | '.join(change_text(curve) for curve in curves)} |")
    exponents = [f"{curve.growth.exponent:.2f}" for curve in curves]
    lines.append(f"| exponent | {' | '.join(exponents)} |")
    return "\n".join(lines) + "\n"


def _judgements(curves: list[Grown]) -> str:
    return "".join(
        f"- **{curve.name}**: {judgement_text(curve)}.{f' {curve.note}' if curve.note else ''}\n"
        for curve in curves
    )


def _table(results: list[Result]) -> str:
    lines = [
        "| what | figure | ratio | compared with | target |",
        "|---|---:|---:|---|---|",
    ]
    for result in results:
        target = ""
        if result.has_target:
            target = f"at least {target_text(result)}: {verdict(result) or 'not measured'}"
        wall = " (wall time)" if result.clock == "wall time" else ""
        figure = f"{figure_text(result)} {result.unit}{wall}".strip()
        cells = (
            result.name,
            figure,
            ratio_text(result),
            f"{result.compared_with} ({result.note})" if result.note else result.compared_with,
            target,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plot(room: str, results: list[Result], path: Path) -> None:
    """Bars of the ratios with their quartiles, and a tick where the target is."""
    shown = [result for result in results if result.ratio is not None and result.spread]
    figure = Figure(figsize=(9, 0.9 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(shown):
        assert result.ratio is not None
        assert result.spread is not None
        low, high = result.spread
        colour = {"ok": _GOOD, "not ok": _BAD, "": _PLAIN}[verdict(result)]
        axes.barh(row, result.ratio, color=colour, height=0.6)
        axes.errorbar(
            result.ratio,
            row,
            xerr=[[max(0.0, result.ratio - low)], [max(0.0, high - result.ratio)]],
            color="#222222",
            capsize=3,
            linewidth=1,
        )
        if result.target is not None:
            axes.plot([result.target] * 2, [row - 0.38, row + 0.38], color="#222222", linewidth=2)
    axes.set_yticks(
        range(len(shown)),
        [f"{result.name}\nagainst {result.compared_with}" for result in shown],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.axvline(1, color="#888888", linewidth=1, linestyle="--")
    axes.set_xlabel("speed relative to what it is compared with (1: equal; thick tick: target)")
    axes.set_title(room)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Without a date and with fixed ids the file changes only when the figures do.
    with mpl.rc_context({"svg.hashsalt": "orbitmq"}):
        figure.savefig(path, metadata={"Date": None})


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
