"""What a consumer consumes: topics, which of their messages, and who handles them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from orbitmq.client.consumer.handlers import Binding, bind_handler, bind_listener
from orbitmq.client.consumer.subscription import Subscription
from orbitmq.client.errors import SettingError
from orbitmq.client.namespaces import wrap_topic

if TYPE_CHECKING:
    from orbitmq.client.consumer.handlers import HandlerFunction, ListenerFunction

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Registration:
    """A subscription and its handler."""

    subscription: Subscription
    binding: Binding

    @property
    def topic(self) -> str:
        """As brokers know it."""
        return self.subscription.topic


class Registrations:
    """The handlers of a consumer, one for each topic, before and while it runs."""

    def __init__(
        self,
        group: str,
        *,
        namespace: str | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
        in_order: bool = False,
    ) -> None:
        """`batch_size` and `middleware` are those of all handlers.

        `in_order`: whether messages are consumed so, and listeners may commit by themselves.
        """
        self._group = group
        self._namespace = namespace
        self._batch_size = batch_size
        self._in_order = in_order
        self._middleware = _several(middleware)
        self._by_topic: dict[str, Registration] = {}

    def __len__(self) -> int:
        return len(self._by_topic)

    def all(self) -> tuple[Registration, ...]:
        return tuple(self._by_topic.values())

    def wire_topic(self, topic: str) -> str:
        return wrap_topic(self._namespace, topic)

    def handler(
        self,
        topic: str,
        function: HandlerFunction,
        *,
        tags: str | None = None,
        sql: str | None = None,
        batch: bool | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
        replace: bool = False,
    ) -> Registration:
        """Have a handler called with messages of a topic."""
        binding = bind_handler(
            function,
            group=self._group,
            batch=batch,
            batch_size=self._batch_size if batch_size is None else batch_size,
            middleware=(*self._middleware, *_several(middleware)),
        )
        return self._put(topic, tags, sql, binding, replace=replace)

    def listener(
        self,
        topic: str,
        function: ListenerFunction,
        *,
        tags: str | None = None,
        sql: str | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
        replace: bool = False,
    ) -> Registration:
        """Have a low-level listener called with messages of a topic."""
        binding = bind_listener(
            function,
            group=self._group,
            batch_size=self._batch_size if batch_size is None else batch_size,
            middleware=(*self._middleware, *_several(middleware)),
            in_order=self._in_order,
        )
        return self._put(topic, tags, sql, binding, replace=replace)

    def remove(self, topic: str) -> Registration | None:
        """Forget the handler of a topic."""
        return self._by_topic.pop(self.wire_topic(topic), None)

    def _put(
        self, topic: str, tags: str | None, sql: str | None, binding: Binding, *, replace: bool
    ) -> Registration:
        if tags is not None and sql is not None:
            raise SettingError(f"give topic {topic!r} tags or a SQL92 condition, not both")
        wire_topic = self.wire_topic(topic)
        subscription = (
            Subscription.by_tags(wire_topic, tags)
            if sql is None
            else Subscription.by_sql(wire_topic, sql)
        )
        if wire_topic in self._by_topic and not replace:
            raise SettingError(
                f"topic {topic!r} has a handler already, {self._by_topic[wire_topic].binding.name};"
                " a consumer has one for each topic"
            )
        registration = Registration(subscription, binding)
        self._by_topic[wire_topic] = registration
        return registration


def _several(middleware: Sequence[object]) -> tuple[object, ...]:
    if not isinstance(middleware, Iterable):
        raise SettingError(f"middleware must be a list, got {middleware!r}: write [{middleware!r}]")
    return tuple(middleware)
