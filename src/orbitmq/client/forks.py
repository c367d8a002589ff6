"""What has to happen to an object when its process forks.

A fork has the memory of its parent, but only the thread that forked: a lock that another thread
held at that moment is taken for ever, and what that thread was at is never finished. Nor are open
files of its own: SQLite for one forbids that a connection is taken along, or even closed there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Forked(Protocol):
    """Something that may be there before a fork, and be used after it."""

    def before_fork(self) -> None:
        """The process is about to fork, on this thread."""

    def after_fork(self, *, is_child: bool) -> None:
        """It has. In a child this may come without the other one: not all who fork are Python."""


def tell_of_forks(part: Forked) -> None:
    """Have an object told of every fork for as long as it lives.

    Python has no way to take this back, so a few words of memory stay for each that ever asked.
    """
    if hasattr(os, "register_at_fork"):
        # Weakly, or nothing that asked would ever be gone.
        known = weakref.ref(part)
        os.register_at_fork(
            before=_told(known, lambda each: each.before_fork()),
            after_in_parent=_told(known, lambda each: each.after_fork(is_child=False)),
            after_in_child=_told(known, lambda each: each.after_fork(is_child=True)),
        )


def _told(
    known: weakref.ReferenceType[Forked], tell: Callable[[Forked], None]
) -> Callable[[], None]:
    def hook() -> None:
        part = known()
        if part is not None:
            tell(part)

    return hook
