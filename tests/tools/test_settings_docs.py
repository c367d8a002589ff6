"""The page about settings, and what it is made of."""

from __future__ import annotations

import re

import pytest

from orbitmq.cli.settings import all_settings, comments_of, describe
from tools import settings_docs


def test_the_page_is_current():
    assert settings_docs.PAGE.read_text() == settings_docs.page(), (
        "run python -m tools.settings_docs"
    )
    assert settings_docs.main(["--check"]) == 0


def test_every_setting_is_on_the_page_once():
    page = settings_docs.page()
    found: list[str] = []
    group = ""
    for line in page.splitlines():
        if heading := re.fullmatch(r"##.* \(`(\w+)`\)|### `([\w.]+)`", line):
            group = heading[1] or heading[2]
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.append(f"{group}.{row[1]}")

    assert sorted(found) == sorted(all_settings())


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda each: each.path)
def test_every_setting_says_what_it_means(setting):
    described = describe(setting)

    assert described.meaning
    assert described.allowed
    # Numbers with a fraction are durations or shares; there is nothing else.
    assert described.unit or "a number" not in described.allowed


class _Commented:
    #: What stands above
    #: may have several lines.
    first: int = 1
    second: int = 2  #: what stands beside
    third: int = 3
    #: not followed by a field

    fourth: int = 4  #: with a reason  # not shown


def test_comments_are_taken_from_above_and_beside():
    assert comments_of(_Commented) == {
        "first": "What stands above may have several lines.",
        "second": "What stands beside",
        "fourth": "With a reason",
    }


def test_a_class_without_a_source_has_no_comments():
    assert comments_of(type("Made", (), {})) == {}


def test_a_page_that_is_not_current_is_told_and_mended(tmp_path_factory, monkeypatch):
    page = tmp_path_factory.mktemp("docs") / "settings.md"
    page.write_text("old")
    monkeypatch.setattr(settings_docs, "PAGE", page)

    before = settings_docs.main(["--check"])
    written = settings_docs.main([])
    after = settings_docs.main(["--check"])

    assert (before, written, after) == (1, 0, 0)
    assert page.read_text().startswith("# Settings\n")
