"""A store of progress that the application brought, behind errors that a consumer knows.

Its methods are the application's code: a database that is away raises what its driver raises.
Whoever puts positions by is prepared for `OrbitError`, tries again, and gives back what it holds;
so everything else that comes out of such a store is made one here, in one place, with its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orbitmq.client.consumer.progress import Doubting, ProgressStore
from orbitmq.client.errors import ClientError
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.queue import Queue


class OwnProgressFailed(ClientError):
    """The application's own store of progress raised an error."""

    retriable = True

    def __init__(self, store: object, what: str, cause: Exception) -> None:
        self.what = what
        super().__init__(
            f"{type(store).__name__}.{what} failed: {type(cause).__name__}: {cause}; "
            "the consumer goes on and tries again"
        )


class OwnProgress:
    """Passes everything on to the application's store; what it raises becomes an `OrbitError`."""

    def __init__(self, store: ProgressStore) -> None:
        self._store = store

    async def load(self) -> None:
        with self._declared("load"):
            await self._store.load()

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        with self._declared("update"):
            self._store.update(queue, offset, increase_only=increase_only)

    def freeze(self, queue: Queue, offset: int) -> None:
        with self._declared("freeze"):
            self._store.freeze(queue, offset)

    def read(self, queue: Queue) -> int | None:
        with self._declared("read"):
            return self._store.read(queue)

    async def fetch(self, queue: Queue) -> int | None:
        with self._declared("fetch"):
            return await self._store.fetch(queue)

    async def persist(self, queues: Iterable[Queue]) -> None:
        with self._declared("persist"):
            await self._store.persist(queues)

    def forget(self, queue: Queue) -> None:
        with self._declared("forget"):
            self._store.forget(queue)

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        with self._declared("positions"):
            return self._store.positions(topic)

    def doubt(self, queues: Iterable[Queue]) -> None:
        if isinstance(self._store, Doubting):
            with self._declared("doubt"):
                self._store.doubt(queues)

    @contextmanager
    def _declared(self, what: str) -> Iterator[None]:
        try:
            yield
        except OrbitError:
            raise
        except Exception as error:
            # Whatever a driver raises, also what looks like a time-out of ours.
            raise OwnProgressFailed(self._store, what, error) from error
