"""`orbitmq pipeline run --json` as a process, whose events are waited for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.command import COMMAND, Piped, environment

#: Starting Spark takes ten seconds, and much more beside others; what takes this long has failed.
DEADLINE = 150.0
#: What a command of a few batches wants: Spark starts sooner, and its workers are few.
QUICK = (
    *("--master", "local[2]", "--setting", "spark.sql.shuffle.partitions=2"),
    *("--setting", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
)


class PipelineProcess(Piped):
    """A pipeline that runs."""

    deadline = DEADLINE

    def __init__(
        self, *words: str, cwd: Path, env: Mapping[str, str] | None = None, quick: bool = True
    ) -> None:
        self.events: list[dict[str, Any]] = []
        command = [*COMMAND, "pipeline", "run", *words, "--json", *(QUICK if quick else ())]
        # A group of its own, to which signals can be sent.
        super().__init__(command, environment(env), cwd=cwd, start_new_session=True)

    def until(self, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The first event for which it holds, waited for."""
        self.until_true(lambda: any(map(condition, self.events)), what)
        return next(filter(condition, self.events))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def take(self, line: str) -> None:
        super().take(line)
        self.events.append(json.loads(line))
