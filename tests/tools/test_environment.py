"""Set-up says what it does and how far it is, on a terminal and without one."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.environment import Display, SetupFailed, main, set_up

PACKAGES = ("alpha", "beta_more", "gamma", "delta")
LOCK = "# exact versions\n" + "".join(
    f"{name.replace('_', '-')}==1.0 \\\n    --hash=sha256:00\n" for name in PACKAGES
)
#: Says what pip says, and leaves behind what pip leaves behind.
PIP = """#!{python}
import pathlib, sys
if "-e" in sys.argv:
    print("Successfully installed orbitmq")
    sys.exit()
names = {names}
print("Requirement already satisfied: somebody-else in elsewhere")
for name in names:
    print(f"Collecting {{name.replace('_', '-')}}==1.0 (from -r lock.txt (line 1))", flush=True)
    print(f"  Downloading {{name}}-1.0-py3-none-any.whl (12 kB)", flush=True)
if {fails}:
    print("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")
    sys.exit(1)
print("Installing collected packages: " + ", ".join(names), flush=True)
site = pathlib.Path(sys.argv[0]).parents[1] / "lib" / "python3.11" / "site-packages"
for name in names:
    (site / f"{{name}}-1.0.dist-info").mkdir(parents=True)
    print("noise", flush=True)
print("Successfully installed " + " ".join(names))
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "lock.txt"
    path.write_text(LOCK)
    return path


def environment(folder: Path, *, fails: bool = False) -> Path:
    """One that is there already, with a pip that fetches nothing."""
    pip = folder / ".venv" / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP.format(python=sys.executable, names=PACKAGES, fails=fails))
    pip.chmod(0o755)
    return folder / ".venv"


def test_without_a_terminal_a_line_tells_of_every_step_and_quarter(
    tmp_path: Path, lock: Path
) -> None:
    out = io.StringIO()

    set_up(environment(tmp_path), lock, Display(out, is_terminal=False, now=lambda: 61.0))

    said = re.sub(r" in [^,]+", " in FOLDER", out.getvalue()).splitlines()
    fetched = [line for line in said if line.startswith("Set-up 2")]
    assert fetched == [
        "Set-up 2 of 4: fetching packages, 4 of them, 0:00",
        *(f"Set-up 2 of 4: fetching packages, {done} of 4, 0:00" for done in (1, 2, 3)),
    ]
    assert said[0] == "Set-up 1 of 4: a virtual environment in FOLDER, 0:00"
    assert "Set-up 3 of 4: installing packages, 4 of them, 0:00" in said
    assert said[-2:] == ["Set-up 4 of 4: installing OrbitMQ itself, 0:00", "Set up after 0:00."]


def test_a_terminal_has_one_line_a_step_which_is_written_over(tmp_path: Path, lock: Path) -> None:
    out = io.StringIO()

    set_up(environment(tmp_path), lock, Display(out, is_terminal=True, now=lambda: 0.0, width=90))

    lines = out.getvalue().split("\n")
    frames = [frame.removesuffix("\x1b[K") for frame in lines[1].split("\r") if frame]
    assert len(lines) == 6  # four steps, the last words, and nothing
    assert "Set-up 2 of 4: fetching packages, 2 of 4 (beta_more, 12 kB), 0:00" in frames
    assert frames[-1] == "Set-up 2 of 4: fetching packages, 4 of 4, 0:00"
    assert all(len(frame) < 90 for frame in frames)


def test_a_failure_shows_the_last_words_of_pip_and_keeps_all(tmp_path: Path, lock: Path) -> None:
    folder = environment(tmp_path, fails=True)

    with pytest.raises(SetupFailed, match=r"DO NOT MATCH THE HASHES(?s:.*)exit code 1"):
        set_up(folder, lock, Display(io.StringIO(), is_terminal=False))

    assert (folder / "setup.log").read_text().count("Collecting") == len(PACKAGES)
    assert main(["--venv", str(folder), "--lock", str(lock)]) == 1


def test_it_needs_nothing_that_is_not_in_python_itself() -> None:
    """It is run before anything is installed, by the machine's own Python."""
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import runpy; runpy.run_path('tools/environment.py')"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
