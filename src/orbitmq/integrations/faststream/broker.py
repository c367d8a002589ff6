"""`RocketMQBroker` and `RocketMQRouter`: where subscribers and publishers are declared."""

from __future__ import annotations

import asyncio
import importlib
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fast_depends import Provider, dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.configs import BrokerConfig, UnderlyingDriverAnnotation
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.exceptions import SetupError
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.response.publish_type import PublishType
from faststream.security import BaseSecurity, SASLPlaintext
from faststream.specification.schema import BrokerSpec

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.errors import AlreadyExists, NotFound, OrbitError
from orbitmq.integrations.faststream.message import RocketMQMessage, RocketMQPublishCommand
from orbitmq.integrations.faststream.producer import RocketMQProducer
from orbitmq.integrations.faststream.publisher import (
    PublisherConfig,
    RocketMQPublisherSpecification,
    RocketMQPublisherSpecificationConfig,
    TopicPublisher,
)
from orbitmq.integrations.faststream.subscriber import (
    ConsumerOptions,
    GroupConsumers,
    RocketMQSubscriberSpecification,
    RocketMQSubscriberSpecificationConfig,
    SubscriberConfig,
    TopicSubscriber,
)
from orbitmq.wire.command import Credentials

if TYPE_CHECKING:
    from faststream._internal.basic_types import LoggerProto
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import CustomCallable

    from orbitmq.client.consumer.progress import Beginning

log = logging.getLogger(__name__)


class Connection:
    """The clients of a connected broker."""

    def __init__(self, client: ClientSettings, *, create_topics: bool) -> None:
        self.client = client
        self.producer = AsyncProducer("faststream", client=client)
        self.groups = GroupConsumers(client)
        self._admin = AsyncAdmin(client=client)
        self._create_topics = create_topics
        self._known: set[str] = set()

    async def start(self) -> None:
        await self.producer.start()
        await self._admin.start()

    async def stop(self) -> None:
        await self.groups.stop()
        await self.producer.stop()
        await self._admin.stop()

    async def ping(self, timeout: float | None) -> bool:  # noqa: ASYNC109  # FastStream's name
        try:
            async with asyncio.timeout(timeout):
                status = await self._admin.cluster()
        except (OrbitError, TimeoutError):
            return False
        return any(each.is_up for each in status.brokers)

    async def create_topic(self, topic: str) -> None:
        """A topic that does not exist yet would be found late by its consumers."""
        if not self._create_topics or topic in self._known:
            return
        try:
            try:
                await self._admin.topics.get(topic)
            except NotFound:
                await self._admin.topics.create(topic)
        except AlreadyExists:
            pass  # another process was quicker
        except OrbitError as error:
            log.warning("topic %s could not be created: %s", topic, error)
            return
        self._known.add(topic)


def _driver_annotations() -> Mapping[Any, Any]:
    """FastStream's help for handlers that name a class where its annotation is meant."""
    # It imports this module.
    annotations = importlib.import_module("orbitmq.integrations.faststream.annotations")

    kinds = {
        AsyncProducer: "RocketMQProducer",
        RocketMQBroker: "RocketMQBroker",
        RocketMQMessage: "RocketMQMessage",
    }
    return {
        kind: UnderlyingDriverAnnotation(
            type_hint=getattr(annotations, name), module=annotations.__name__, name=name
        )
        for kind, name in kinds.items()
    }


@dataclass(kw_only=True)
class RocketMQBrokerConfig(BrokerConfig):
    #: Of subscribers that name none.
    group: str | None = None
    connection: Connection | None = None
    default_driver_annotations: Mapping[Any, Any] = field(default_factory=_driver_annotations)


