"""The Helm chart as the objects that it makes.

Helm is no Python package and may be missing, so what it made is kept beside the tests, with a
digest of the chart that it was made from. Whoever changes the chart makes it anew:

    python -m tests.support.charts
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its types are a package of their own

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "orbitmq"
KEPT = ROOT / "tests" / "data" / "helm"
VARIANTS = ("everything", "smallest")
COMMAND = "python -m tests.support.charts"
_FIRST_LINE = "# made from a chart with the digest "


def digest() -> str:
    """Of all that the chart consists of."""
    total = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(CHART)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def kept(variant: str) -> tuple[str, list[dict[str, Any]]]:
    """The digest of the chart, and the objects that it made."""
    first, _, text = (KEPT / f"{variant}.yaml").read_text().partition("\n")
    return first.removeprefix(_FIRST_LINE), [each for each in yaml.safe_load_all(text) if each]


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The pods and the containers that objects start."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            pod = each["spec"]["template"]["spec"]
            for container in pod["containers"]:
                yield pod, container


def render(helm: str, variant: str) -> str:
    """What Helm makes of the chart with the values for a variant."""
    values = CHART / "ci" / f"{variant}-values.yaml"
    done = subprocess.run(
        [helm, "template", "demo", CHART, "--kube-version", "1.31", "--values", values],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def main() -> None:
    helm = shutil.which("helm")
    if helm is None:
        raise SystemExit("helm is not on the PATH")
    KEPT.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        text = f"{_FIRST_LINE}{digest()}\n{render(helm, variant)}"
        (KEPT / f"{variant}.yaml").write_text(text)


if __name__ == "__main__":
    main()
