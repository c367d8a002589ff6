"""The console and the command line call the same things by the same words."""

from __future__ import annotations

import re
from pathlib import Path

import orbitmq.cli
import orbitmq.console

CLI = Path(orbitmq.cli.__file__).parent
CONSOLE = Path(orbitmq.console.__file__).parent

#: What stands above the columns of both.
SHARED = {"lag", "oldest", "empty in", "members", "group", "topic", "queue", "owner", "state"}
#: Other words for what has one.
BANNED = {"waiting", "behind", "backlog", "dlq", "dlqs", "replay", "query", "consumer group"}


def command_line_titles() -> set[str]:
    """The titles of columns and facts."""
    texts = (path.read_text() for path in CLI.glob("*.py"))
    return {
        found.lower()
        for text in texts
        for found in re.findall(r"\.(?:text|number)\(\s*\"([^\"]+)\"", text)
    }


def console_titles() -> set[str]:
    """The titles of columns, tiles, cards and buttons."""
    texts = [path.read_text() for path in (CONSOLE / "static").rglob("*.js")]
    patterns = (
        r"\[\"([A-Z][^\"]*)\", \(",
        r"label: \"([^\"]+)\"",
        r"(?:tile|card|labelled)\(\"([^\"]+)\"",
        r"\}, \"([A-Z][^\"]*)\"\)",
    )
    return {
        found.lower() for text in texts for each in patterns for found in re.findall(each, text)
    }


def test_both_use_the_words_of_the_list_and_no_others_for_the_same():
    ours, shown = command_line_titles(), console_titles()

    # A stream of a run is called a query where a run has several.
    assert not (ours - {"query"}) & BANNED
    assert not shown & BANNED
    assert ours >= SHARED
    assert shown >= SHARED - {"state"}
    assert {"dead letters", "failed", "resend", "spark pipelines"} <= shown
