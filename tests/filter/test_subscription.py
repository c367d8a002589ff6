"""One way to ask, whichever language a subscription's expression is in."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from orbitmq.errors import InvalidFilter, OrbitError
from orbitmq.filter.tags import MessageFilter, TagFilter, UnknownFilterType, compile_filter
from orbitmq.javahash import java_hash


@pytest.mark.parametrize("expression_type", [None, "", "TAG"])
def test_no_type_means_tags(expression_type):
    assert compile_filter("TagA", expression_type) == TagFilter(
        tags=frozenset({"TagA"}), codes=(java_hash("TagA"),)
    )


def test_a_tag_filter_decides_by_the_code_alone():
    by_tag: MessageFilter = compile_filter("TagA")

    assert not by_tag.needs_properties
    assert by_tag.accepts_code(java_hash("TagA"))
    assert not by_tag.accepts_code(java_hash("TagB"))
    assert by_tag.accepts_properties({})


def test_a_sql_filter_decides_by_the_properties_alone():
    by_sql: MessageFilter = compile_filter("price > 100", "SQL92")

    assert by_sql.needs_properties
    assert by_sql.accepts_code(0)
    assert by_sql.accepts_properties({"price": "101"})
    assert by_sql.accepts_properties(b"price\x01101\x02")
    assert not by_sql.accepts_properties({"price": "100"})
    assert not by_sql.accepts_properties(b"")


def test_apache_is_followed_when_asked_for():
    with pytest.raises(InvalidFilter):
        compile_filter("price > 100 LIKE", "SQL92")

    assert compile_filter("price > 100 LIKE", "SQL92", lenient=True).accepts_properties(
        {"price": "101"}
    )


@pytest.mark.parametrize("expression", [None, ""])
def test_sql_needs_an_expression(expression):
    with pytest.raises(InvalidFilter, match="the expression is empty"):
        compile_filter(expression, "SQL92")


@pytest.mark.parametrize("expression_type", ["sql92", "SQL", "tag", " "])
def test_an_unknown_type_is_refused_and_the_known_ones_are_named(expression_type):
    with pytest.raises(UnknownFilterType, match="use TAG or SQL92"):
        compile_filter("a > 1", expression_type)


def test_tags_work_without_the_optional_packages_and_sql_names_what_to_install():
    script = (
        "import sys\n"
        "sys.modules.update(lark=None, numpy=None)\n"
        "from orbitmq.filter.tags import UnknownFilterType, compile_filter\n"
        "assert compile_filter('TagA || TagB').accepts_tag('TagB')\n"
        "try:\n"
        "    compile_filter('a > 1', 'SQL92')\n"
        "except UnknownFilterType as told:\n"
        "    print(told)\n"
    )

    told = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )

    assert re.search(r"pip install '.*\[broker\]'", told.stdout)
    assert issubclass(UnknownFilterType, OrbitError)
