"""The schemas of Compose and of Kubernetes, and what they find in documents.

Both come with packages: the Compose specification's own with check-jsonschema, and Kubernetes'
published API with kubernetes-validate. Fields that a kind does not have are refused, as the API
server does for `kubectl apply`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # its types are a package of their own
import yaml  # type: ignore[import-untyped]  # its types are a package of their own
from referencing import Registry, Resource

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
