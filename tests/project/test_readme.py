"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def examples() -> list[str]:
    """The Python blocks, up to the one that the README calls a design."""
    present = README.partition("they are the design, not yet the state")[0]
    return re.findall(r"```python\n(.*?)```", present, re.DOTALL)


@pytest.mark.parametrize("example", examples(), ids=lambda text: text.split("\n", 1)[0][:40])
def test_an_example_prints_what_its_comments_say(example: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert ran.returncode == 0, ran.stderr
    expected = re.findall(r"^\s*print.*# (.+)$", example, re.MULTILINE)
    assert expected
    assert ran.stdout.splitlines() == expected


def test_the_first_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()

    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
