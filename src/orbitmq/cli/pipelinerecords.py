"""What `orbitmq pipeline` prints for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orbitmq.cli.jsonoutput import OLD_NAME

if TYPE_CHECKING:
    from orbitmq.spark.pipelines.definition import Definition
    from orbitmq.spark.pipelines.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEventRecord:
    """Something that happened to a pipeline; one line for each."""

    #: plan (with --dry-run), started, progress, restarting, row (of a table that is its result),
    #: or ended
    event: str
    at: float
    pipeline: str
    #: The stream or consumer group that this is about.
    query: str | None = None
    #: starting, running, waiting, failing (it runs, and what it handles comes back), stopped,
    #: finished or failed
    state: str | None = None
    batch: int | None = None  #: the last batch that is done
    rows: int | None = None  #: read since it was started; of a table, when that is the result
    rows_per_second: float | None = None  #: of the last batch
    batch_seconds: float | None = None
    unread: int | None = None  #: messages that are not read yet; null when nobody knows it
    #: The same, by `topic@broker:queue`.
    unread_by_queue: Mapping[str, int] = field(default_factory=dict)
    retried: int | None = None  #: sent back, to be delivered again
    dead: int | None = None  #: given up
    failed_share: float | None = None  #: of what was handled in the last five minutes
    late: int | None = None  #: rows that came after their window was closed: in no result
    restarts: int | None = None  #: how often it was started again
    pause_seconds: float | None = None  #: until it is started again
    #: When it ended: whether every batch that had begun was finished.
    is_clean: bool | None = None
    error: str | None = None
    #: When it is planned or started: the options and settings that were given.
    options: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None
    lag: Mapping[str, int] = field(default_factory=dict, metadata=OLD_NAME)
    lag_total: int | None = field(default=None, metadata=OLD_NAME)

    @classmethod
    def of(cls, pipeline: str, progress: Progress, at: float) -> PipelineEventRecord:
        return cls(
            event="progress",
            at=at,
            pipeline=pipeline,
            query=progress.query,
            state=progress.state,
            batch=progress.batch,
            rows=progress.rows,
            rows_per_second=progress.rows_per_second,
            batch_seconds=progress.batch_seconds,
            unread=progress.total_lag,
            unread_by_queue=progress.lag,
            lag=progress.lag,
            lag_total=progress.total_lag,
            retried=progress.retried,
            dead=progress.dead,
            failed_share=progress.failed_share,
            late=progress.late,
            error=progress.error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptionRecord:
    """An option of a pipeline."""

    name: str
    about: str
    allowed: str
    is_required: bool
    default: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """A pipeline that can be run."""

    name: str
    about: str
    file: str | None  #: null: it is a ready one
    options: tuple[PipelineOptionRecord, ...]

    @classmethod
    def of(cls, definition: Definition) -> PipelineRecord:
        return cls(
            name=definition.name,
            about=definition.about,
            file=None if definition.file is None else str(definition.file),
            options=tuple(
                PipelineOptionRecord(
                    name=option.name,
                    about=option.about,
                    allowed=option.kind.allowed,
                    is_required=option.is_required,
                    default=option.default_text,
                )
                for option in definition.options
            ),
        )
