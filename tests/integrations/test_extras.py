"""What a base install says when an integration is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys

sys.modules[{library!r}] = None
import orbitmq.errors
try:
    import orbitmq.integrations.{module}
except orbitmq.errors.MissingExtra as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("kombu", "kombu", "celery"), ("faststream", "faststream", "faststream")],
)
def test_a_missing_library_is_named_with_its_extra(module, library, extra):
    program = _WITHOUT.format(module=module, library=library)

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert f"[{extra}]'" in done.stdout, done.stderr
    assert library in done.stdout


def test_the_library_imports_none_of_them():
    program = (
        "import sys, orbitmq, orbitmq.errors; orbitmq.Producer, orbitmq.Consumer; "
        "print(sorted({'kombu', 'celery', 'faststream', 'pydantic'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"
