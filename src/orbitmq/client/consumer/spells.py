"""Trouble that lasts is one event: told when it begins, now and then, and when it is over.

In between it can be asked for: a program that looks at its consumer sees why it gets nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

#: While a spell lasts, every so many times it is told again.
_EVERY = 1000


class Spells:
    """Spells of trouble, each known by what it is about."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._times: dict[Hashable, int] = {}
        self._texts: dict[Hashable, str] = {}

    def trouble(
        self, about: Hashable, text: str, *values: object, level: int = logging.WARNING
    ) -> None:
        """It is there, or still there."""
        times = self._times[about] = self._times.get(about, 0) + 1
        self._texts[about] = text % values
        if times == 1:
            self._log.log(level, text, *values)
        elif times % _EVERY == 0:
            self._log.log(level, text + " (%d times)", *values, times)

    def over(self, about: Hashable) -> None:
        """All is well."""
        times = self._times.pop(about, 0)
        if times:
            del self._texts[about]
            self._log.info("trouble with %s is over after %d times", about, times)

    def forget(self, about: Hashable) -> None:
        """Nobody is concerned by it any more."""
        self._times.pop(about, None)
        self._texts.pop(about, None)

    def is_in_trouble(self, about: Hashable) -> bool:
        return about in self._times

    def standing(self) -> tuple[str, ...]:
        """What is wrong now, a sentence each."""
        return tuple(self._texts.values())
