"""What happened over time, and a picture of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Moment:
    """All counts at one time."""

    seconds: float
    sent: int
    billed: int
    shipped: int
    dead: int
    members: int

    @property
    def billing_lag(self) -> int:
        """Orders that are neither billed nor given up."""
        return max(0, self.sent - self.billed - self.dead)

    @property
    def shipping_lag(self) -> int:
        return max(0, self.sent - self.shipped)


@dataclass(slots=True)
class History:
    """The moments of a run."""

    moments: list[Moment] = field(default_factory=list)

    def rate(self, name: str, *, over: float = 3.0) -> float:
        """How fast a count grows, over the last seconds."""
        if len(self.moments) < 2:
            return 0.0
        last = self.moments[-1]
        first = next(each for each in self.moments if each.seconds >= last.seconds - over)
        if first is last:
            first = self.moments[-2]
        grown: int = getattr(last, name) - getattr(first, name)
        return grown / max(1e-9, last.seconds - first.seconds)

    def draw(self, path: Path, verdict: str) -> None:
        """Throughput and lag over time, as a picture: one colour for each series in both panels."""
        import matplotlib as mpl  # noqa: PLC0415  # slow, and only at the end

        mpl.use("Agg")
        mpl.rcParams["svg.fonttype"] = "none"  # words stay words, which can be searched
        mpl.rcParams["svg.hashsalt"] = "demo"
        from matplotlib import pyplot as plt  # noqa: PLC0415

        times = [each.seconds for each in self.moments]
        figure, (rates, lags) = plt.subplots(
            2, 1, sharex=True, figsize=(9, 5.6), layout="constrained"
        )
        for name, label, colour, width in _SERIES:
            rates.plot(
                times,
                self._rates(name),
                label=label,
                color=colour,
                linewidth=width,
                gid=f"rate-{name}",
            )
            if name != "sent":
                group = "billing" if name == "billed" else "shipping"
                behind = [getattr(each, f"{group}_lag") for each in self.moments]
                lags.plot(times, behind, color=colour, linewidth=2, gid=f"lag-{group}")
        for place, (at, text) in enumerate(self._events()):
            for axes in (rates, lags):
                axes.axvline(at, color="0.75", linewidth=1, linestyle=(0, (2, 3)), zorder=0)
            # Above the panel, where no line goes, in two rows for names beside each other.
            rates.annotate(
                text,
                (at, 1.02 + 0.09 * (place % 2)),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=9,
                color="0.35",
            )
        rates.set_ylabel("orders per second", fontsize=11)
        lags.set_ylabel("orders not handled yet", fontsize=11)
        lags.set_xlabel("seconds", fontsize=11)
        for axes in (rates, lags):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="0.92", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, max(times, default=1.0))
            axes.tick_params(labelsize=10)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=11)
        figure.suptitle(verdict, fontsize=13, x=0.01, ha="left")
        figure.savefig(path)
        plt.close(figure)

    def _rates(self, name: str) -> list[float]:
        """The rate around each moment, over two seconds, so that a trend is seen."""
        found = []
        for each in self.moments:
            near = [at for at in self.moments if abs(at.seconds - each.seconds) <= _SMOOTH / 2]
            grown = getattr(near[-1], name) - getattr(near[0], name)
            found.append(grown / max(1e-9, near[-1].seconds - near[0].seconds))
        return found

    def _events(self) -> list[tuple[float, str]]:
        """What happened when, for the picture."""
        found: list[tuple[float, str]] = []
        for before, after in pairwise(self.moments):
            if before.members != after.members and after.members:
                sign = "joins" if after.members > before.members else "leaves"
                found.append((after.seconds, f"shipper {sign}"))
        last = next((each for each in self.moments if each.sent == self.moments[-1].sent), None)
        if last is not None and last is not self.moments[-1]:
            found.append((last.seconds, "shops close"))
        return found


#: Field, label, colour and width of each line, those below the others first.
_SERIES = (
    ("sent", "sent by the shops", "#9aa3ad", 5.0),
    ("billed", "billed on Spark", "#d95f02", 2.0),
    ("shipped", "shipped by plain consumers", "#1b6ca8", 2.0),
)
#: Seconds over which a rate is taken.
_SMOOTH = 3.0
