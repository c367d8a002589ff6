"""What can be wrong with a pipeline."""

from __future__ import annotations

from orbitmq.errors import OrbitError


class PipelineRefused(OrbitError):
    """A file, an option or an outcome that is none of a pipeline; nothing was started."""


class PipelineBroken(OrbitError):
    """A pipeline that failed, and is not started again."""

    def __init__(self, name: str, problem: str, *, restarts: int) -> None:
        self.name = name
        self.problem = problem
        self.restarts = restarts
        again = f" after {restarts} restart(s)" if restarts else ""
        super().__init__(f"pipeline {name!r} failed{again}: {problem}")
