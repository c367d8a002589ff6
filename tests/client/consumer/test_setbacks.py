"""The lines in the log about pulls that come later."""

from __future__ import annotations

import logging

import pytest

from orbitmq.client.consumer.pull import Setback, tell
from orbitmq.client.routes import Queue


@pytest.mark.parametrize(
    ("setback", "level"),
    [
        (Setback.CACHED_MESSAGES, logging.INFO),
        (Setback.CACHED_BYTES, logging.INFO),
        (Setback.PAUSED, logging.INFO),
        (Setback.OFFSET_SPAN, logging.WARNING),
        (Setback.NO_ANSWER, logging.WARNING),
        (Setback.REFUSED, logging.WARNING),
    ],
)
def test_only_what_somebody_should_look_at_is_a_warning(
    setback: Setback, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    tell("billing", Queue("orders", "broker-a", 3), setback, 1001, "1024 of 1000")

    (line,) = caplog.records
    assert line.levelno == level
    assert line.getMessage() == (
        f"pull of orders@broker-a:3 for group billing put off: {setback.value} (1024 of 1000), "
        "1001 so far"
    )
