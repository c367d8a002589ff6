"""The page about settings, and what it is made of."""

from __future__ import annotations

import re

import pytest

from orbitmq.cli.settings import all_settings, describe
from tools import settings_docs


def test_the_page_is_current():
    assert settings_docs.PAGE.read_text() == settings_docs.page(), (
        "run python -m tools.settings_docs"
    )
    assert settings_docs.main(["--check"]) == 0


def test_every_setting_is_on_the_page_once():
    # The alerts are in a file of their own.
    page, _, alerts = settings_docs.page().partition("\n## Alerts")
    found: list[str] = []
    group = ""
    for line in page.splitlines():
        if heading := re.fullmatch(r"##.* \(`(\w+)`\)|### `([\w.]+)`", line):
            group = heading[1] or heading[2]
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.append(f"{group}.{row[1]}")

    assert sorted(found) == sorted(all_settings())
    assert {"url", "for", "subject", "console"} <= set(re.findall(r"\n\| `(\w+)` \|", alerts))


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda each: each.path)
def test_every_setting_says_what_it_means(setting):
    described = describe(setting)

    assert described.meaning
    assert described.allowed
    # Numbers with a fraction are durations or shares; there is nothing else.
    assert described.unit or "a number" not in described.allowed
