"""Numbers and times in words, and texts of others on a terminal."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.cli.command import queue_of, seconds, time_of
from orbitmq.cli.main import Misused
from orbitmq.cli.output import Columns, count, harmless, rate, size
from orbitmq.cli.settings import (
    JsonLines,
    LogFormat,
    LogLevel,
    LogSettings,
    TextLines,
    set_up_logging,
)
from orbitmq.console.words import duration, several, share


@pytest.mark.parametrize(
    ("given_seconds", "words"),
    [
        (None, "-"),
        (0, "0 s"),
        (-3, "0 s"),
        (0.0004, "1 ms"),
        (0.35, "350 ms"),
        (4.21, "4.2 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86_400 * 3 + 3600 * 4 + 59, "3 d 4 h"),
        (float("inf"), "for ever"),
    ],
)
def test_durations_are_told_in_the_two_largest_units(given_seconds, words):
    assert duration(given_seconds) == words


def test_numbers_sizes_and_shares_are_readable():
    assert (count(1234567), count(None)) == ("1,234,567", "-")
    assert (rate(1234.56), rate(None)) == ("1,234.6", "-")
    assert (share(0.853), share(None)) == ("85 %", "-")
    assert [size(each) for each in (12, 1536, 5 * 2**30, None)] == [
        *("12 B", "1.5 KiB", "5.0 GiB", "-")
    ]
    assert (several(1, "queue"), several(2, "queue")) == ("1 queue", "2 queues")


@given(st.text())
def test_no_text_of_others_can_move_the_cursor(text):
    assert harmless(text).isprintable()
    assert harmless(text, keep_lines=True).replace("\n", "").replace("\t", "").isprintable()


def test_times_are_given_as_dates_or_ages():
    now = 1_700_000_000.0

    assert time_of(None, now, "--since") is None
    assert time_of("now", now, "--since") == now
    assert time_of("90s", now, "--since") == now - 90
    assert time_of("1.5h", now, "--since") == now - 5400
    assert time_of("7d", now, "--since") == now - 604_800
    assert time_of("2023-11-14T22:13:20+00:00", now, "--since") == now


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("250ms", 0.25), ("15m", 900), ("2w", 1209600)]
)
def test_durations_are_given_with_a_unit(text, value):
    assert seconds(text, "--delay") == value


@pytest.mark.parametrize("text", ["", "x", "-1", "5 parsecs", "nan", "inf"])
def test_what_is_no_duration_is_refused_with_the_name_of_the_flag(text):
    with pytest.raises(Misused, match="--delay must be a duration"):
        seconds(text, "--delay")


def test_queues_are_named_by_broker_and_number():
    queue = queue_of("orders", "broker:a:3")

    assert (queue.broker, queue.id) == ("broker:a", 3)
    for text in ("broker-a", ":3", "broker-a:", "broker-a:x"):
        with pytest.raises(Misused, match="broker-a:3"):
            queue_of("orders", text)


def test_wide_characters_keep_the_columns_straight_and_bad_cells_are_red(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    columns = (
        Columns[tuple[str, int]]()
        .text("topic", lambda row: row[0])
        .number("lag", lambda row: str(row[1]), bad=lambda row: row[1] > 5)
    )
    rows = [("订单", 7), ("orders", 1)]

    plain = columns.drawn(rows, is_terminal=False).splitlines()
    coloured = columns.drawn(rows, is_terminal=True, width=80).splitlines()

    assert plain == ["topic   lag", "订单      7", "orders    1"]
    assert coloured[0] == "\x1b[1mtopic   lag\x1b[0m"
    assert coloured[1:] == ["订单      \x1b[31m7\x1b[0m", "orders    1"]


# Log lines of the command, as text and as JSON.


@pytest.fixture
def _restored():
    """Leaves the loggers as they were."""
    loggers = [logging.getLogger(name) for name in ("orbitmq", "asyncio")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def record(message: str = "queue gained", **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("orbitmq.x", logging.INFO, "x.py", 1, message, None, None)
    made.created, made.msecs = 0.25, 250.0
    made.__dict__.update(fields)
    return made


def test_an_event_cannot_forge_a_second_line_or_speak_to_the_terminal():
    line = TextLines().format(record("group x\nERROR all is lost\r\x1b[2J\u2028, wörtlich"))

    assert line.isprintable()
    assert line.endswith(r"group x\nERROR all is lost\r\x1b[2J\u2028, wörtlich")


def test_an_error_cannot_forge_a_line_behind_its_own():
    made = record()
    made.exc_info = (ValueError, ValueError("x\n2026-01-31 ERROR all is lost\x1b[2J"), None)

    first, *others = TextLines().format(made).split("\n")

    assert first.endswith("queue gained")
    assert others == ["  ValueError: x", r"  2026-01-31 ERROR all is lost\x1b[2J"]


def test_a_json_line_holds_the_event_and_its_fields():
    line = json.loads(JsonLines().format(record(group="billing", level="mine", offset=7)))

    assert line == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "orbitmq.x",
        "event": "queue gained",
        "group": "billing",
        "offset": 7,
    }


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
def test_an_exception_goes_along(lines):
    made = record()
    made.exc_info = (ValueError, ValueError("broken"), None)

    assert "ValueError: broken" in lines.format(made)


@pytest.mark.usefixtures("_restored")
def test_only_our_loggers_are_set_up(capsys):
    root = logging.getLogger()
    before = (list(root.handlers), root.level)

    set_up_logging(LogSettings(level=LogLevel.INFO, format=LogFormat.JSON))
    logging.getLogger("orbitmq.broker").info("broker started", extra={"broker": "broker-a"})
    logging.getLogger("orbitmq.broker").debug("not said")

    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["broker"] == "broker-a"
    assert (list(root.handlers), root.level) == before