class RocketMQRegistrator(Registrator[Any, RocketMQBrokerConfig]):
    """Declares subscribers and publishers."""

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
        dependencies: Sequence[Any] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> TopicSubscriber:
        """Subscribe to a topic.

        Args:
            topic: The topic; a router's prefix is put before it.
            group: The consumer group. By default the broker's, or `faststream-<topic>`.
            tags: Only messages with these tags, such as "paid || refunded".
            sql: Only messages that match this SQL92 condition on their headers.
            consume_from: Where a new group begins: "earliest", "latest", a time or an offset.
            ordered: Whether each queue is consumed in order.
            max_retries: Attempts after the first, before a message becomes a dead letter.
            batch: Whether handlers take lists of messages.
            batch_size: The largest number of messages in a list (32).
            max_workers: Calls of handlers at the same time.
            ack_policy: What an exception means; NACK_ON_ERROR by default: the message is retried.
            no_reply: Whether requests are left unanswered.
            dependencies: Dependencies of all handlers.
            parser: Makes a FastStream message from OrbitMQ's.
            decoder: Decodes its body.
            codec: Decodes and encodes bodies.
            persistent: Whether the subscriber remains after the broker has stopped.
            title: In the AsyncAPI document.
            description: In the AsyncAPI document.
            include_in_schema: Whether the AsyncAPI document has it.
        """
        if max_workers < 1:
            raise SetupError(f"max_workers must be at least 1, got {max_workers!r}")
        config: Any = self.config
        calls: CallsCollection[Any] = CallsCollection()
        specification = RocketMQSubscriberSpecification(
            config,
            RocketMQSubscriberSpecificationConfig(
                topic=topic,
                tags=tags,
                title_=title,
                description_=description,
                include_in_schema=include_in_schema,
            ),
            calls,
        )
        subscriber = TopicSubscriber(
            SubscriberConfig(
                topic=topic,
                group=group,
                tags=tags,
                sql=sql,
                batch=batch,
                batch_size=batch_size,
                max_workers=max_workers,
                options=ConsumerOptions(
                    consume_from=consume_from, ordered=ordered, max_retries=max_retries
                ),
                no_reply=no_reply,
                _outer_config=config,
                _ack_policy=ack_policy,
            ),
            specification,
            calls,
        )
        super().subscriber(subscriber, persistent=persistent)
        return subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        tag: str | None = None,
        headers: dict[str, str] | None = None,
        reply_to: str = "",
        batch: bool = False,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
    ) -> TopicPublisher:
        """A publisher of a topic: a decorator of handlers, and an object with `publish`.

        Args:
            topic: The topic; a router's prefix is put before it.
            tag: The tag of its messages.
            headers: Headers of all messages.
            reply_to: The topic that answers go to.
            batch: Whether each element of what a handler returns is a message.
            persistent: Whether the publisher remains after the broker has stopped.
            title: In the AsyncAPI document.
            description: In the AsyncAPI document.
            schema: The type of the messages, in the AsyncAPI document.
            include_in_schema: Whether the AsyncAPI document has it.
        """
        config: Any = self.config
        publisher = TopicPublisher(
            PublisherConfig(
                topic=topic,
                tag=tag,
                headers=headers,
                reply_to=reply_to,
                batch=batch,
                _outer_config=config,
            ),
            RocketMQPublisherSpecification(
                _outer_config=config,
                specification_config=RocketMQPublisherSpecificationConfig(
                    topic=topic,
                    title_=title,
                    description_=description,
                    schema_=schema,
                    include_in_schema=include_in_schema,
                ),
            ),
        )
        super().publisher(publisher, persistent=persistent)
        return publisher

    def include_router(self, router: Any, **options: Any) -> None:
        if not isinstance(router, RocketMQRegistrator):
            raise SetupError(
                f"a RocketMQBroker includes a RocketMQRouter, got {type(router).__name__}"
            )
        super().include_router(router, **options)


