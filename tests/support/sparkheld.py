"""The job of `sparkpipeline`, whose batches can be held: so that it is killed in the middle of one.

    python -m tests.support.sparkheld NAME_SERVER TOPIC GROUP FOLDER

While FOLDER has a file `hold`, tasks do not end, and leave a file of their process in `holding`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.sparkpipeline import messages, run, session

if TYPE_CHECKING:
    import pyarrow as pa

#: More tasks than cores: some of a held batch have not begun to read.
TASKS = 4
#: Nobody holds a batch for so long.
LONGEST = 120.0


class Hold:
    """The files by which a test and the tasks of a job understand each other."""

    def __init__(self, folder: Path) -> None:
        self._wish = folder / "hold"
        self._holding = folder / "holding"
        self._holding.mkdir(exist_ok=True)
        self._checkpoint = folder / "checkpoint"

    def begin(self) -> None:
        self._wish.touch()

    def end(self) -> None:
        self._wish.unlink()
        for marker in self._holding.iterdir():
            marker.unlink()

    def holders(self) -> set[int]:
        """The processes of tasks that wait."""
        return {int(marker.name) for marker in self._holding.iterdir()}

    def is_batch_open(self) -> bool:
        """Whether Spark has begun a batch that it has not finished, by its own logs."""
        return self._last("offsets") > self._last("commits")

    def _last(self, log: str) -> int:
        names = [each.name for each in (self._checkpoint / log).iterdir()]
        return max((int(name) for name in names if name.isdigit()), default=-1)


def passing(folder: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A step of a job that lets rows pass unless they are to be held."""

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wish = Path(folder) / "hold"
        marker = Path(folder) / "holding" / str(os.getpid())
        end = time.monotonic() + LONGEST
        pause = threading.Event()
        while wish.exists():
            marker.touch()
            if time.monotonic() > end:
                raise TimeoutError("the batch is held for too long")
            pause.wait(0.02)
        yield from batches

    return held


def main(name_server: str, topic: str, group: str, folder: str) -> None:
    spark = session()
    frame = messages(spark, name_server, topic, group, partitions=TASKS)
    run(spark, frame.mapInArrow(passing(folder), frame.schema), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
