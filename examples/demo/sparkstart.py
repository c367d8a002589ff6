"""Spark for the demo: its start, which may be interrupted, and where its words go."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has none

from orbitmq.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds after which a signal is noted at the latest.
_BEAT = 0.1

#: What calls of Spark raise when somebody has killed its Java.
JAVA_GONE: Final = (Py4JError, OSError)

T = TypeVar("T")


def start_spark() -> SparkSession:
    """A session that says nothing."""
    spark = local_session("orbitmq demo", cores=2, settings={"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("OFF")
    return spark


def in_peace(work: Callable[[], T]) -> T:
    """Do work of some seconds in another thread: in the main one, Spark would put a handler of its
    own in the place of ours.
    """
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Spark's imports, about other libraries
        working = pool.submit(work)
        while not wait([working], _BEAT).done:
            pass  # a signal is noted in between
        return working.result()


def without_java() -> AbstractContextManager[None]:
    """To end what may have ended already, together with Java."""
    return suppress(*JAVA_GONE)


@contextmanager
def words_of_spark_in(log: Path) -> Iterator[None]:
    """Spark, its Java and its workers say much on the standard error: into a file with it."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
