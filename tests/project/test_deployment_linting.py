"""The image, the compose file and the chart are linted.

On every machine, the compose file and all that Helm made of the chart are held against the schemas
of the Compose specification and of Kubernetes, and the Dockerfile against rules. The linters of the
tools themselves (hadolint, `docker compose config`, `helm lint`) run where they are; where one is
not, the reason of the skip says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from tests.support import deployment

DOCKER = Path(__file__).parents[2] / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
COMPOSE_FILE = DOCKER / "compose.yaml"
PATIENCE = 30.0


def test_the_compose_file_is_one_by_the_specification_of_compose():
    (document,) = deployment.load_strictly(COMPOSE_FILE.read_text())

    assert deployment.wrong_in_compose(document) == []

    document["services"]["broker"]["helthcheck"] = document["services"]["broker"]["healthcheck"]
    document["services"]["console"]["depends_on"]["broker"]["condition"] = "healthy"
    document["volume"] = {}
    said = "\n".join(deployment.wrong_in_compose(document))
    assert "helthcheck" in said
    assert "services.console.depends_on" in said
    assert "'volume' does not match" in said


@pytest.mark.parametrize("version", deployment.KUBERNETES)
@pytest.mark.parametrize("variant", deployment.VARIANTS)
def test_kubernetes_takes_every_object_of_the_chart(variant, version):
    objects = deployment.kept(variant)[1]
    assert len(objects) >= 4

    for each in objects:
        assert deployment.wrong_in_kubernetes(each, version) == [], each["metadata"]["name"]


def test_the_versions_that_are_looked_at_begin_with_the_oldest_that_the_chart_allows():
    (chart,) = deployment.load_strictly((deployment.CHART / "Chart.yaml").read_text())

    assert chart["kubeVersion"] == f">={deployment.KUBERNETES[0]}.0-0"
    assert (chart["apiVersion"], chart["type"]) == ("v2", "application")
    assert chart["name"] == deployment.CHART.name
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])


def test_no_key_stands_twice_in_a_file():
    files = [
        COMPOSE_FILE,
        *(deployment.CHART / "ci").glob("*.yaml"),
        *(deployment.CHART / name for name in ("Chart.yaml", "values.yaml")),
        *deployment.KEPT.glob("*.yaml"),
    ]
    assert len(files) >= 7

    for path in files:
        assert deployment.load_strictly(path.read_text()), path
    with pytest.raises(yaml.YAMLError, match="found port twice"):
        deployment.load_strictly("broker:\n  port: 1\n  port: 2\n")


def test_hadolint_finds_nothing_in_the_dockerfile():
    hadolint = _program("hadolint")

    _lint([hadolint, "--no-color", "--failure-threshold", "style", str(DOCKERFILE)])


def test_compose_itself_takes_the_compose_file():
    docker = _program("docker")
    if _ended([docker, "compose", "version"]).returncode != 0:
        pytest.skip("docker has no compose here; the file was held against the schema alone")

    _lint(
        [docker, "compose", "--file", str(COMPOSE_FILE), "config", "--quiet"],
        ORBITMQ_CONSOLE_PASSWORD="chosen-by-a-test",  # noqa: S106  # made up here
    )


@pytest.mark.parametrize("variant", deployment.VARIANTS)
def test_helm_finds_nothing_in_the_chart_and_makes_what_is_kept(variant):
    helm = _program("helm")
    values = deployment.CHART / "ci" / f"{variant}-values.yaml"

    _lint([helm, "lint", "--strict", "--values", str(values), str(deployment.CHART)])
    made = [each for each in deployment.load_strictly(deployment.render(helm, variant)) if each]
    assert made == deployment.kept(variant)[1]


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not on this machine; rules and schemas were checked without it")
    return found


def _lint(words: list[str], **env: str) -> None:
    done = _ended(words, **env)
    assert done.returncode == 0, done.stdout + done.stderr


def _ended(words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
