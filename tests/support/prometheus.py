"""A strict reader of Prometheus' text format 0.0.4: what is not exactly right is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_help = re.compile(rf"# HELP ({_NAME}) (\S.*)").fullmatch
_type = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary)").fullmatch
_sample = re.compile(rf"({_NAME})\{{(.*)\}} (-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)").fullmatch
_label = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
_escaped = re.compile(r"\\(.)")

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
    """All metrics by name; `ValueError` with the line that is wrong."""
    text = data.decode()
    if text and not text.endswith("\n"):
        raise ValueError("the last line has no end")
    families: dict[str, ParsedFamily] = {}
    lines = iter(text.split("\n")[:-1])
    current, name = ParsedFamily("none"), ""
    for line in lines:
        if line.startswith("#"):
            name, current = _begun(line, next(lines, ""))
            if name in families:
                raise ValueError(f"{name} comes twice")
            families[name] = current
            continue
        found = _sample(line)
        samples = None if found is None else _samples(name, current, found[1])
        if found is None or samples is None:
            raise ValueError(f"not a sample of {name}: {line!r}")
        labels = _labels(found[2])
        if labels in samples:
            raise ValueError(f"comes twice: {line!r}")
        samples[labels] = float(found[3])
        if current.kind == "counter" and float(found[3]) < 0:
            raise ValueError(f"a counter below 0: {line!r}")
    for name, family in families.items():
        if family.kind == "histogram":
            _check_histogram(name, family)
    empty = [name for name, family in families.items() if not family.samples]
    if empty:
        raise ValueError(f"without samples: {empty}")
    return families


def _samples(name: str, family: ParsedFamily, found: str) -> dict[Labels, float] | None:
    """Where a sample of this name belongs; None when it does not belong here."""
    if family.kind not in ("histogram", "summary"):
        return family.samples if found == name else None
    tables = {
        f"{name}_bucket" if family.kind == "histogram" else name: family.samples,
        f"{name}_count": family.counts,
        f"{name}_sum": family.sums,
    }
    return tables.get(found)


def _check_histogram(name: str, family: ParsedFamily) -> None:
    """Every histogram has a count, a sum, and buckets that grow up to its count."""
    buckets: dict[Labels, dict[float, float]] = {}
    for labels, count in family.samples.items():
        ((bound,), rest) = (
            [value for key, value in labels if key == "le"],
            frozenset(label for label in labels if label[0] != "le"),
        )
        buckets.setdefault(rest, {})[float(bound)] = count
    if not buckets.keys() == family.counts.keys() == family.sums.keys():
        raise ValueError(f"{name} lacks buckets, counts or sums")
    for labels, found in buckets.items():
        counts = [found[bound] for bound in sorted(found)]
        if counts != sorted(counts) or found.get(float("inf")) != family.counts[labels]:
            raise ValueError(f"the buckets of {name} are wrong: {found}")


def _begun(help_line: str, type_line: str) -> tuple[str, ParsedFamily]:
    described, typed = _help(help_line), _type(type_line)
    if described is None or typed is None or described[1] != typed[1]:
        raise ValueError(f"not the beginning of a metric: {help_line!r}, {type_line!r}")
    name, kind = typed[1], typed[2]
    if (kind == "counter") != name.endswith("_total"):
        raise ValueError(f"a {kind} must not be called {name}")
    return name, ParsedFamily(kind)


def _labels(text: str) -> Labels:
    labels: dict[str, str] = {}
    at = 0
    while True:
        found = _label.match(text, at)
        if found is None or found[1] in labels:
            raise ValueError(f"wrong labels: {text!r}")
        labels[found[1]] = _escaped.sub(lambda hit: {"n": "\n"}.get(hit[1], hit[1]), found[2])
        at = found.end()
        if at == len(text):
            return frozenset(labels.items())
        if text[at] != ",":
            raise ValueError(f"wrong labels: {text!r}")
        at += 1
