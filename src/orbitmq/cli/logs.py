"""Logging as the command sets it up: on our loggers, to standard error, never on the root."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from orbitmq.cli.schema import LogFormat, LogLevel, LogSettings

#: Whose lines are written: ours, and what the event loop has to say about us.
_LOGGERS = ("orbitmq", "asyncio")

#: What every record has; the rest are the fields of the event.
_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def set_up_logging(settings: LogSettings, default: LogLevel = LogLevel.INFO) -> None:
    """Write what is logged from now on."""
    level = (settings.level or default).name
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.format is LogFormat.JSON else TextLines())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO broker started broker=broker-a`, in the time of the place."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        event = _on_one_line(record.getMessage())
        line = f"{when}.{int(record.msecs):03} {record.levelname:<7} {event}{fields}"
        return f"{line}\n{self._trouble(record)}" if record.exc_info else line

    def _trouble(self, record: logging.LogRecord) -> str:
        """The traceback, moved in: whatever an error says does not look like a line of its own."""
        text = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join(f"  {_on_one_line(line)}" for line in text.split("\n"))


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        # A field never hides one of the four.
        line = _fields(record) | line
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _USUAL}


def _on_one_line(text: str) -> str:
    """A text whose line breaks and escape sequences do nothing: part of it may be anybody's."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _word(value: object) -> str:
    text = str(value)
    return (
        json.dumps(text, ensure_ascii=False)
        if not text or not text.isprintable() or " " in text
        else text
    )
