"""Log lines of the command, as text and as JSON."""

from __future__ import annotations

import json
import logging

import pytest

from orbitmq.cli.settings import (
    JsonLines,
    LogFormat,
    LogLevel,
    LogSettings,
    TextLines,
    set_up_logging,
)


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


def test_a_text_line_holds_the_event_and_its_fields():
    line = TextLines().format(record(group="billing", queue="a b"))

    assert line.endswith('.250 INFO    queue gained group=billing queue="a b"')


def test_a_field_cannot_forge_a_second_line():
    assert "\n" not in TextLines().format(record(topic="x\nERROR everything is lost"))


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
