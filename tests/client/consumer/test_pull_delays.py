"""The lines in the log about pulls that come later."""

from __future__ import annotations

import logging

import pytest

from orbitmq.client.consumer.pull import PullDelay, log_delay
from orbitmq.client.routes import Queue


@pytest.mark.parametrize(
    ("reason", "level"),
    [
        (PullDelay.CACHED_MESSAGES, logging.INFO),
        (PullDelay.CACHED_BYTES, logging.INFO),
        (PullDelay.PAUSED, logging.INFO),
        (PullDelay.OFFSET_SPAN, logging.WARNING),
        (PullDelay.NO_ANSWER, logging.WARNING),
        (PullDelay.REFUSED, logging.WARNING),
    ],
)
def test_only_what_somebody_should_look_at_is_a_warning(
    reason: PullDelay, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    log_delay("billing", Queue("orders", "broker-a", 3), reason, 1001, "1024 of 1000")

    (line,) = caplog.records
    assert line.levelno == level
    assert line.getMessage() == (
        f"pull of orders@broker-a:3 for group billing put off: {reason.value} (1024 of 1000), "
        "1001 so far"
    )
