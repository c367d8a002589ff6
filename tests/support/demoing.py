"""The demo at a terminal, where Ctrl-C can be pressed, and what it shows, taken apart."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tests.support.command import ROOT, Terminal, environment

#: Far above what anything of it takes, so that a busy machine fails nothing.
DEADLINE = 120.0
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class RunningDemo(Terminal):
    """The demo in the foreground of a terminal; its output goes there, or into a pipe."""

    deadline = DEADLINE

    def __init__(self, folder: Path, *options: str, piped: bool = False) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "examples.demo", "--folder", str(folder), *options]
        env = environment({"TERM": "xterm", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
        super().__init__(words, env, 50, 130, is_piped=piped, cwd=ROOT)

    @property
    def said(self) -> str:
        """Everything so far, without colours; of a screen that was drawn anew, every frame."""
        return _ESCAPE.sub("", self.screen)

    def until_there(self, file: str) -> None:
        """Wait until something in the folder matches."""
        self.until(lambda _: any(self.folder.glob(file)))

    def until_signals_are_taken(self) -> None:
        """Wait until the process handles SIGTERM, which no interpreter does by itself."""
        bit = 1 << (signal.SIGTERM - 1)
        status = Path(f"/proc/{self.process.pid}/status")

        def are_taken(_: str) -> bool:
            found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
            return found is not None and bool(int(found[1], 16) & bit)

        self.until(are_taken)

    def press_ctrl_c(self) -> None:
        """As a person does: the terminal sends SIGINT to all in the foreground."""
        self.press("\x03")

    def send_to_all(self, number: signal.Signals) -> None:
        """As `timeout` and service managers do."""
        os.killpg(self.process.pid, number)

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


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
    frames = frames_of(said) or [Frame(*(0 for _ in Frame.__annotations__))]
    return Frame(*map(max, zip(*frames, strict=True)))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def sums_of(said: str) -> dict[str, list[int]]:
    """The summary by group: sent, done, dead letters, lost or left, done twice."""
    whole, cut = "Every order is accounted for", "Stopped early: this is how far it came"
    # A title of several lines, where the screen is narrow.
    rows = [row for row in table_of(said, whole if whole in said else cut)[1:] if row[0]]
    rows = [row for row in rows if row[0] != "group"]
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
