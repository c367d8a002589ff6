"""Verdicts that stay as they were: judged once, before anybody looks at them.

Invariant: all that is done with the rows of `judged` is done by the same verdicts, or fails.

`persist` does not give that. It is a cache: blocks that are lost with their executor are computed
again, which calls the handler again, and nobody is told. A local checkpoint keeps the rows in the
same places, but forgets how they were made: when blocks are lost, the action that wants them
fails, with it the batch, and a batch that Spark repeats is judged, written and settled as a whole.

A block that two attempts of a task have made is there in two versions, and either may be read. An
attempt that failed leaves none behind; a speculative copy may, which is why speculation is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orbitmq.client.errors import SettingError
from orbitmq.spark.consuming.errors import RowsRefused
from orbitmq.spark.consuming.verdicts import HANDLER_IN_PLAN, process

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from orbitmq.client.consumer.handlers import HandlerFunction


@contextlib.contextmanager
def judged(
    frame: DataFrame,
    handler: HandlerFunction,
    *,
    group: str = "spark",
    batch: bool | None = None,
    batch_size: int | None = None,
    workers: int = 1,
    middleware: Sequence[object] = (),
) -> Iterator[DataFrame]:
    """The rows of `process`, for which the handler was called once, until the `with` ends.

    The handler is called at once, for all rows. What is done with the rows afterwards fails when
    Spark has lost some of them: let the batch fail, so that it is repeated.
    """
    if frame.isStreaming:
        raise RowsRefused("judged is for the batches of a stream: use it inside of foreachBatch")
    if str(frame.sparkSession.conf.get("spark.speculation", "false")).lower() == "true":
        raise SettingError(
            "spark.speculation must be false for judged: it runs a task twice at the same time, "
            "and the two may judge a row differently"
        )
    fresh = process(
        frame,
        handler,
        group=group,
        batch=batch,
        batch_size=batch_size,
        workers=workers,
        middleware=middleware,
    )
    rows = fresh.localCheckpoint(eager=True)
    try:
        yield rows
    finally:
        _let_go(rows)


def check_kept(frame: DataFrame) -> None:
    """Refuse rows whose handler would be called again; raises `RowsRefused`."""
    if HANDLER_IN_PLAN in _plan(frame):
        raise RowsRefused(
            "these rows come straight from `process`, whose handler is called again for every "
            "action, also after persist() when a block is lost; a row that fails in one call and "
            "not in the next would be lost. Take the rows from `with judged(...) as rows:`"
        )


def _plan(frame: DataFrame) -> str:
    java = getattr(frame, "_jdf", None)
    if java is not None:
        return str(java.queryExecution().analyzed().toString())
    # Connect has no public way to get what `explain` prints.
    return str(frame._explain_string(mode="extended"))  # type: ignore[operator]


def _let_go(rows: DataFrame) -> None:
    """Free the memory. Spark does so by itself some time after a DataFrame is gone, not before."""
    java = getattr(rows, "_jdf", None)
    if java is not None:
        # In Connect, the server is told when the DataFrame is gone.
        java.queryExecution().analyzed().rdd().unpersist(False)
