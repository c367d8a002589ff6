"""Deployment files as values: the Helm chart, Dockerfiles, schemas of Compose and Kubernetes.

Helm may be missing, so what it made of the chart is kept beside the tests with a digest of the
chart. After a change of the chart, make it again:

    python -m tests.support.deployment

The schemas come with packages: the Compose specification with check-jsonschema, and Kubernetes'
published API with kubernetes-validate. Fields that a kind does not have are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # its types are a package of their own
import yaml  # type: ignore[import-untyped]  # its types are a package of their own
from referencing import Registry, Resource

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "orbitmq"
KEPT = ROOT / "tests" / "data" / "helm"
VARIANTS = ("everything", "smallest")
COMMAND = "python -m tests.support.deployment"
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


@dataclass(frozen=True, slots=True)
class Stage:
    """One `FROM`, and what follows it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [words for name, words in self.instructions if name == instruction]


def stages_of(path: Path) -> dict[str, Stage]:
    """The stages of a file by their names, in their order."""
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for instruction, words in _instructions(path.read_text()):
        if instruction == "FROM":
            base, _, name = words.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is not None:
            current.instructions.append((instruction, words))
    return found


def with_bases(found: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """What an image is made by: the instructions of a stage after those of the stages below it."""
    stage = found[name]
    below = with_bases(found, stage.base) if stage.base in found else []
    return [*below, *stage.instructions]


def environment(instructions: list[tuple[str, str]]) -> dict[str, str]:
    values: dict[str, str] = {}
    for instruction, words in instructions:
        if instruction == "ENV":
            values.update(dict(re.findall(r"(\w+)=(\S+)", words)))
    return values


def last_words(instructions: list[tuple[str, str]], wanted: str) -> str:
    return [words for instruction, words in instructions if instruction == wanted][-1]


def exec_form(words: str) -> list[str]:
    """A command in the form that needs no shell."""
    return [str(word) for word in json.loads(words[words.index("[") :])]


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for statement in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if statement.strip():
            instruction, _, words = statement.strip().partition(" ")
            yield instruction.upper(), words.strip()


#: The oldest that Chart.yaml allows, the one that the kept objects are rendered for, a new one.
KUBERNETES = ("1.25", "1.31", "1.37")
_COMPOSE = "builtin_schemas/vendor/compose-spec.json"


def wrong_in_compose(document: object) -> list[str]:
    """Where a compose file, before variables are put in, is not as the specification says."""
    schema = json.loads((resources.files("check_jsonschema") / _COMPOSE).read_text())
    return _wrong(jsonschema.Draft202012Validator(schema), document)


def wrong_in_kubernetes(each: dict[str, Any], version: str) -> list[str]:
    """Where an object is not one that Kubernetes of a version takes."""
    group, _, number = each["apiVersion"].rpartition("/")
    names = (each["kind"].lower(), group.partition(".")[0], number)
    file = _kubernetes(version) / f"{'-'.join(filter(None, names))}.json"
    if not file.is_file():
        return [f"Kubernetes {version} has no {each['kind']} of {each['apiVersion']}"]
    schema = json.loads(file.read_text())
    return _wrong(jsonschema.Draft202012Validator(schema, registry=_definitions(version)), each)


def load_strictly(text: str) -> list[Any]:
    """The documents of a YAML file. A key that stands twice is refused; PyYAML takes the last."""
    return list(yaml.load_all(text, Loader=_Strict))


class _Strict(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(
                None, None, f"found {', '.join(sorted(map(str, twice)))} twice", node.start_mark
            )
        return dict(super().construct_mapping(node, deep=deep))


def _wrong(validator: Any, document: object) -> list[str]:
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(document)
    ]


def _kubernetes(version: str) -> Traversable:
    """All kinds of a version, with the fields that they have and no others."""
    return resources.files("kubernetes_validate").joinpath(
        "kubernetes-json-schema", f"v{version}.0-local-strict"
    )


@cache
def _definitions(version: str) -> Registry[Any]:
    """What the kinds consist of, as they refer to it."""
    contents = json.loads((_kubernetes(version) / "_definitions.json").read_text())
    known: Registry[Any] = Registry().with_resource(
        contents["$id"], Resource.from_contents(contents)
    )
    return known


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
