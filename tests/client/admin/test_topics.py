"""Topics: listed, made, changed, deleted, looked into."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.topics import Permission, TopicKind
from orbitmq.client.errors import BadRequest, NotEffective, TopicNotFound
from orbitmq.client.routes import Queue
from orbitmq.wire.codes import RequestCode
from tests.support.client_admin import GROUP, forget_code

A0 = Queue("orders", "broker-a", 0)
B1 = Queue("orders", "broker-b", 1)


async def test_topics_are_listed_with_their_kind_and_queues(world):
    await world.consumer("c1")
    await world.die(A0, b"dead")
    await world.admin.topics.create("paid", message_type="FIFO", queues=3)

    listing = await world.admin.topics.list()

    assert listing.is_complete
    topics = {topic.name: topic for topic in listing}
    assert list(topics) == sorted(topics)
    assert topics["orders"].kind is TopicKind.NORMAL
    assert (topics["orders"].write_queues, topics["orders"].read_queues) == (4, 4)
    assert topics["orders"].permission.letters == "rw"
    assert topics["orders"].is_uniform
    assert topics["paid"].kind is TopicKind.FIFO
    assert topics[f"%RETRY%{GROUP}"].kind is TopicKind.RETRY
    assert topics[f"%DLQ%{GROUP}"].kind is TopicKind.DEAD_LETTER
    assert [part.broker for part in topics[f"%DLQ%{GROUP}"].brokers] == ["broker-a"]
    for name in ("TBW102", "SCHEDULE_TOPIC_XXXX", "broker-a", "DefaultCluster"):
        assert topics[name].kind is TopicKind.SYSTEM, name


async def test_a_new_topic_is_known_to_brokers_and_clients_when_the_call_returns(world):
    topic = await world.admin.topics.create(
        "new", write_queues=3, read_queues=5, permission="r", brokers=["broker-b"]
    )

    (part,) = topic.brokers
    assert (part.broker, part.write_queues, part.read_queues) == ("broker-b", 3, 5)
    assert part.permission is Permission.READ
    (route,) = (await world.admin.topics.route("new")).brokers
    assert (route.broker, route.write_queues, route.read_queues) == ("broker-b", 3, 5)
    assert route.permission.letters == "r"
    assert route.addresses == {0: str(world.cluster.brokers[1].address)}
    assert "new" not in world.cluster.brokers[0].parts.topics


async def test_a_topic_may_be_made_where_it_is_like_that_already_and_where_it_is_missing(world):
    topics = world.admin.topics
    await topics.create("new", queues=4, message_type="FIFO", brokers=["broker-a"])

    same = await topics.create("new", queues=4, message_type="FIFO", exist_ok=True)
    again = await topics.create("new", queues=4, exist_ok=True)

    assert [part.broker for part in same.brokers] == ["broker-a", "broker-b"]
    assert again.kind is TopicKind.FIFO
    other = await topics.create("other", queues=2, brokers=["broker-a"])
    more = await topics.create("other", queues=3, brokers=["broker-b"])
    assert (other.write_queues, more.write_queues) == (2, 3)


async def test_an_update_changes_what_is_given_and_leaves_the_rest(world):
    topics = world.admin.topics
    await topics.create("new", queues=4, permission="rw", message_type="DELAY")

    after = await topics.update("new", write_queues=2)

    assert {(each.write_queues, each.read_queues) for each in after.brokers} == {(2, 4)}
    assert after.permission.letters == "rw"
    assert (await topics.get("new")).kind is TopicKind.DELAY
    only_a = await topics.update("new", permission="w", brokers=["broker-a"])
    assert [each.broker for each in only_a.brokers] == ["broker-a"]
    found = await topics.get("new")
    assert {each.broker: each.permission.letters for each in found.brokers} == {
        "broker-a": "w",
        "broker-b": "rw",
    }
    assert not found.is_uniform


async def test_an_ordered_topic_is_known_to_name_servers(world):
    await world.admin.topics.create("new", queues=2, ordered=True)

    assert await world.admin.config.ordered_topics() == {"new": "broker-a:2;broker-b:2"}
    assert (await world.admin.topics.get("new")).is_ordered
    await world.admin.topics.update("new", ordered=False, brokers=["broker-a"])
    assert await world.admin.config.ordered_topics() == {"new": "broker-b:2"}
    await world.admin.topics.delete("new")
    assert await world.admin.config.ordered_topics() == {}


async def test_a_deleted_topic_is_gone_from_brokers_and_routes(world):
    await world.fill(A0, 2)
    await world.admin.groups.create(GROUP)
    await world.report(A0, 1)

    await world.admin.topics.delete("orders")

    for broker in world.cluster.brokers:
        assert "orders" not in broker.parts.topics
    assert world.progress(A0) is None
    with pytest.raises(TopicNotFound):
        await world.admin.topics.route("orders")
    with pytest.raises(TopicNotFound, match="orbitmq topic create orders"):
        await world.admin.topics.get("orders")
    with pytest.raises(TopicNotFound):
        await world.admin.topics.delete("orders")


async def test_of_a_topic_that_is_not_there_the_one_is_named_that_was_perhaps_meant(world):
    topics = world.admin.topics
    for call in (topics.get, topics.route, topics.status, topics.delete, topics.update):
        with pytest.raises(TopicNotFound, match=r"do you mean 'orders'\? If not, create") as raised:
            await call("ordres")
        assert raised.value.similar == "orders"
    with pytest.raises(TopicNotFound) as unlike:
        await topics.get("refunds")
    assert (unlike.value.similar, "do you mean" in str(unlike.value)) == (None, False)


async def test_a_topic_that_clients_do_not_get_to_see_is_an_error(world, monkeypatch):
    monkeypatch.setattr("orbitmq.client.admin.topics.VISIBLE_WITHIN", 0.3)

    async def nothing(*_):
        return None

    for broker in world.cluster.brokers:
        # The name server is not told.
        monkeypatch.setattr(broker.parts.registration, "_register", nothing)

    with pytest.raises(NotEffective, match="the route does not have broker-"):
        await world.admin.topics.create("new")


async def test_a_broker_that_cannot_show_one_topic_shows_all(world, monkeypatch):
    # 4.9 does not know the request.
    for broker in world.cluster.brokers:
        forget_code(monkeypatch, broker, RequestCode.GET_TOPIC_CONFIG)

    await world.admin.topics.create("new", queues=3)

    assert (await world.admin.topics.get("new")).write_queues == 6
    await world.admin.topics.delete("new")
    with pytest.raises(TopicNotFound):
        await world.admin.topics.get("new")


async def test_the_status_shows_every_queue(world):
    records = await world.fill(A0, 3)
    await world.fill(B1, 1)

    status = await world.admin.topics.status("orders")

    assert status.messages == 4
    by_queue = {each.queue: each for each in status.queues}
    assert len(by_queue) == 4
    assert (by_queue[A0].min_offset, by_queue[A0].max_offset) == (0, 3)
    assert by_queue[A0].first_stored_at == pytest.approx(records[0].stored_at)
    assert by_queue[A0].last_stored_at == pytest.approx(records[2].stored_at)
    empty = by_queue[Queue("orders", "broker-a", 1)]
    assert (empty.messages, empty.first_stored_at, empty.last_stored_at) == (0, None, None)
    assert status.first_stored_at == pytest.approx(records[0].stored_at)


async def test_groups_of_a_topic_are_those_online_and_those_with_progress(world):
    await world.consumer("c1", group="online")
    await world.admin.groups.create("before")
    await world.report(B1, 0, group="before")

    assert await world.admin.topics.groups("orders") == ("before", "online")


async def test_rates_count_what_came_in_and_who_took_it(world):
    await world.fill(A0, 5)
    await world.fill(B1, 5)
    await world.consumer("c1")
    client = await world.client("broker-a")
    await client.pull("orders", consumer_group=GROUP)

    rates = await world.admin.topics.rates("orders")

    assert rates.incoming.messages_today == 10
    assert rates.outgoing[GROUP].messages_today == 5


def test_permissions_are_written_in_letters_and_numbers():
    assert Permission.of("rw") is Permission.READ_WRITE
    assert Permission.of("WR") is Permission.READ_WRITE
    assert Permission.of("6") is Permission.READ_WRITE
    assert Permission.of(4) is Permission.READ
    assert Permission.of("-").letters == "-"
    for wrong in ("", "x", 8, -1, True, "rwx"):
        with pytest.raises(BadRequest, match="permission"):
            Permission.of(wrong)
