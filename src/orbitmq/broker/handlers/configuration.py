"""Settings shown and changed, and cleaning on demand (25, 26, 306, 316, 329)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from orbitmq.broker.configuration import BlackListed, changed, shown
from orbitmq.broker.dataversion import first_version, next_version, version_text
from orbitmq.broker.errors import Refused, SettingError
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.properties import format_properties, parse_properties
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.stats import GetBrokerConfigResponse

log = logging.getLogger(__name__)


class Configuration:
    """Looks after a running broker."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._version = first_version(parts.clock.now())

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.UPDATE_BROKER_CONFIG: self.update,
            RequestCode.GET_BROKER_CONFIG: self.show,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean_queues,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clean_topics,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.clean_log,
        }

    # Settings.

    def show(self, _: Connection, request: Command) -> Command:
        text = format_properties(shown(self._parts.settings, self._parts.address))
        return request.answer(
            ResponseCode.SUCCESS,
            GetBrokerConfigResponse(version=version_text(self._version)),
            body=text.encode(),
        )

    def update(self, connection: Connection, request: Command) -> Command:
        """Change settings, all that are named or none, until the broker stops."""
        parts = self._parts
        try:
            wanted = parse_properties(bytes(request.body).decode())
            settings = changed(parts.settings, parts.address, wanted)
        except UnicodeDecodeError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"not UTF-8: {error}") from error
        except BlackListed as refused:
            raise Refused(ResponseCode.NO_PERMISSION, str(refused)) from refused
        except SettingError as refused:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(refused)) from refused
        before = parts.settings
        if settings == before:
            return request.answer(ResponseCode.SUCCESS)
        now = parts.clock.now()
        self._version = next_version(self._version, now)
        parts.change_settings(settings)
        log.warning(
            "settings changed until the broker stops: %s",
            ", ".join(f"{name}={value}" for name, value in sorted(wanted.items())),
            extra={"client": peer_of(connection).name},
        )
        if settings.permission != before.permission:
            # What name servers are told of every topic depends on it.
            parts.topics.renew_version(now=now)
            parts.registration.register_all()
        if (settings.permission, settings.pull) != (before.permission, before.pull):
            # Those who wait for messages are told what they may do now.
            parts.held.wake()
        return request.answer(ResponseCode.SUCCESS)

    # Cleaning. A run of it is bounded; the usual ones go on with what is left.

    def clean_queues(self, _: Connection, request: Command) -> Command:
        """Forget the entries of messages that are gone from the log."""
        self._parts.store.clean()
        return request.answer(ResponseCode.SUCCESS)

    def clean_log(self, _: Connection, request: Command) -> Command:
        """Delete expired files of the log now, whatever the hour."""
        self._parts.store.ask_for_cleaning()
        self._parts.store.clean()
        return request.answer(ResponseCode.SUCCESS)

    def clean_topics(self, _: Connection, request: Command) -> Command:
        """Forget the queues of topics that do not exist any more."""
        parts = self._parts
        unused = sorted(
            {
                queue.topic
                for queue in parts.store.queues()
                if queue.topic not in parts.topics and not parts.topics.is_system(queue.topic)
            }
        )
        if unused:
            parts.turns.finish()
        for topic in unused:
            parts.store.delete_topic(topic)
            log.info("queues without a topic deleted", extra={"topic": topic})
        return request.answer(ResponseCode.SUCCESS)
