"""What the demo shows, taken apart: frames of its screen, tables of its summary, its curves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"

_NUMBER = r"([\d,]+)"
_FRAME = re.compile(
    rf"three shops send +{_NUMBER} +{_NUMBER}.*\n"
    rf"billing, on Spark +{_NUMBER} +{_NUMBER} +{_NUMBER}.*\n"
    rf"shipping, plain +{_NUMBER} +{_NUMBER} +{_NUMBER}.*\n"
    rf"Spark: {_NUMBER} batch(?:es)?, .*?; {_NUMBER} retr(?:y|ies), {_NUMBER} dead letters?\."
)


class Frame(NamedTuple):
    """The numbers of the screen at one time."""

    sent: int
    sent_rate: int
    billed: int
    billed_rate: int
    billing_lag: int
    shipped: int
    shipped_rate: int
    shipping_lag: int
    batches: int
    retries: int
    dead: int


def frames_of(said: str) -> list[Frame]:
    return [Frame(*map(number, match.groups())) for match in _FRAME.finditer(said)]


def largest_of(said: str) -> Frame:
    """The largest of each number that was shown at any time."""
    frames = frames_of(said) or [Frame(*(0 for _ in Frame._fields))]
    return Frame(*map(max, zip(*frames, strict=True)))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def sums_of(said: str) -> dict[str, list[int]]:
    """The summary by group: sent, done, dead letters, lost, done twice."""
    rows = table_of(said, "Every order is accounted for")[1:]
    return {row[0].split()[0]: [number(cell) for cell in row[1:]] for row in rows}


def table_of(said: str, title: str) -> list[list[str]]:
    """The rows of the table with this title, the names of its columns first."""
    lines = said[said.index(title) :].splitlines()[1:]
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith(tuple("┏┃┡│└")):
            break
        if line[0] in "┃│":
            rows.append([cell.strip() for cell in re.split("[┃│]", line)[1:-1]])
    return rows


def picture_in(file: Path) -> ET.Element:
    return ET.parse(file).getroot()  # noqa: S314  # we have drawn it ourselves
