"""`RocketMQRouter` for FastAPI: subscribers beside routes, started with the application."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi.datastructures import Default
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.utils import generate_unique_id
from faststream._internal.constants import EMPTY
from faststream._internal.context import ContextRepo
from faststream._internal.fastapi.context import (
    Context,
    Logger,
)
from faststream._internal.fastapi.context import (
    ContextRepo as ContextRepoAnnotation,
)
from faststream._internal.fastapi.router import StreamRouter
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy

from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.settings import ClientSettings
from orbitmq.integrations.faststream import broker as brokers
from orbitmq.integrations.faststream import message as messages
from orbitmq.integrations.faststream.publisher import TopicPublisher
from orbitmq.integrations.faststream.subscriber import TopicSubscriber

if TYPE_CHECKING:
    from faststream.security import BaseSecurity

    from orbitmq.client.consumer.progress import Beginning

__all__ = (
    "Context",
    "ContextRepoAnnotation",
    "Logger",
    "Producer",
    "RocketMQBroker",
    "RocketMQMessage",
    "RocketMQRouter",
)

RocketMQMessage = Annotated[messages.RocketMQMessage, Context("message")]
RocketMQBroker = Annotated[brokers.RocketMQBroker, Context("broker")]
Producer = Annotated[AsyncProducer, Context("broker._connection.producer")]


class RocketMQRouter(StreamRouter[Any]):
    """An `APIRouter` with a `RocketMQBroker`, which starts and stops with the application."""

    broker_class = brokers.RocketMQBroker
    broker: brokers.RocketMQBroker

    def __init__(
        self,
        name_server: str | Iterable[str] | None = None,
        *,
        client: ClientSettings | None = None,
        group: str | None = None,
        create_topics: bool = True,
        graceful_timeout: float | None = 15.0,
        decoder: Any = None,
        parser: Any = None,
        codec: Any = None,
        middlewares: Sequence[Any] = (),
        ack_policy: AckPolicy = EMPTY,
        id_generator: Callable[[], str] = gen_cor_id,
        serializer: Any = EMPTY,
        security: BaseSecurity | None = None,
        specification_url: str | None = None,
        protocol: str | None = None,
        protocol_version: str | None = None,
        description: str | None = None,
        specification: Any = None,
        specification_tags: Iterable[Any] = (),
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        setup_state: bool = True,
        schema_url: str | None = "/asyncapi",
        context: ContextRepo | None = None,
        # FastAPI's
        prefix: str = "",
        tags: list[Any] | None = None,
        dependencies: Sequence[Any] | None = None,
        default_response_class: Any = Default(JSONResponse),  # noqa: B008  # as FastAPI has it
        responses: dict[int | str, dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        routes: list[Any] | None = None,
        redirect_slashes: bool = True,
        default: Any = None,
        dependency_overrides_provider: Any = None,
        route_class: type[APIRoute] = APIRoute,
        on_startup: Sequence[Callable[[], Any]] | None = None,
        on_shutdown: Sequence[Callable[[], Any]] | None = None,
        lifespan: Any = None,
        deprecated: bool | None = None,
        include_in_schema: bool = True,
        generate_unique_id_function: Any = Default(generate_unique_id),  # noqa: B008
    ) -> None:
        super().__init__(
            name_server,
            client=client,
            group=group,
            create_topics=create_topics,
            graceful_timeout=graceful_timeout,
            decoder=decoder,
            parser=parser,
            codec=codec,
            middlewares=middlewares,
            ack_policy=ack_policy,
            id_generator=id_generator,
            serializer=serializer,
            security=security,
            specification_url=specification_url,
            protocol=protocol,
            protocol_version=protocol_version,
            description=description,
            specification=specification,
            specification_tags=specification_tags,
            logger=logger,
            log_level=log_level,
            setup_state=setup_state,
            schema_url=schema_url,
            context=context,
            prefix=prefix,
            tags=tags,
            dependencies=dependencies,
            default_response_class=default_response_class,
            responses=responses,
            callbacks=callbacks,
            routes=routes,
            redirect_slashes=redirect_slashes,
            default=default,
            dependency_overrides_provider=dependency_overrides_provider,
            route_class=route_class,
            on_startup=on_startup,
            on_shutdown=on_shutdown,
            lifespan=lifespan,
            deprecated=deprecated,
            include_in_schema=include_in_schema,
            generate_unique_id_function=generate_unique_id_function,
        )

    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        *,
        group: str | None = None,
        tags: str | None = None,
        sql: str | None = None,
        consume_from: Beginning = "earliest",
        ordered: bool = False,
        max_retries: int | None = None,
        batch: bool = False,
        batch_size: int | None = None,
        max_workers: int = 1,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Iterable[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
        response_model: Any = Default(None),  # noqa: B008
        response_model_include: Any = None,
        response_model_exclude: Any = None,
        response_model_by_alias: bool = True,
        response_model_exclude_unset: bool = False,
        response_model_exclude_defaults: bool = False,
        response_model_exclude_none: bool = False,
    ) -> TopicSubscriber:
        """As `RocketMQBroker.subscriber`, with FastAPI's dependencies and response model."""
        found: Any = super().subscriber(
            topic,
            group=group,
            tags=tags,
            sql=sql,
            consume_from=consume_from,
            ordered=ordered,
            max_retries=max_retries,
            batch=batch,
            batch_size=batch_size,
            max_workers=max_workers,
            ack_policy=ack_policy,
            no_reply=no_reply,
            dependencies=dependencies,
            parser=parser,
            decoder=decoder,
            codec=codec,
            persistent=persistent,
            title=title,
            description=description,
            include_in_schema=include_in_schema,
            response_model=response_model,
            response_model_include=response_model_include,
            response_model_exclude=response_model_exclude,
            response_model_by_alias=response_model_by_alias,
            response_model_exclude_unset=response_model_exclude_unset,
            response_model_exclude_defaults=response_model_exclude_defaults,
            response_model_exclude_none=response_model_exclude_none,
        )
        return found  # type: ignore[no-any-return]

    def publisher(self, topic: str, **options: Any) -> TopicPublisher:  # type: ignore[override]
        """As `RocketMQBroker.publisher`."""
        return self.broker.publisher(topic, **options)
