"""The start of threads in the hands of a test: refused for a while, or cut short."""

from __future__ import annotations

import threading

import pytest


def refuse_threads(
    monkeypatch: pytest.MonkeyPatch, prefix: str, *, times: int, after: int = 0
) -> list[str]:
    """Have threads of this name not start, so often, once `after` have; their names come in time.

    As the system does it: `RuntimeError`, and no thread.
    """
    start = threading.Thread.start
    refused: list[str] = []
    started: list[str] = []

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            if len(started) >= after and len(refused) < times:
                refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    return refused


def threads_of(prefix: str) -> list[str]:
    """The names of those that live."""
    return [each.name for each in threading.enumerate() if each.name.startswith(prefix)]
