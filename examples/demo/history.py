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

    def draw(self, path: Path) -> None:
        """Throughput and lag over time, as a picture."""
        import matplotlib as mpl  # noqa: PLC0415  # slow, and only at the end

        mpl.use("Agg")
        mpl.rcParams["svg.fonttype"] = "none"  # words stay words, which can be searched
        from matplotlib import pyplot as plt  # noqa: PLC0415

        times = [each.seconds for each in self.moments]
        figure, (rates, lags) = plt.subplots(2, 1, sharex=True, figsize=(9, 5.2))
        for name, label in (
            ("sent", "sent"),
            ("billed", "billed on Spark"),
            ("shipped", "shipped by plain consumers"),
        ):
            rates.plot(times[1:], self._rates(name), label=label, linewidth=1.4, gid=f"rate-{name}")
        rates.set_ylabel("messages per second")
        rates.legend(frameon=False, fontsize=8)
        for name, label, behind in (
            ("billing", "Spark", [each.billing_lag for each in self.moments]),
            ("shipping", "plain consumers", [each.shipping_lag for each in self.moments]),
        ):
            lags.plot(times, behind, label=label, linewidth=1.4, gid=f"lag-{name}")
        for before, after in pairwise(self.moments):
            if before.members != after.members and after.members:
                sign = "joins" if after.members > before.members else "leaves"
                lags.axvline(after.seconds, color="0.7", linewidth=0.8)
                lags.annotate(
                    f" a member {sign}", (after.seconds, lags.get_ylim()[1]), fontsize=7, va="top"
                )
        lags.set_ylabel("messages behind")
        lags.set_xlabel("seconds")
        lags.legend(frameon=False, fontsize=8)
        for axes in (rates, lags):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylim(bottom=0)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)

    def _rates(self, name: str) -> list[float]:
        return [
            (getattr(after, name) - getattr(before, name))
            / max(1e-9, after.seconds - before.seconds)
            for before, after in pairwise(self.moments)
        ]
