"""What the disk has destroyed of a log, as recovery finds it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of the log whose records are lost."""

    offset: int
    size: int
    reason: str


class Losses:
    """The damage found so far."""

    def __init__(self) -> None:
        self.damage: list[Damage] = []
        self.lost_bytes = 0

    def note(self, damage: Damage) -> None:
        log.error(
            "commit log damaged",
            extra={"offset": damage.offset, "size": damage.size, "reason": damage.reason},
        )
        self.damage.append(damage)
        self.lost_bytes += damage.size
