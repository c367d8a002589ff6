"""Settings of running servers, key-values of name servers, and cleaning on demand."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.arguments import explained
from orbitmq.client.admin.requests import AdminRequests, BrokerNode
from orbitmq.client.errors import BadRequest, NotEffective
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    AddWritePermResponse,
    BrokerPermissionRequest,
    GetKVConfigResponse,
    GetKVListRequest,
    KVConfigRequest,
    PutKVConfigRequest,
    WipeWritePermResponse,
)
from orbitmq.wire.javajson import decode_body, format_properties, parse_properties

#: The namespace of ordered topics: `broker-a:4;broker-b:4` by topic.
ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"

_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})


@explained()
class AsyncConfig:
    """Reads and changes settings of running servers."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking

    async def broker(self, broker: str) -> dict[str, str]:
        """All settings of a broker, named as `name`, `name/id` or by its address."""
        return await self._broker_config((await self._asking.topology()).find(broker))

    async def update_broker(self, broker: str, changes: Mapping[str, str]) -> dict[str, str]:
        """Change settings of a running broker and return all settings, read back.

        Raises `BrokerRefused` for a setting that cannot be changed, `NotEffective` when the broker
        shows another value afterwards. OrbitMQ's broker loses the change when it stops.
        """
        wanted = _texts(changes)
        node = (await self._asking.topology()).find(broker)
        await self._asking.ask(
            node.address,
            RequestCode.UPDATE_BROKER_CONFIG,
            body=format_properties(wanted).encode(),
        )
        after = await self._broker_config(node)
        _check(f"changing settings of {node}", wanted, after)
        return after

    async def _broker_config(self, node: BrokerNode) -> dict[str, str]:
        answer = await self._asking.ask(node.address, RequestCode.GET_BROKER_CONFIG)
        return parse_properties(bytes(answer.body).decode("utf-8", "replace"))

    async def set_writable(self, broker: str, writable: bool) -> int:
        """Hide a broker from producers or show it again; returns the number of topics.

        Applies to every name server, until the broker registers its topics with another state.
        """
        node = (await self._asking.topology()).find(broker)
        header = BrokerPermissionRequest(broker_name=node.broker)

        what = f"making {node.broker} {'' if writable else 'not '}writable"
        servers = self._asking.name_servers
        if writable:
            added = await self._asking.change(
                what, servers, RequestCode.ADD_WRITE_PERM_OF_BROKER, header
            )
            return max(each.header(AddWritePermResponse).add_topic_count for each in added.values())
        wiped = await self._asking.change(
            what, servers, RequestCode.WIPE_WRITE_PERM_OF_BROKER, header
        )
        return max(each.header(WipeWritePermResponse).wipe_topic_count for each in wiped.values())

    async def clean_expired_queues(self, *brokers: str) -> tuple[str, ...]:
        """Make brokers delete queue entries of expired messages; returns the brokers' names."""
        return await self._everywhere(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, brokers)

    async def clean_unused_topics(self, *brokers: str) -> tuple[str, ...]:
        """Make brokers delete the queues of deleted topics; returns the brokers' names."""
        return await self._everywhere(RequestCode.CLEAN_UNUSED_TOPIC, brokers)

    async def delete_expired_log(self, *brokers: str) -> tuple[str, ...]:
        """Make brokers delete expired log files now; returns the brokers' names."""
        return await self._everywhere(RequestCode.DELETE_EXPIRED_COMMITLOG, brokers)

    async def _everywhere(self, code: RequestCode, brokers: tuple[str, ...]) -> tuple[str, ...]:
        masters = (await self._asking.topology()).masters(brokers or None)

        done = await self._asking.change(code.name.lower().replace("_", " "), masters, code)
        return tuple(map(str, done))

    async def name_server(self, address: str | None = None) -> dict[str, str]:
        """The settings of one name server, by default the first."""
        answer = await self._asking.ask(self._server(address), RequestCode.GET_NAMESRV_CONFIG)
        return parse_properties(bytes(answer.body).decode("utf-8", "replace"))

    async def update_name_servers(self, changes: Mapping[str, str]) -> None:
        """Change settings of every name server, and read them back."""
        wanted = _texts(changes)
        body = format_properties(wanted).encode()

        async def change(address: Address) -> None:
            await self._asking.ask(address, RequestCode.UPDATE_NAMESRV_CONFIG, body=body)
            after = await self.name_server(str(address))
            _check(f"changing settings of {address}", wanted, after)

        outcomes = await self._asking.each(self._asking.name_servers, change)
        outcomes.check("changing settings of name servers")

    def _server(self, address: str | None) -> Address:
        known = self._asking.name_servers
        if address is None:
            return known[0]
        for each in known:
            if str(each) == address:
                return each
        raise BadRequest(
            f"{address!r} is none of the name servers in use: {', '.join(map(str, known))}"
        )

    async def values(self, namespace: str) -> dict[str, str]:
        """All values of a namespace by key."""
        answer = await self._asking.ask_name_server(
            RequestCode.GET_KVLIST_BY_NAMESPACE,
            GetKVListRequest(namespace=namespace),
            accept=_FOUND_OR_NOT,
        )
        return dict(decode_body(KVTable, answer.body or b"{}").table)

    async def value(self, namespace: str, key: str) -> str | None:
        """One value, or None."""
        answer = await self._asking.ask_name_server(
            RequestCode.GET_KV_CONFIG,
            KVConfigRequest(namespace=namespace, key=key),
            accept=_FOUND_OR_NOT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        return answer.header(GetKVConfigResponse).value

    async def put_value(self, namespace: str, key: str, value: str) -> None:
        """Store a value at every name server."""
        for name, text in (("namespace", namespace), ("key", key), ("value", value)):
            if not text:
                raise BadRequest(f"{name} must not be empty")
        header = PutKVConfigRequest(namespace=namespace, key=key, value=value)

        await self._asking.change(
            f"storing {namespace}/{key}",
            self._asking.name_servers,
            RequestCode.PUT_KV_CONFIG,
            header,
        )

    async def delete_value(self, namespace: str, key: str) -> None:
        """Delete a value at every name server."""
        header = KVConfigRequest(namespace=namespace, key=key)

        await self._asking.change(
            f"deleting {namespace}/{key}",
            self._asking.name_servers,
            RequestCode.DELETE_KV_CONFIG,
            header,
        )

    async def ordered_topics(self) -> dict[str, str]:
        """The queues of ordered topics, `broker-a:4;broker-b:4` by topic."""
        return await self.values(ORDER_NAMESPACE)


def _texts(changes: Mapping[str, str]) -> dict[str, str]:
    if not changes:
        raise BadRequest("no setting is named; give at least one key and its value")
    for name, value in changes.items():
        if not name or not isinstance(value, str):
            raise BadRequest(f"a setting is a name and a text, got {name!r}: {value!r}")
    return dict(changes)


def _check(what: str, wanted: Mapping[str, str], after: Mapping[str, str]) -> None:
    problems = [
        f"{name} is {after.get(name)!r} and not {value!r}"
        for name, value in wanted.items()
        if not _same(after.get(name), value)
    ]
    if problems:
        raise NotEffective(what, problems)


def _same(shown: str | None, wanted: str) -> bool:
    """Whether a server shows the value that was set; the spelling may differ."""
    if shown is None:
        return False
    if shown.strip().lower() == wanted.strip().lower():
        return True
    try:
        return float(shown) == float(wanted)
    except ValueError:
        return False
