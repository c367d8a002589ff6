"""Makes the virtual environment of a checkout, and shows how far it is.

It is run by the Python of the machine, before anything is installed: `python -m tools.environment`.
pip is the one who works. What it says tells how many packages are fetched, and the folders that it
leaves behind how many are installed; all of it is kept in `.venv/setup.log`.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

STEPS = 4
#: How often a terminal's line is written anew, in seconds.
PACE = 0.2
#: Without a terminal, a step says how far it is each time that this share of it is done.
SHARE = 0.25
#: Seconds within which a Python that works says which pip it has.
PATIENCE = 60.0
#: Lines of pip that are shown when it fails.
LAST = 15
_NAME = r"([A-Za-z0-9][A-Za-z0-9._-]*)"
_FETCHED = re.compile(rf"(?:Collecting|Requirement already satisfied:) {_NAME}")
_DOWNLOAD = re.compile(rf"\s+Downloading {_NAME} \(([ -~]+)\)")
_PINNED = re.compile(rf"^{_NAME}==", re.MULTILINE)


class SetupFailed(Exception):
    """A step that did not succeed, with what to look at."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.environment", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--lock", type=Path, default=Path("requirements/dev.txt"))
    asked = parser.parse_args(words)
    display = Display(sys.stdout, is_terminal=sys.stdout.isatty())
    try:
        set_up(asked.venv, asked.lock, display)
    except SetupFailed as failure:
        display.end()
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        display.end()
        print("Set-up was interrupted; the next make goes on with it.", file=sys.stderr)
        return 130
    return 0


def set_up(folder: Path, lock: Path, display: Display) -> None:
    """Make the environment if there is none, and bring it to what the lock says."""
    try:
        display.begin(1, f"a virtual environment in {folder}")
        if not is_usable(folder):
            _remove(folder)
            _make(folder)
        _install(folder, lock, display)
    except OSError as error:
        raise SetupFailed(f"set-up failed: {error}; the next make tries again") from error
    display.finish()


def is_usable(folder: Path) -> bool:
    """Whether the environment can be worked with; if not, it is made anew.

    Its Python may be gone, after an upgrade of the machine's; it may have no pip, if that Python
    had none to give; and if the checkout has been moved, its commands call a Python that is not
    there any more. Raises `SetupFailed` when nobody can tell: to make it anew takes minutes.
    """
    pip = folder / "bin" / "pip"
    try:
        # A long path has it in the second line.
        calls = b"".join(pip.read_bytes().splitlines()[:2])
        # As venv writes it: `resolve` would follow links.
        if os.fsencode(os.path.abspath(pip.parent)) not in calls:  # noqa: PTH100
            return False
        tried = subprocess.run(
            [*_pip(folder), "--version"], capture_output=True, timeout=PATIENCE, check=False
        )
    except OSError:
        return False
    except subprocess.TimeoutExpired as error:
        raise SetupFailed(f"{error}; if that happens again, remove {folder}") from error
    return tried.returncode == 0


def _remove(folder: Path) -> None:
    """Take away what is left of an environment, and nothing that is something else."""
    # That file is the first that `venv` makes: before it there are empty folders only.
    is_environment = (folder / "pyvenv.cfg").is_file()
    if not is_environment and any(each.is_file() for each in (folder, *folder.rglob("*"))):
        raise SetupFailed(
            f"{folder} is there and is no virtual environment; VENV must name one, or a folder "
            "that does not exist yet"
        )
    shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        import venv  # noqa: PLC0415  # some systems have it in a package of its own

        venv.create(folder, with_pip=True, symlinks=True)
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        raise SetupFailed(
            f"{sys.executable} cannot make a virtual environment with pip in {folder} ({error}); "
            "on Debian and Ubuntu this happens when the package python3-venv is missing"
        ) from error


def _pip(folder: Path) -> tuple[Path | str, ...]:
    return (folder / "bin" / "python", "-m", "pip")


