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
#: A Python that says what pip says, and leaves behind what pip leaves behind.
PYTHON = """#!{python}
import pathlib, sys
assert sys.argv[1:3] == ["-m", "pip"]
if "--version" in sys.argv:
    sys.exit()
if "-e" in sys.argv:
    print("Successfully installed orbitmq")
    sys.exit()
names = {names}
print("Requirement already satisfied: somebody-else in elsewhere", flush=True)
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
def lock(tmp_path):
    path = tmp_path / "lock.txt"
    path.write_text(LOCK)
    return path


def environment(folder: Path, *, fails: bool = False) -> Path:
    """One that is there already, with a pip that fetches nothing."""
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    (folder / ".venv" / "pyvenv.cfg").write_text("home = elsewhere\n")
    python = commands / "python"
    python.write_text(PYTHON.format(python=sys.executable, names=PACKAGES, fails=fails))
    python.chmod(0o755)
    (commands / "pip").write_text(f"#!{python}\nimport pip\n")
    return folder / ".venv"


def remade(
    folder: Path, lock: Path, monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None
) -> bool:
    """Whether set-up makes the environment anew."""
    made: list[Path] = []

    def create(place: Path, **_: object) -> None:
        if error is not None:
            raise error
        assert not place.exists()
        made.append(environment(place.parent))

    monkeypatch.setattr("venv.create", create)
    set_up(folder, lock, Display(io.StringIO(), is_terminal=False))
    return bool(made)


def test_without_a_terminal_a_line_tells_of_every_step_and_quarter(tmp_path, lock):
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


def test_a_failure_shows_the_last_words_of_pip_and_keeps_all(tmp_path, lock):
    folder = environment(tmp_path, fails=True)

    with pytest.raises(SetupFailed, match=r"DO NOT MATCH THE HASHES(?s:.*)exit code 1"):
        set_up(folder, lock, Display(io.StringIO(), is_terminal=False))

    assert (folder / "setup.log").read_text().count("Collecting") == len(PACKAGES)
    assert main(["--venv", str(folder), "--lock", str(lock)]) == 1


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path, lock, monkeypatch):
    folder = environment(tmp_path)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/no/python3.10")  # as after an upgrade

    assert remade(folder, lock, monkeypatch)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path, lock, monkeypatch):
    photo = tmp_path / "home" / "bin" / "photo.png"
    photo.parent.mkdir(parents=True)
    photo.write_bytes(b"dear")

    with pytest.raises(SetupFailed, match="home is there and is no virtual environment"):
        remade(tmp_path / "home", lock, monkeypatch)
    assert photo.read_bytes() == b"dear"


def test_the_environment_of_a_checkout_that_was_moved_is_made_anew(tmp_path, lock, monkeypatch):
    # Its commands (mypy, pytest) call a Python at the old place, also where that one still works.
    environment(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")

    assert remade(tmp_path / "after" / ".venv", lock, monkeypatch)


def test_it_needs_nothing_that_is_not_in_python_itself():
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
