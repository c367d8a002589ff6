"""Who is there: heartbeats, goodbyes, the members of a group (34, 35, 38, 46)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from orbitmq.broker import names
from orbitmq.broker.clients import LONGEST_ID, Channel, Client
from orbitmq.broker.compileallowance import Postponed
from orbitmq.broker.consumers import GroupChange
from orbitmq.broker.errors import Refused
from orbitmq.broker.findings import FIELD, findings_words
from orbitmq.broker.parts import Parts
from orbitmq.broker.producers import LONGEST_NAME
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result, refusal
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.membership import (
    CheckClientRequest,
    ConsumerData,
    HeartbeatData,
    LanguageName,
    ProducerData,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.membership import (
    GetConsumerListRequest,
    HeartbeatResponse,
    NotifyConsumerIdsChangedRequest,
    UnregisterClientRequest,
)

log = logging.getLogger(__name__)

#: Of a name that somebody else has chosen, this much is shown and kept.
_SHOWN = 128


class Membership:
    """Keeps the tables of clients, and tells groups about their members."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        #: Groups that are refused, which all their members hear every half minute.
        self._refused = Reminders()
        #: Groups and connections that say more than is kept, as often.
        self._too_much = Reminders()
        #: Connections whose consumer groups say more together.
        self._crowded = Reminders()
        parts.on_connection_closed(self.connection_closed)
        parts.background.every(parts.settings.scan_interval, self.scan)

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_config,
        }

    # Coming.

    def heartbeat(self, connection: Connection, request: Command) -> Command:
        """Note all groups of a client."""
        data = decode_body(HeartbeatData, request.body)
        if len(data.client_id) > LONGEST_ID:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"a client id of {len(data.client_id)} characters: {LONGEST_ID} are allowed",
            )
        client = Client(
            data.client_id,
            LanguageName[request.language.name],
            request.version,
            str(connection.remote),
        )
        wants_subscriptions = False
        refusal: Refused | None = None
        is_crowded = False
        for consumer in data.consumer_data_set:
            short, too_long = self._within_bounds(client, consumer)
            taken, too_much = self._within_room(connection, client, short)
            refusal = refusal or too_long or too_much
            is_crowded |= too_much is not None
            if taken is not None:
                wants_subscriptions |= self._consumer(connection, client, data, taken)
        if data.consumer_data_set and not data.without_sub:
            self._parts.consumers.note_crowded(connection, is_crowded=is_crowded)
        too_many = self._producers(connection, client, data.producer_data_set)
        if (refusal := refusal or too_many) is not None:
            # What is within bounds is noted. Clients log what the rest is answered.
            raise refusal
        # A full heartbeat is told that everything is new, as Apache does: who sends those does
        # not look, and who is about to send short ones begins with a full one.
        is_short = data.heartbeat_fingerprint != 0
        return request.answer(
            ResponseCode.SUCCESS,
            HeartbeatResponse(
                supports_v2=True, is_sub_change=wants_subscriptions if is_short else True
            ),
        )

    def _within_bounds(
        self, client: Client, consumer: ConsumerData
    ) -> tuple[ConsumerData, Refused | None]:
        """What is taken over of a group's subscriptions, and why the others are not."""
        too_long = self._parts.filters.too_long
        refusals = [too_long(each) for each in consumer.subscription_data_set]
        refusal = next(filter(None, refusals), None)
        if refusal is None:
            return consumer, None
        name = consumer.group_name[:_SHOWN]
        if count := self._too_much.note(name, self._parts.clock.monotonic()):
            log.warning(
                "heartbeat with a subscription that is too long: %s (time %d)",
                refusal,
                count,
                extra={"group": name, "client": client.id[:_SHOWN]},
            )
        taken = tuple(
            each
            for each, refused in zip(consumer.subscription_data_set, refusals, strict=True)
            if refused is None
        )
        return msgspec.structs.replace(consumer, subscription_data_set=taken), refusal

    def _within_room(
        self, connection: Connection, client: Client, consumer: ConsumerData
    ) -> tuple[ConsumerData | None, Refused | None]:
        """What is taken over of a group for which its connection may have no room, and why."""
        consumers = self._parts.consumers
        taken = consumers.within_room(connection, consumer)
        if taken is consumer:
            return consumer, None
        name = consumer.group_name[:_SHOWN]
        wanted = len(consumer.subscription_data_set)
        left_out = wanted - (0 if taken is None else len(taken.subscription_data_set))
        refusal = Refused(
            ResponseCode.INVALID_PARAMETER,
            f"{left_out} of {wanted} subscriptions of group {names.shown(name)!r} are left out: "
            "what one connection says about its consumer groups may take "
            f"{consumers.connection_room} bytes (max_consumer_bytes)",
        )
        if count := self._crowded.note(connection, self._parts.clock.monotonic()):
            log.warning(
                "heartbeat with too much about consumer groups: %s (time %d)",
                refusal,
                count,
                extra={"group": name, "client": client.id[:_SHOWN]},
            )
        return taken, refusal

    def _producers(
        self, connection: Connection, client: Client, producers: Sequence[ProducerData]
    ) -> Refused | None:
        """Note the groups that a client sends for, as many as one connection has room for."""
        table = self._parts.producers
        now = self._parts.clock.monotonic()
        noted = 0
        for producer in producers[: table.most]:
            if table.has_room(producer.group_name, connection):
                table.heartbeat(producer.group_name, connection, client, now)
                noted += 1
        if noted == len(producers):
            return None
        refusal = Refused(
            ResponseCode.INVALID_PARAMETER,
            f"{len(producers) - noted} of {len(producers)} producer groups are left out: a "
            f"connection may be in {table.most} (max_producer_groups), with names of up to "
            f"{LONGEST_NAME} characters",
        )
        if count := self._too_much.note(connection, now):
            log.warning(
                "heartbeat with too many producer groups: %s (time %d)",
                refusal,
                count,
                extra={"client": client.id[:_SHOWN]},
            )
        return refusal

    def _consumer(
        self, connection: Connection, client: Client, data: HeartbeatData, consumer: ConsumerData
    ) -> bool:
        """Note one group; whether the client has to say again what it wants."""
        parts = self._parts
        now = parts.clock.now()
        group = parts.groups.find(consumer.group_name, now=now)
        name = consumer.group_name[:_SHOWN]
        if group is None:
            if count := self._refused.note(name, parts.clock.monotonic()):
                log.warning(
                    "heartbeat of a group that does not exist and may not be made: %s (time %d)",
                    parts.groups.absent(consumer.group_name),
                    count,
                    extra={"group": name, "client": client.id[:_SHOWN]},
                )
            return False
        self._refused.end(name)
        parts.topics.ensure_retry(
            consumer.group_name,
            group.retry_queue_nums,
            is_order=self._is_order(consumer),
            unit_mode=consumer.unit_mode,
            now=now,
        )
        result = parts.consumers.heartbeat(
            connection,
            client,
            consumer,
            now=parts.clock.monotonic(),
            notifies=group.notify_consumer_ids_changed_enable,
            fingerprint=data.heartbeat_fingerprint,
            without_subscriptions=data.without_sub,
        )
        if result.change is not None:
            self._register_filters(result.change.group, connection)
            self._tell(result.change)
        return result.wants_subscriptions

    def _is_order(self, consumer: ConsumerData) -> bool:
        return any(
            self._parts.topics.is_order(each.topic) for each in consumer.subscription_data_set
        )

    def _register_filters(self, group: str, payer: Channel) -> None:
        subscriptions = self._parts.consumers.subscriptions(group).values()
        self._parts.filters.register(group, subscriptions, self._parts.clock.now(), payer)

    # Going.

    def unregister(self, connection: Connection, request: Command) -> Command:
        """A client says goodbye to a group, or to one of each kind."""
        asked = request.header(UnregisterClientRequest)
        if asked.producer_group:
            self._parts.producers.leave(asked.producer_group, connection)
        if asked.consumer_group:
            change = self._parts.consumers.leave(asked.consumer_group, connection)
            self._left((change,) if change is not None else ())
        return request.answer(ResponseCode.SUCCESS)

    def connection_closed(self, connection: Connection) -> None:
        """Whoever came over this connection is gone."""
        self._too_much.end(connection)
        self._crowded.end(connection)
        self._parts.producers.close(connection)
        self._left(self._parts.consumers.close(connection))

    def scan(self) -> None:
        """Let go of clients that were silent for too long, and report groups that disagree."""
        parts = self._parts
        now = parts.clock.monotonic()
        silent, changes = parts.consumers.expire(now)
        self._left(changes)
        for channel in dict.fromkeys((*silent, *parts.producers.expire(now))):
            if isinstance(channel, Connection):
                channel.close("no heartbeat came in time")
        parts.locks.forget_expired(now)
        for event in parts.disagreements.check(now):
            if event.is_resolved:
                log.info("resolved: %s", event.finding)
            else:
                log.warning("%s", event.finding)

    def _left(self, changes: Iterable[GroupChange]) -> None:
        parts = self._parts
        for change in changes:
            if change.is_gone:
                parts.filters.leave(change.group, parts.clock.now())
            else:
                # For those who stay.
                payer = parts.consumers.members(change.group)[0].channel
                self._register_filters(change.group, payer)
            self._tell(change)

    def _tell(self, change: GroupChange) -> None:
        """Have the members of a group share the queues anew, by what the group wants now."""
        if not change.is_gone:
            # Those who wait would go on leaving out what the group did not want before.
            for topic in change.topics_added + change.topics_replaced + change.topics_removed:
                self._parts.held.wake(topic, group=change.group)
        for client in change.joined:
            log.info("consumer joined", extra={"group": change.group, "client": client.id})
        for client in change.left:
            log.info("consumer left", extra={"group": change.group, "client": client.id})
        if not self._parts.settings.notify_consumers:
            return
        header = NotifyConsumerIdsChangedRequest(consumer_group=change.group)
        may_consume = self._parts.access.may_consume
        for channel in change.notify:
            if not may_consume(channel, change.group):
                continue
            self._parts.notify(channel, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)

    # Asking.

    def consumer_list(self, _: Connection, request: Command) -> Command:
        asked = request.header(GetConsumerListRequest)
        found = self._parts.consumers.consumer_list(asked.consumer_group)
        if found is None:
            # Apache's brokers say only that there is nobody. But whoever asks has just sent a
            # heartbeat, which says nothing either, and would ask for ever.
            raise self._nobody(asked.consumer_group)
        # As of the last scan: all members ask, again and again, and comparing them takes its time.
        wrong = self._parts.disagreements.open_findings(asked.consumer_group)
        return request.answer(
            ResponseCode.SUCCESS,
            extra={FIELD: findings_words(wrong)} if wrong else None,
            body=encode_body(found),
        )

    def _nobody(self, name: str) -> Refused:
        groups = self._parts.groups
        if groups.missing(name) or (
            name not in groups and groups.is_full_for_now(self._parts.clock.now())
        ):
            return groups.absent(name)
        return Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}")

    def check_config(self, connection: Connection, request: Command) -> Result:
        """Whether a subscription can be served, before a consumer begins with it."""
        return self._check_config(connection, request)

    def _check_config(
        self, connection: Connection, request: Command, *, has_waited: bool = False
    ) -> Result:
        asked = decode_body(CheckClientRequest, request.body)
        subscription = asked.subscription_data
        if subscription is not None:
            try:
                self._parts.filters.check(
                    subscription.sub_string,
                    subscription.expression_type,
                    connection,
                    has_waited=has_waited,
                )
            except Postponed as postponed:
                return self._check_config_later(connection, request, postponed.seconds)
        return request.answer(ResponseCode.SUCCESS)

    def _check_config_later(
        self, connection: Connection, request: Command, seconds: float
    ) -> Result:
        access = self._parts.access
        rules = access.version

        def check() -> None:
            if not connection.is_open:
                return
            try:
                access.check_again(connection, request, since=rules)
                answer = self._check_config(connection, request, has_waited=True)
            except Refused as refused:
                answer = request.answer(refused.code, remark=str(refused))
            except Exception as error:  # noqa: BLE001  # as the dispatcher does
                answer = refusal(request, error)
            if answer is not LATER and answer is not None:
                connection.reply(request, answer)

        self._parts.pacing.later(connection, check, after=seconds)
        return LATER
