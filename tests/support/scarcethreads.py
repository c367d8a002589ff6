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


def cut_first_start_short(
    monkeypatch: pytest.MonkeyPatch, prefix: str, error: type[Exception]
) -> list[str]:
    """Raise an error when the first thread of this name was just started; the names come in time.

    As a limit of time does that strikes there.
    """
    start = threading.Thread.start
    started: list[str] = []

    def start_and_raise(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith(prefix):
            started.append(thread.name)
            if len(started) == 1:
                raise error

    monkeypatch.setattr(threading.Thread, "start", start_and_raise)
    return started


def threads_of(prefix: str) -> list[str]:
    """The names of those that live."""
    return [each.name for each in threading.enumerate() if each.name.startswith(prefix)]
