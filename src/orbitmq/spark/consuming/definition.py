"""What is consumed and by whom, in a form that travels to tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark import cloudpickle

from orbitmq.client.consumer.registering import Registration, Registrations
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.errors import SettingError
from orbitmq.client.rangeaccess import RangeAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """A topic and its handler, as the application gave them."""

    topic: str
    function: Callable[..., Any]
    tags: str | None = None
    sql: str | None = None
    batch: bool | None = None
    batch_size: int | None = None
    middleware: tuple[object, ...] = ()
    is_listener: bool = False

    def register(self, registrations: Registrations) -> Registration:
        """Bind it, which checks everything about it."""
        if self.is_listener:
            return registrations.listener(
                self.topic,
                self.function,
                tags=self.tags,
                sql=self.sql,
                batch_size=self.batch_size,
                middleware=self.middleware,
            )
        return registrations.handler(
            self.topic,
            self.function,
            tags=self.tags,
            sql=self.sql,
            batch=self.batch,
            batch_size=self.batch_size,
            middleware=self.middleware,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A pipeline, as its tasks need it."""

    #: As the application calls it; `wire_group` as brokers do.
    group: str
    wire_group: str
    namespace: str | None
    access: RangeAccess
    handled: tuple[Handled, ...]
    middleware: tuple[object, ...]
    consume: ConsumeSettings
    ordered: bool
    #: The id of the driver, in whose name order locks are held.
    client_id: str
    bytes_in_task: int
    patience: float

    def registrations(self) -> tuple[Registration, ...]:
        """The handlers, bound."""
        found = Registrations(
            self.group,
            namespace=self.namespace,
            batch_size=self.consume.batch_size,
            middleware=self.middleware,
        )
        for each in self.handled:
            each.register(found)
        return found.all()


@dataclass(frozen=True, slots=True)
class PackedDefinition:
    """A definition as bytes, made once; tasks unpack it once for each of their processes."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, definition: Definition) -> PackedDefinition:
        """Raises `SettingError` when a handler cannot travel, and names it."""
        for each in definition.handled:
            for part in (each.function, *each.middleware, *definition.middleware):
                _packed(part)
        data = _packed(definition)
        return cls(data, hashlib.sha256(data).hexdigest())

    def unpack(self) -> Definition:
        definition: Definition = cloudpickle.loads(self.data)
        return definition


def _packed(part: object) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(part)  # type: ignore[no-untyped-call]
    except Exception as error:
        # Whatever `__reduce__` of somebody's object raises.
        raise SettingError(
            f"{part!r} cannot be sent to Spark's workers: {error}; handlers must not hold on to "
            "sessions, locks, sockets or open files: make those inside of the handler"
        ) from error
    return data
