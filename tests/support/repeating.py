"""Tells with every failure of a test that depends on a seed how to have it again."""

from __future__ import annotations

import pytest


def tell_how_to_repeat(request: pytest.FixtureRequest, **variables: object) -> None:
    """Have a failure of this test shown with the command that repeats it."""
    name = getattr(request.node, "originalname", None) or request.node.name
    file = request.node.nodeid.partition("::")[0]
    words = " ".join(f"{variable}={value}" for variable, value in variables.items())
    command = f"{words} python -m pytest {file} -k {name}"
    request.node.add_report_section("setup", "to repeat it", command)
