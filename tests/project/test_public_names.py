"""What `import orbitmq` offers, and what it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import orbitmq
from orbitmq.errors import OrbitError

_SOURCE = Path(inspect.getfile(orbitmq)).read_text()
_ERRORS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


def _in_a_new_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", orbitmq.__all__)
def test_every_public_name_is_there_and_knows_itself(name: str) -> None:
    found = getattr(orbitmq, name)

    if inspect.isclass(found):
        assert found.__name__ == name
        assert (found.__doc__ or "").strip()
    assert name in dir(orbitmq)


def test_public_names_stand_once() -> None:
    assert len(set(orbitmq.__all__)) == len(orbitmq.__all__)


def test_type_checkers_are_told_the_same_homes_as_the_interpreter() -> None:
    (block,) = [node for node in ast.parse(_SOURCE).body if isinstance(node, ast.If)]
    told = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert told == orbitmq._HOMES
    assert {*told, "OrbitError", "SettingError", "__version__"} == set(orbitmq.__all__)


def _documented_errors() -> list[type[OrbitError]]:
    """The errors of the reference page that users of the client meet: all but those of Spark."""
    found: list[type[OrbitError]] = []
    for name in re.findall(r"^::: (orbitmq\S+)$", _ERRORS_PAGE.read_text(), re.MULTILINE):
        if name.startswith("orbitmq.spark."):
            continue
        home, _, last = name.rpartition(".")
        if last[0].isupper():
            found.append(getattr(importlib.import_module(home), last))
            continue
        module = importlib.import_module(name)
        found += [
            each
            for each in vars(module).values()
            if inspect.isclass(each) and issubclass(each, OrbitError) and each.__module__ == name
        ]
    return found


def test_every_error_of_the_reference_page_comes_from_the_package_itself() -> None:
    documented = {each.__name__: each for each in _documented_errors()}

    assert len(documented) > 30
    assert {"TopicExists", "ResetFailed", "OffsetOutOfRange", "GroupRefused"} <= documented.keys()
    assert documented.keys() - set(orbitmq.__all__) == set()
    for name, kind in documented.items():
        assert getattr(orbitmq, name) is kind


def test_every_public_error_is_on_the_reference_page() -> None:
    public = {
        name
        for name in orbitmq.__all__
        if inspect.isclass(found := getattr(orbitmq, name)) and issubclass(found, OrbitError)
    }

    assert public - {each.__name__ for each in _documented_errors()} == set()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(orbitmq, "Nothing")  # noqa: B009  # mypy would refuse the other way


def test_the_import_alone_loads_no_client_no_library_and_starts_nothing() -> None:
    program = (
        "import sys, threading; import orbitmq;"
        "print(sorted(name for name in sys.modules if name.startswith('orbitmq')));"
        "print({'msgspec', 'asyncio', 'ssl', 'numpy', 'pyarrow', 'lark'} & set(sys.modules));"
        "print(threading.active_count())"
    )

    assert _in_a_new_process(program).splitlines() == [
        "['orbitmq', 'orbitmq.errors']",
        "set()",
        "1",
    ]


def test_all_public_names_need_the_base_install_only() -> None:
    program = (
        "import sys;"
        "sys.modules.update(dict.fromkeys(['numpy', 'pyarrow', 'lark', 'pyspark', 'uvloop']));"
        "from orbitmq import *; print(Message.__name__, Producer.__name__, PullConsumer.__name__);"
        "print([n for n in sys.modules if n.startswith(('orbitmq.broker', 'orbitmq.store'))])"
    )

    assert _in_a_new_process(program).splitlines() == ["Message Producer PullConsumer", "[]"]
