"""What `import orbitmq` offers, and what it costs."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import orbitmq
from orbitmq import errors
from orbitmq.errors import OrbitError

_SOURCE = Path(inspect.getfile(orbitmq)).read_text()
_PAGE = (Path(__file__).parents[2] / "docs" / "deprecations.md").read_text()


def _in_a_new_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", orbitmq.__all__)
def test_every_public_name_is_there_and_knows_itself(name):
    found = getattr(orbitmq, name)

    if inspect.isclass(found):
        assert found.__name__ == name
        assert (found.__doc__ or "").strip()
    assert name in dir(orbitmq)


def test_public_names_stand_once():
    assert len(set(orbitmq.__all__)) == len(orbitmq.__all__)


def test_type_checkers_see_the_same_modules_as_the_interpreter():
    (block,) = [node for node in ast.parse(_SOURCE).body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }

    assert seen == {name: getattr(orbitmq, name).__module__ for name in seen}
    assert {*seen, "errors", "__version__"} == set(orbitmq.__all__)


def test_errors_stand_in_their_own_module():
    public = [each for each in vars(errors).values() if inspect.isclass(each)]

    assert not {each.__name__ for each in public} & set(orbitmq.__all__)
    assert 15 <= sum(issubclass(each, OrbitError) for each in public) <= 24


def test_each_former_name_still_works_and_names_its_replacement():
    rows = re.findall(r"^\| `orbitmq\.(\w+)` \| `orbitmq\.errors\.(\w+)` \|$", _PAGE, re.MULTILINE)

    assert len(rows) == 49
    for former, now in rows:
        with pytest.warns(DeprecationWarning, match=rf"{former} .* orbitmq\.errors\.{now}$"):
            found = getattr(orbitmq, former)
        assert issubclass(found, getattr(errors, now))


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(orbitmq, "Nothing")  # noqa: B009  # mypy would refuse the other way


def test_the_import_alone_loads_no_client_no_library_and_starts_nothing():
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


def test_all_public_names_need_the_base_install_only():
    program = (
        "import sys;"
        "sys.modules.update(dict.fromkeys(['numpy', 'pyarrow', 'lark', 'pyspark', 'uvloop']));"
        "from orbitmq import *; print(Message.__name__, Producer.__name__, PullConsumer.__name__);"
        "print([n for n in sys.modules if n.startswith(('orbitmq.broker', 'orbitmq.store'))])"
    )

    assert _in_a_new_process(program).splitlines() == ["Message Producer PullConsumer", "[]"]
