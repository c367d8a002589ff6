"""Administration of consumer groups (200, 201, 207, 225, 352, 353)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from orbitmq.broker.errors import ConfigNotSaved, Refused
from orbitmq.broker.groups import consumption
from orbitmq.broker.handlers.apart import answered
from orbitmq.broker.paging import PageRequest
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.topics import (
    CreateGroupList,
    GroupForbidden,
    SubscriptionGroupConfig,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.topics import (
    DeleteGroupRequest,
    GetAllGroupConfigRequest,
    GetAllGroupConfigResponse,
    GroupRequest,
    UpdateGroupForbiddenRequest,
)

log = logging.getLogger(__name__)


class Groups:
    """Makes, changes, shows and deletes groups."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.show_all,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.show,
            RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: self.forbid,
        }

    # Making and changing.

    def update(self, connection: Connection, request: Command) -> Command:
        self._apply(connection, decode_body(SubscriptionGroupConfig, request.body))
        return request.answer(ResponseCode.SUCCESS)

    def update_list(self, connection: Connection, request: Command) -> Command:
        """All of a list; a bad name or number refuses it as a whole."""
        asked = decode_body(CreateGroupList, request.body)
        for config in asked.group_config_list:
            self._parts.groups.check(config)
        for config in asked.group_config_list:
            self._apply(connection, config)
        return request.answer(ResponseCode.SUCCESS)

    def _apply(self, connection: Connection, config: SubscriptionGroupConfig) -> None:
        groups = self._parts.groups
        before = groups.get(config.group_name)
        after = groups.update(config, now=self._parts.clock.now())
        if after != before:
            log.info(
                "group created" if before is None else "group changed",
                extra={"group": config.group_name, "client": peer_of(connection).name},
            )
            if before is not None and consumption(before) != consumption(after):
                # Those who wait for messages are told what they may do now.
                self._parts.held.wake(group=config.group_name)

    def forbid(self, _: Connection, request: Command) -> Command:
        """Keep a group from pulling a topic, or let it again; or only say how it is."""
        asked = request.header(UpdateGroupForbiddenRequest)
        parts = self._parts
        if asked.readable is not None:
            parts.groups.forbid(
                asked.group,
                asked.topic,
                is_forbidden=not asked.readable,
                now=parts.clock.now(),
            )
            parts.held.wake(asked.topic, group=asked.group)
        body = GroupForbidden(
            group=asked.group,
            topic=asked.topic,
            readable=not parts.groups.is_forbidden(asked.group, asked.topic),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    # Deleting.

    async def delete(self, connection: Connection, request: Command) -> Command:
        """Forget a group, and its progress if that is asked for.

        Consumers of it that are online make it again with their next heartbeat. Progress that was
        forgotten does not come back after a crash: the answer waits for the disk.
        """
        asked = request.header(DeleteGroupRequest)
        parts = self._parts
        if parts.groups.delete(asked.group_name, now=parts.clock.now()) is not None:
            log.info(
                "group deleted",
                extra={"group": asked.group_name, "client": peer_of(connection).name},
            )
        if asked.clean_offset:
            parts.progress.remove_group(asked.group_name)
        parts.counters.forget_group(asked.group_name)
        if not parts.settings.auto_create_group:
            # Otherwise those who wait would only make it again.
            parts.held.wake(group=asked.group_name)
        if asked.clean_offset:
            await self._save_progress(asked.group_name)
        return request.answer(ResponseCode.SUCCESS)

    async def _save_progress(self, group: str) -> None:
        try:
            await self._parts.progress_saved()
        except ConfigNotSaved as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"group {group!r} is deleted, but its progress may be there again after a crash, "
                f"delete it once more: {error}",
            ) from error

    # Showing.

    def show(self, _: Connection, request: Command) -> Command:
        """One group. Apache's broker makes one that is not there by being asked for it."""
        group = request.header(GroupRequest).group
        config = self._parts.groups.get(group)
        if config is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"No group in this broker: {group!r}",
            )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(config))

    async def show_all(self, _: Connection, request: Command) -> Command:
        """All groups, or a page of them."""
        asked = request.header(GetAllGroupConfigRequest)
        page = self._parts.groups.page(
            PageRequest(asked.group_seq, asked.data_version, asked.max_group_num)
        )
        return await answered(
            request,
            page.table,
            GetAllGroupConfigResponse(total_group_num=page.total),
            entries=len(page.table.subscription_group_table),
        )
