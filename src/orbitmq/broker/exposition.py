"""Prometheus' text format, as far as a broker needs it: counters, gauges and histograms.

All samples of a metric have to stand together, below its help and type, so they are collected by
metric and written at the end. Labels are made into text once and used for all metrics of a thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

from orbitmq.broker.histogram import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_TOGETHER = 256
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Family:
    """One metric and its samples."""

    __slots__ = ("_full", "_name", "_samples")

    def __init__(self, name: str, kind: Kind, text: str) -> None:
        self._name = name
        self._samples = [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"]
        #: Samples that are bytes already: a hundred thousand strings take long to be let go of.
        self._full: list[bytes] = []

    def add(self, labels: str, value: float) -> None:
        """Add a sample; `labels` as `Exposition.labels` gives them."""
        self._samples.append(f"{self._name}{{{labels}}} {value!r}\n")
        if len(self._samples) >= _TOGETHER:
            self._full.append(self._encoded())
            self._samples.clear()

    def add_histogram(self, labels: str, histogram: Histogram) -> None:
        """Add all samples of a histogram."""
        name = self._name
        for bound, count in histogram.cumulative():
            shown = "+Inf" if bound == float("inf") else repr(bound)
            self._samples.append(f'{name}_bucket{{{labels},le="{shown}"}} {count}\n')
        self._samples.append(f"{name}_count{{{labels}}} {len(histogram)}\n")
        self._samples.append(f"{name}_sum{{{labels}}} {histogram.total!r}\n")
        if len(self._samples) >= _TOGETHER:
            self._full.append(self._encoded())
            self._samples.clear()

    def pieces(self) -> Iterator[bytes]:
        """The lines of the metric; none when it has no samples."""
        if self._full or len(self._samples) > 2:
            yield from self._full
            yield self._encoded()

    def _encoded(self) -> bytes:
        return "".join(self._samples).encode("utf-8", "replace")


class Exposition:
    """All metrics of one answer."""

    def __init__(self, common: Mapping[str, str]) -> None:
        """`common` are the labels that every sample has."""
        self._common = _labels(common)
        self._families: dict[str, Family] = {}

    def labels(self, **labels: str | bool) -> str:
        """Labels as text, with the common ones."""
        if not labels:
            return self._common
        return f"{self._common},{_labels(labels)}"

    def counter(self, name: str, text: str) -> Family:
        return self._family(name, "counter", text)

    def gauge(self, name: str, text: str) -> Family:
        return self._family(name, "gauge", text)

    def histogram(self, name: str, text: str) -> Family:
        return self._family(name, "histogram", text)

    def _family(self, name: str, kind: Kind, text: str) -> Family:
        return self._families.setdefault(name, Family(name, kind, text))

    def pieces(self) -> tuple[bytes, ...]:
        """Everything, metric by metric."""
        return tuple(piece for family in self._families.values() for piece in family.pieces())


def _labels(labels: Mapping[str, str | bool]) -> str:
    return ",".join(f'{name}="{_value(value)}"' for name, value in labels.items())


def _value(value: str | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.translate(_ESCAPES)
