"""What the README and the guides show runs as it stands there, against a cluster at the address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orbitmq.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = (
    "README.md",
    "docs/producing.md",
    "docs/consuming.md",
    "docs/administering.md",
    "docs/testing.md",
)
#: Where the pages say that the cluster is.
SHOWN_ADDRESS = "localhost:9876"


def examples() -> list[Any]:
    """The Python blocks of the pages."""
    return [
        pytest.param(example, id=f"{page}-{number}")
        for page in PAGES
        for number, example in enumerate(
            re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        )
    ]


@pytest.mark.parametrize("example", examples())
def test_an_example_prints_what_its_comments_say(
    example: str, tmp_path: Path, orbit_cluster: EmbeddedCluster
) -> None:
    program = example.replace(SHOWN_ADDRESS, orbit_cluster.name_server)

    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert ran.returncode == 0, ran.stderr
    expected = re.findall(r"^\s*print.*?  # (.+)$", example, re.MULTILINE)
    assert expected
    assert ran.stdout.splitlines() == expected


def test_the_first_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()

    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
