"""The driver of a pipeline: a member of its group, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from orbitmq.client.consumer.delegated import DelegatedMember
from orbitmq.client.engine import Engine
from orbitmq.client.errors import NotRunning
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.namespaces import wrap_group
from orbitmq.spark.consuming.definition import Definition, Handled, PackedDefinition
from orbitmq.spark.consuming.portions import Planned, Portions

if TYPE_CHECKING:
    from orbitmq.client.consumer.options import ConsumerOptions
    from orbitmq.client.queue import Queue
    from orbitmq.client.rangeaccess import RangeAccess
    from orbitmq.spark.consuming.reports import PieceReport
    from orbitmq.spark.consuming.settings import BatchSettings

T = TypeVar("T")


class Driver:
    """Owns queues, plans batches of them and reports progress. Blocking; for any thread."""

    def __init__(
        self,
        *,
        group: str,
        namespace: str | None,
        access: RangeAccess,
        middleware: tuple[object, ...],
        options: ConsumerOptions,
        batch: BatchSettings,
    ) -> None:
        self.group = group
        self.namespace = namespace
        self.access = access
        self.middleware = middleware
        self.options = options
        self.batch = batch
        self.packed: PackedDefinition | None = None
        self.client_id: str | None = None
        self._thread = LoopThread(f"orbitmq pipeline {group}")
        self._engine: Engine | None = None
        self._member: DelegatedMember | None = None
        self._portions: Portions | None = None

    # ---- life

    def start(self, handled: Sequence[Handled]) -> None:
        """Join the group. Raises when handlers cannot travel, or no broker answers."""
        self._thread.start()
        try:
            self._thread.run(self._start(tuple(handled)))
        except BaseException:
            self._thread.stop()
            raise

    def stop(self) -> None:
        """Give everything back and leave the group."""
        member, engine = self._member, self._engine
        self._member = self._engine = self._portions = None
        if member is not None and engine is not None:
            try:
                self._thread.run(self._stop(member, engine))
            finally:
                self._thread.stop()

    async def _start(self, handled: tuple[Handled, ...]) -> None:
        engine = Engine(self.access.settings())
        definition = self._definition(handled, engine.client_id)
        packed = PackedDefinition.of(definition)
        await engine.start()
        portions = Portions(
            engine,
            definition.wire_group,
            ordered=self.options.ordered,
            first_pause=self.batch.first_pause,
            longest_pause=self.batch.longest_pause,
        )
        try:
            member = DelegatedMember(
                engine, definition.wire_group, definition.registrations(), self.options, portions
            )
            portions.progress = member.progress
            await member.start()
        except BaseException:
            await engine.stop()
            raise
        self._engine, self._member, self._portions = engine, member, portions
        self.client_id, self.packed = engine.client_id, packed

    async def _stop(self, member: DelegatedMember, engine: Engine) -> None:
        try:
            await member.stop()
        finally:
            await engine.stop()

    def _definition(self, handled: tuple[Handled, ...], client_id: str) -> Definition:
        return Definition(
            group=self.group,
            wire_group=wrap_group(self.namespace, self.group),
            namespace=self.namespace,
            access=self.access,
            handled=handled,
            middleware=self.middleware,
            consume=self.options.consume,
            ordered=self.options.ordered,
            client_id=client_id,
            bytes_in_task=self.batch.bytes_in_task,
            patience=self.batch.patience,
        )

    # ---- batches

    def plan(self, limit: int) -> Planned:
        """At most `limit` messages of owned queues."""
        return self._thread.run(self._running[1].plan(limit))

    def settle(self, planned: Planned, reports: Iterable[PieceReport]) -> int:
        """Take what came of a batch; returns when brokers know it.

        How many offsets were passed over for good, at which brokers have no messages.
        """
        return self._thread.run(self._settle(planned, list(reports)))

    async def _settle(self, planned: Planned, reports: list[PieceReport]) -> int:
        member, portions = self._running
        counts = member.statistics
        for report in reports:
            topic = planned.pieces[report.place].range.queue.topic
            failed = report.retried + report.dead + report.kept
            # How many calls there were, and how long they took, is known to the tasks only.
            counts.consumed(topic, done=report.done, failed=failed, times=())
            counts.sent_back += report.retried + report.dead
            counts.dead_letters += report.dead
            counts.kept_back += report.kept
        return await portions.settle(planned, reports)

    def is_settled(self) -> bool:
        """Whether it has the queues that are its own."""
        member = self._running[0]
        return self._look(lambda: member.is_settled)

    def lag(self) -> Mapping[Queue, int]:
        """Messages that wait in each queue."""
        portions = self._portions
        return {} if portions is None else self._look(lambda: dict(portions.lag))

    def failed_in_a_row(self) -> int:
        """How many tasks in a row have failed with the same queue."""
        portions = self._portions
        return 0 if portions is None else self._look(lambda: portions.failed_in_a_row)

    def queues(self) -> frozenset[Queue]:
        """The owned queues."""
        member = self._member
        if member is None:
            return frozenset()
        return self._look(lambda: frozenset(member.rebalancer.owned))

    def _look(self, look: Callable[[], T]) -> T:
        async def call() -> T:
            return look()

        return self._thread.run(call())

    @property
    def _running(self) -> tuple[DelegatedMember, Portions]:
        if self._member is None or self._portions is None:
            raise NotRunning("this pipeline")
        return self._member, self._portions