class _LoggerStorage(DefaultLoggerStorage):
    """FastStream's log lines, with topic and group in columns."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = {"topic": 4, "group": 4}
        self.logger_log_level = logging.INFO

    def set_level(self, level: int) -> None:
        self.logger_log_level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        for name, width in self._widths.items():
            self._widths[name] = max(width, len(params.get(name) or ""))

    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        if found := self._get_logger_ref():
            return found
        columns = " | ".join(f"%({name})-{width}s" for name, width in self._widths.items())
        made = get_broker_logger(
            name="rocketmq",
            default_context={"topic": "", "group": ""},
            message_id_ln=32,  # the first 14 are those of all messages of a process
            fmt=f"%(asctime)s %(levelname)-8s - {columns} | %(message_id)-32s - %(message)s",
            context=context,
            log_level=self.logger_log_level,
        )
        self._logger_ref.add(made)
        return made


_make_logger_state = partial(make_logger_state, default_storage_cls=_LoggerStorage)


class RocketMQBroker(RocketMQRegistrator, BrokerUsecase[Any, Connection, RocketMQBrokerConfig]):
    """A RocketMQ cluster as FastStream's broker."""

    def __init__(
        self,
        name_server: str | Iterable[str] | None = None,
        *,
        client: ClientSettings | None = None,
        group: str | None = None,
        create_topics: bool = True,
        graceful_timeout: float | None = 15.0,
        decoder: CustomCallable | None = None,
        parser: CustomCallable | None = None,
        codec: CodecProto | None = None,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[RocketMQRegistrator] = (),
        ack_policy: AckPolicy = EMPTY,
        id_generator: Callable[[], str] = gen_cor_id,
        specification_url: str | Iterable[str] | None = None,
        protocol: str | None = None,
        protocol_version: str | None = None,
        description: str | None = None,
        tags: Iterable[Any] = (),
        security: BaseSecurity | None = None,
        logger: LoggerProto | None = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: Any = EMPTY,
        provider: Provider | None = None,
        context: ContextRepo | None = None,
        underlying_driver_annotations: Mapping[Any, Any] | None = None,
    ) -> None:
        """A broker that is not connected yet.

        Args:
            name_server: `host:port` of one or several name servers.
            client: All settings of the client, instead.
            group: The consumer group of subscribers that name none.
            create_topics: Whether topics of subscribers are created when they do not exist.
            graceful_timeout: Seconds that a stop waits for handlers.
            decoder: Decodes bodies.
            parser: Makes FastStream messages from OrbitMQ's.
            codec: Decodes and encodes bodies.
            dependencies: Dependencies of all handlers.
            middlewares: Around all handlers and publishers.
            routers: Routers to include.
            ack_policy: What an exception means, for subscribers that do not say.
            id_generator: Makes correlation ids.
            specification_url: Addresses in the AsyncAPI document.
            protocol: In the AsyncAPI document.
            protocol_version: In the AsyncAPI document.
            description: In the AsyncAPI document.
            tags: In the AsyncAPI document.
            security: `SASLPlaintext` has access and secret key; `use_ssl` and a context, TLS.
            logger: FastStream's logger; None turns it off.
            log_level: Its level.
            apply_types: Whether handlers get what their annotations ask for.
            serializer: FastDepends' serializer.
            provider: FastDepends' provider of overrides.
            context: FastStream's context.
            underlying_driver_annotations: More classes that annotations stand for.
        """
        settings = _secured(resolve(name_server, client), security)
        url = specification_url or settings.name_servers
        super().__init__(
            routers=routers,
            config=RocketMQBrokerConfig(
                group=group,
                producer=RocketMQProducer(parser, decoder, codec),
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=_make_logger_state(logger=logger, log_level=log_level),
                fd_config=FastDependsConfig(
                    use_fastdepends=apply_types,
                    serializer=serializer,
                    provider=provider or dependency_provider,
                    context=context or ContextRepo(),
                ),
                broker_dependencies=dependencies,
                graceful_timeout=graceful_timeout,
                ack_policy=ack_policy,
                id_generator=id_generator,
                extra_context={"broker": self},
                underlying_driver_annotations=dict(underlying_driver_annotations or {}),
            ),
            specification=BrokerSpec(
                description=description,
                url=[url] if isinstance(url, str) else list(url),
                protocol=protocol or "rocketmq",
                protocol_version=protocol_version or "remoting",
                tags=tags,
                security=security,
            ),
            client=settings,
            create_topics=create_topics,
        )

    async def _connect(self) -> Connection:
        connection = Connection(**self._connection_kwargs)
        await connection.start()
        config: Any = self.config.broker_config
        config.connection = connection
        config.producer.connect(connection.producer, config.fd_config._serializer)
        return connection

    async def start(self) -> None:
        await self.connect()
        await super().start()

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        await super().stop(exc_type, exc_val, exc_tb)
        config: Any = self.config.broker_config
        if self._connection is not None:
            connection, self._connection = self._connection, None
            config.connection = None
            await connection.stop()
        if isinstance(config.producer, RocketMQProducer):
            config.producer.disconnect()

    async def ping(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        """Whether a broker of the cluster answers."""
        return self._connection is not None and await self._connection.ping(timeout)

    # ---- sending

    async def publish(
        self,
        message: Any = None,
        topic: str = "",
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        ordering_key: str | None = None,
        delay: float | None = None,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> Any:
        """Send a message; returns OrbitMQ's `SendResult`.

        Args:
            message: The body: bytes, text, or what becomes JSON.
            topic: Where to.
            tag: What consumers filter by.
            keys: What the message is looked up by.
            ordering_key: Messages with the same key stay in order.
            delay: Seconds until it is delivered.
            headers: Further properties.
            correlation_id: Of the message; a new one by default.
            reply_to: The topic that an answer goes to.
        """
        cmd = RocketMQPublishCommand(
            message,
            topic=topic,
            tag=tag,
            keys=keys,
            ordering_key=ordering_key,
            delay=delay,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            _publish_type=PublishType.PUBLISH,
        )
        return await self._basic_publish(cmd, producer=self.config.producer)

    async def publish_batch(  # type: ignore[override]
        self,
        *messages: Any,
        topic: str = "",
        tag: str | None = None,
        ordering_key: str | None = None,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> Any:
        """Send several messages to one queue of a topic, in few requests."""
        cmd = RocketMQPublishCommand(
            *messages,
            topic=topic,
            tag=tag,
            ordering_key=ordering_key,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            _publish_type=PublishType.PUBLISH,
        )
        return await self._basic_publish_batch(cmd, producer=self.config.producer)

    async def request(  # type: ignore[override]
        self,
        message: Any = None,
        topic: str = "",
        *,
        tag: str | None = None,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float = 3.0,  # noqa: ASYNC109  # FastStream's name
    ) -> RocketMQMessage:
        """Send a message and wait for what its handler returns; raises `TimeoutError`."""
        cmd = RocketMQPublishCommand(
            message,
            topic=topic,
            tag=tag,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            timeout=timeout,
            _publish_type=PublishType.REQUEST,
        )
        reply: RocketMQMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply


def _secured(settings: ClientSettings, security: BaseSecurity | None) -> ClientSettings:
    if security is None:
        return settings
    if isinstance(security, SASLPlaintext):
        keys = Credentials(access_key=security.username, secret_key=security.password)
        settings = replace(settings, credentials=keys)
    elif type(security) is not BaseSecurity:
        raise SetupError(
            "a RocketMQBroker takes BaseSecurity (TLS) or SASLPlaintext (access and secret key), "
            f"got {type(security).__name__}"
        )
    if security.use_ssl:
        settings = replace(settings, tls=security.ssl_context or ssl.create_default_context())
    return settings


# ---- routers


class RocketMQPublisher(ArgsContainer):
    """The arguments of a publisher of a `RocketMQRoute`: those of `RocketMQBroker.publisher`."""

    def __init__(self, topic: str, **options: Any) -> None:
        super().__init__(topic, **options)


class RocketMQRoute(SubscriberRoute):
    """A handler with the arguments of `RocketMQBroker.subscriber`, for a router."""

    def __init__(
        self,
        call: Callable[..., Any],
        topic: str,
        *,
        publishers: Iterable[RocketMQPublisher] = (),
        **options: Any,
    ) -> None:
        super().__init__(call, topic, publishers=publishers, **options)


class RocketMQRouter(RocketMQRegistrator, BrokerRouter[Any, RocketMQBrokerConfig]):
    """Subscribers and publishers that a broker includes."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[RocketMQRoute] = (),
        *,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[RocketMQRegistrator] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        include_in_schema: bool | None = None,
        ack_policy: AckPolicy = EMPTY,
        underlying_driver_annotations: Mapping[Any, Any] | None = None,
    ) -> None:
        super().__init__(
            handlers=handlers,
            config=RocketMQBrokerConfig(
                prefix=prefix,
                ack_policy=ack_policy,
                broker_dependencies=dependencies,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                include_in_schema=include_in_schema,
                underlying_driver_annotations=dict(underlying_driver_annotations or {}),
            ),
            routers=routers,
        )
