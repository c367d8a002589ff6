"""Taking turns: more things to ask about than questions that may be asked.

Every name gets its turn before any gets a second one; those that are urgent come first, but never
take all places: a third is kept for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Rotation:
    """Remembers when each name had its turn."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._turns: dict[str, int] = {}
        self._turn = 0

    def next(self, names: Iterable[str], urgent: Collection[str] = ()) -> list[str]:
        """Whose turn it is now."""
        everybody = list(names)
        present = set(everybody)
        for gone in self._turns.keys() - present:
            del self._turns[gone]
        if len(everybody) <= self._size:
            chosen = everybody
        else:
            first = sorted(present.intersection(urgent), key=self._waited)
            reserved = max(1, self._size // 3)
            chosen = first[: self._size - reserved]
            taken = set(chosen)
            rest = sorted((name for name in everybody if name not in taken), key=self._waited)
            chosen += rest[: self._size - len(chosen)]
        self._turn += 1
        for name in chosen:
            self._turns[name] = self._turn
        return chosen

    def _waited(self, name: str) -> tuple[int, str]:
        return self._turns.get(name, 0), name