def _install(folder: Path, lock: Path, display: Display) -> None:
    wanted = {_normal(name) for name in _PINNED.findall(lock.read_text(encoding="utf-8"))}
    log = folder / "setup.log"
    log.write_text("")
    fetched: set[str] = set()
    display.begin(2, "fetching packages", of=len(wanted))
    quietly = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    steps = _Steps((*_pip(folder), "install", *quietly), log)
    for line in steps.run("--require-hashes", "-r", lock):
        if line.startswith("Installing collected packages"):
            display.begin(3, "installing packages", of=len(wanted))
        if (match := _FETCHED.match(line)) and _normal(match[1]) in wanted:
            fetched.add(_normal(match[1]))
            display.at(len(fetched), match[1])
        elif match := _DOWNLOAD.match(line):
            display.at(len(fetched), f"{match[1].partition('-')[0]}, {match[2]}")
        elif display.step == 3:
            display.at(len(wanted & _installed(folder)))
        display.tick()

    display.begin(4, "installing OrbitMQ itself")
    for _ in steps.run("--no-deps", "--no-build-isolation", "-e", "."):
        display.tick()


@dataclass(slots=True)
class _Steps:
    """Runs pip and hands out what it says, with an empty line now and then while it is silent."""

    command: Sequence[str | Path]
    log: Path

    def run(self, *words: str | Path) -> Iterator[str]:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        last: deque[str] = deque(maxlen=LAST)
        with (
            self.log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                [*self.command, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",  # what a compiler says may be in any encoding
            ) as process,
        ):
            assert process.stdout is not None  # noqa: S101  # asked for above
            reading = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
            reading.start()
            while True:
                try:
                    line = lines.get(timeout=PACE)
                except queue.Empty:
                    yield ""
                    continue
                if line is None:
                    break
                log.write(line)
                last.append(line)
                yield line
            code = process.wait()
        if code != 0:
            raise SetupFailed(
                f"{''.join(last)}pip failed with exit code {code}; all that it said is in "
                f"{self.log}, and the next make tries again"
            )


def _read(source: TextIO, lines: queue.SimpleQueue[str | None]) -> None:
    try:
        for line in source:
            lines.put(line)
    except ValueError:
        pass  # it was closed: whoever waited for lines has been interrupted
    finally:
        lines.put(None)  # whoever waits for the next one is never left waiting


def _installed(folder: Path) -> set[str]:
    found = folder.glob("lib/python*/site-packages/*.dist-info")
    return {_normal(path.name.partition("-")[0]) for path in found}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(slots=True)
class Display:
    """One line that is written over on a terminal; elsewhere a line for a step and its quarters."""

    out: TextIO
    is_terminal: bool
    now: Callable[[], float] = time.monotonic
    width: int = field(default_factory=lambda: shutil.get_terminal_size().columns)
    step: int = 0
    _what: str = ""
    _of: int = 0
    _done: int = 0
    _doing: str = ""
    _told: float = 0.0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.now()

    def begin(self, step: int, what: str, *, of: int = 0) -> None:
        if self.is_terminal and self.step:
            self._finish_line()
        self.step, self._what, self._of = step, what, of
        self._done, self._doing, self._told = 0, "", 0.0
        self._show()

    def at(self, done: int, doing: str = "") -> None:
        """So many of the step's parts are done, and this is the next."""
        self._done, self._doing = done, doing
        share = done / self._of if self._of else 0.0
        if not self.is_terminal and share - self._told >= SHARE and share < 1:
            self._told = share - share % SHARE
            self._show()

    def tick(self) -> None:
        """Time has passed: a terminal shows that something is alive."""
        if self.is_terminal:
            self._show()

    def finish(self) -> None:
        if self.is_terminal:
            self._finish_line()
        self.out.write(f"Set up after {self._elapsed()}.\n")
        self.out.flush()

    def end(self) -> None:
        """Leave the terminal's line as it is."""
        if self.is_terminal and self.step:
            self.out.write("\n")
            self.out.flush()

    def _finish_line(self) -> None:
        self._done, self._doing = self._of, ""
        self._show()
        self.end()

    def _show(self) -> None:
        line = f"Set-up {self.step} of {STEPS}: {self._what}"
        if self._of and (self._done or self.is_terminal):
            line += f", {self._done} of {self._of}"
        elif self._of:
            line += f", {self._of} of them"
        if self._doing and self.is_terminal:
            line += f" ({self._doing})"
        line += f", {self._elapsed()}"
        if self.is_terminal:
            self.out.write(f"\r{line[: self.width - 1]}\x1b[K")
        else:
            self.out.write(f"{line}\n")
        self.out.flush()

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(self.now() - self._started), 60)
        return f"{minutes}:{seconds:02}"


if __name__ == "__main__":
    sys.exit(main())
