"""Metrics in Prometheus' text format, read by its own parser."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(slots=True)
class ParsedFamily:
    """One metric."""

    kind: str
    #: Of a histogram, the buckets; of a summary, the quantiles.
    samples: dict[Labels, float] = field(default_factory=dict)
    counts: dict[Labels, float] = field(default_factory=dict)
    sums: dict[Labels, float] = field(default_factory=dict)

    def value(self, **labels: str) -> float:
        """The only sample with (at least) these labels."""
        (found,) = self.find(**labels).values()
        return found

    def find(self, **labels: str) -> dict[Labels, float]:
        wanted = set(labels.items())
        return {key: value for key, value in self.samples.items() if wanted <= key}


def parse_metrics(data: bytes) -> dict[str, ParsedFamily]:
    """All metrics by name; `ValueError` for text that is wrong, or a sample that comes twice."""
    families: dict[str, ParsedFamily] = {}
    for found in text_string_to_metric_families(data.decode()):
        # The parser takes the end of a counter's name for a suffix.
        name = f"{found.name}_total" if found.type == "counter" else found.name
        family = families[name] = ParsedFamily(found.type)
        tables = {f"{name}_count": family.counts, f"{name}_sum": family.sums}
        for sample in found.samples:
            table = tables.get(sample.name, family.samples)
            labels = frozenset(sample.labels.items())
            if labels in table:
                raise ValueError(f"comes twice: {sample}")
            table[labels] = sample.value
    return families
