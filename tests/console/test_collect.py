"""Looks at the cluster: bounded in requests, and with gaps that are shown as such."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.groups import GroupSettings
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.console import collect
from orbitmq.console.app import Console
from orbitmq.console.collect import BrokerTables, Collector, GroupSample, Pace, Poller, TopicPart
from orbitmq.console.faults import Observation, find_faults
from orbitmq.console.history import WINDOW, RateMeter
from orbitmq.console.settings import ConsoleError
from orbitmq.remoting.settings import RequestTimedOut
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import TopicRequest
from tests.console.conftest import OTHER, QUEUE, die
from tests.support.client_admin import forget_code
from tests.support.consoles import Browser, console_of, settings_for


async def test_a_broker_that_cannot_be_reached_is_a_fault_and_the_others_are_shown(desk):
    await desk.world.register_ghost("broker-z")

    content = await desk.browser.until(
        "/now", lambda found: len(found["brokers"]) == 3 and found["fault_count"]
    )

    ghost = next(each for each in content["brokers"] if each["name"] == "broker-z")
    assert not ghost["is_up"]
    faults = [fault for kind in content["faults"] for fault in kind["faults"]]
    texts = [fault["text"] for fault in faults if fault["subject"] == "broker-z"]
    assert any("cannot be reached" in text for text in texts)
    assert (await desk.browser.get("/topics?search=orders"))["total"] == 1


async def test_an_older_broker_without_a_table_of_groups_still_lists_them(desk, monkeypatch):
    for broker in desk.cluster.brokers:
        forget_code(monkeypatch, broker, RequestCode.GET_BROKER_CONSUME_STATS)
    await desk.world.admin.groups.create("billing")
    await desk.world.fill(QUEUE, 3)
    await desk.world.report(QUEUE, 1)

    found = await desk.browser.until("/groups", lambda found: found["rows"][0]["lag"] == 2)

    assert found["rows"][0]["name"] == "billing"


async def test_a_cluster_that_went_away_is_shown_as_it_was_with_the_problem():
    cluster = AsyncEmbeddedCluster()
    await cluster.start()
    try:
        async with console_of(cluster) as browser:
            await cluster.stop()
            content = await browser.until("/now", lambda found: found["problem"])

            assert "no name server answers" in content["problem"]
            assert content["brokers"]
            assert (await browser.get("/topics"))["total"] > 0
    finally:
        await cluster.stop()


async def test_without_a_cluster_the_page_is_served_and_says_why(unused_tcp_port):
    async with Console(settings_for(f"127.0.0.1:{unused_tcp_port}")) as console:
        browser = Browser(console)
        content = await browser.until("/now", lambda found: found["problem"])
        page = await browser.ask("GET", "/")
        topics = await browser.get("/topics", 503)

    assert content["at"] is None
    assert page.status == 200
    assert "no name server answers" in topics["error"]


async def test_a_look_takes_a_bounded_number_of_requests(watch, monkeypatch):
    usual, asked = Engine.ask, []

    async def counted(self, *words, **options):
        asked.append(self)
        return await usual(self, *words, **options)

    monkeypatch.setattr(Engine, "ask", counted)
    monkeypatch.setattr(collect, "PER_LOOK", 5)
    monkeypatch.setattr(collect, "LETTERS", 10)
    world = watch.world
    for number in range(60):
        group, queue = f"group-{number}", Queue(f"topic-{number}", "broker-a", 0)
        await watch.cluster.create_topic(queue.topic, queues=1)
        await watch.admin.groups.create(group)
        await world.fill(queue, 1)
        await world.report(queue, 0, group)
    await world.consumer("dying", group="group-0")
    await die(world, 40, group="group-0")
    tables = BrokerTables(watch.engine)
    collector = Collector(watch.admin, tables, watch.cluster.clock)

    looks, requests = [], []
    for _ in range(8):
        asked.clear()
        looks.append(await collector.look())
        requests.append(len(asked))

    assert looks[-1].lag >= 60
    assert all(look.open_letters in (0, 40) for look in looks)
    assert (looks[-1].open_letters, looks[-1].unknown_letters) == (40, 0)
    # The members of each group alone would take 240 requests.
    assert max(requests) < 150
    # When all letters are known and no topic has grown, none is looked up.
    assert looks[-1].requests < 40


async def test_letters_count_as_open_until_they_are_known_to_be_resent(watch, monkeypatch):
    monkeypatch.setattr(collect, "LETTERS", 7)
    await watch.world.consumer("dying")
    await die(watch.world, 24)
    await watch.admin.dead_letters.resend("billing")
    clock = watch.cluster.clock
    collector = Collector(watch.admin, BrokerTables(watch.engine), clock)

    looks, faults = [], []
    for _ in range(5):
        looks.append(await collector.look())
        found = find_faults(Observation(snapshot=looks[-1], now=clock.now()))
        faults.append([each.text for each in found if each.kind == "dead letters"])

    counts = [(look.open_letters, look.open_last_hour, look.unknown_letters) for look in looks]
    assert counts == [(17,) * 3, (10,) * 3, (3,) * 3, (0,) * 3, (0,) * 3]
    assert (looks[-1].dead_letters, looks[-1].resent_letters) == (24, 24)
    unknown = "died in the last hour, and it is not known whether they were resent"
    assert faults == [*([f"{number} messages {unknown}"] for number in (17, 10, 3)), [], []]


async def test_letters_are_all_looked_up_when_the_clocks_of_brokers_differ(watch):
    await watch.world.consumer("dying")
    collector = Collector(watch.admin, BrokerTables(watch.engine), watch.cluster.clock)

    looks = []
    for _ in range(3):
        watch.cluster.advance(0.5)
        await watch.world.die(OTHER, b"of the broker that is ahead", UNIQ_KEY="7F" * 16)
        watch.cluster.advance(-0.5)
        looks.append(await collector.look())
        await watch.world.die(QUEUE, b"of the other one", UNIQ_KEY="7F" * 16)
        looks.append(await collector.look())

    assert [look.open_letters for look in looks] == [1, 2, 3, 4, 5, 6]
    assert {look.unknown_letters for look in looks} == {0}


async def test_deleted_letters_are_no_longer_counted(watch):
    await watch.world.consumer("dying")
    collector = Collector(watch.admin, BrokerTables(watch.engine), watch.cluster.clock)

    async def delete_at(broker):
        client = await watch.world.client(broker)
        header = TopicRequest(topic="%DLQ%billing")
        answer = await client.connection.request(RequestCode.DELETE_TOPIC_IN_BROKER, header)
        assert answer.code == 0, answer.remark

    async def counts():
        look = await collector.look()
        return look.dead_letters, look.open_letters, look.unknown_letters

    await die(watch.world, 2)
    await watch.world.die(OTHER, b"of the other broker", UNIQ_KEY="7F" * 16)
    assert await counts() == (3, 3, 0)
    await delete_at("broker-b")
    assert await counts() == (2, 2, 0)
    # A queue that is created again gives its offsets to other letters.
    await delete_at("broker-a")
    await die(watch.world, 1, start=2)
    assert await counts() == (1, 1, 0)
    await delete_at("broker-a")
    assert await counts() == (0, 0, 0)


async def test_letters_are_looked_up_without_a_broker_that_does_not_answer(watch, monkeypatch):
    await watch.world.consumer("dying")
    collector = Collector(watch.admin, BrokerTables(watch.engine), watch.cluster.clock)

    async def counts():
        look = await collector.look()
        return look.dead_letters, look.open_letters, look.resent_letters, look.unknown_letters

    usual, hung = Engine.ask, watch.cluster.brokers[1].address
    missed = []

    async def ask(self, where, code, *words, **options):
        if where != hung:
            return await usual(self, where, code, *words, **options)
        missed.append(code)
        raise RequestTimedOut(where, code, 5.0)

    await die(watch.world, 2)
    await watch.world.die(OTHER, b"of the other broker", UNIQ_KEY="7F" * 16)
    assert await counts() == (3, 3, 0, 0)
    with monkeypatch.context() as silent:
        silent.setattr(Engine, "ask", ask)
        assert await counts() == (2, 2, 0, 0)
        await die(watch.world, 1, start=2)
        assert await counts() == (3, 3, 0, 0)
    # Each takes as long as its timeout.
    assert not {RequestCode.PULL_MESSAGE, RequestCode.QUERY_MESSAGE}.intersection(missed)
    assert await counts() == (4, 4, 0, 0)
    await watch.admin.dead_letters.resend("billing")
    await collector.look()
    assert await counts() == (4, 0, 4, 0)


async def test_history_and_audit_outlive_the_console(tmp_path):
    file = tmp_path / "history.sqlite"
    async with AsyncEmbeddedCluster() as cluster:
        async with console_of(cluster, history=file) as browser:
            await browser.post("/topics", {"name": "orders", "queues": 1})
        cluster.advance(3 * 3600.0)
        async with console_of(cluster, history=file) as browser:
            lines = (await browser.get("/audit"))["lines"]
            day = await browser.get("/charts?minutes=1440&series=cluster/lag")
            hour = await browser.get("/charts?minutes=60&series=cluster/lag")
        command = f"orbitmq topic create orders --queues 1 --name-server {cluster.name_server}"

    assert [line["command"] for line in lines] == [command]
    first, last = day["series"]["cluster/lag"][0][0], day["series"]["cluster/lag"][-1][0]
    assert last - first > 2.5 * 3600
    assert len(hour["series"]["cluster/lag"]) >= 1


async def test_an_address_that_is_in_use_is_refused_with_its_port():
    async with AsyncEmbeddedCluster() as cluster:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConsoleError, match=str(port)):
                await Console(settings_for(cluster, port=port)).start()


async def test_stopping_ends_streams_and_leaves_no_task():
    before = asyncio.all_tasks()
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster) as browser,
        browser.listening("/events") as until,
    ):
        await browser.console.stop()
        with pytest.raises(AssertionError, match="it ended"):
            await until(b"never sent")
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()


@given(st.integers(1, 40), st.integers(1, 12), st.sets(st.integers(0, 39)))
def test_every_name_has_its_turn_whichever_names_are_urgent(many, size, numbers):
    poller: Poller[str, None] = Poller(size)
    names = [f"group-{number}" for number in range(many)]
    urgent = {f"group-{number}" for number in numbers}

    seen: set[str] = set()
    for _ in range(many // max(1, size // 3) + 2):
        chosen = poller.choose(names, urgent)
        assert len(chosen) == len(set(chosen)) == min(size, many)
        seen.update(chosen)

    assert seen == set(names)


def metered(*samples):
    """A meter with samples of time, end and progress."""
    meter = RateMeter()
    for at, end, done in samples:
        meter.add(at, end=end, done=done)
    return meter


def test_rates_are_steady_between_commits_and_not_negative_after_a_reset():
    steps = [(step * 5.0, 500 * step, 500 * (step // 2 * 2)) for step in range(20)]

    came, went = metered(*steps).rates

    assert came == 100.0
    assert 80.0 < went < 120.0
    reset = metered((0.0, 2000, 1000), (5.0, 2000, 1100), (10.0, 2000, 0), (15.0, 2000, 50))
    assert reset.rates == (0.0, 10.0)


def test_progress_that_rests_is_noticed_only_while_messages_wait():
    samples = [(0.0, 10, 10), (50.0, 10, 10), (60.0, 12, 10), (120.0, 15, 10)]

    assert metered(*samples[:2]).moved_at == metered(*samples).moved_at == 50.0


def group(**fields):
    lag, came, went = (fields.pop(name, 0) for name in ("lag", "came", "went"))
    part = TopicPart("orders", lag, 1, came, went)
    fields.setdefault("settings", GroupSettings("g"))
    return GroupSample(name="g", brokers=(), parts=(part,), **fields)


@pytest.mark.parametrize(
    ("fields", "pace"),
    [
        ({}, Pace.DONE),
        ({"lag": 10, "came": 100, "went": 100}, Pace.KEEPING),
        ({"lag": 10, "came": 100, "went": 150}, Pace.DRAINING),
        ({"lag": 10, "came": 150, "went": 100}, Pace.GROWING),
        ({"lag": 10, "members": 1, "still": 61.0}, Pace.STALLED),
        ({"lag": 10, "members": 0}, Pace.SILENT),
        ({"members": 0}, Pace.DONE),
        ({"settings": GroupSettings("g", is_enabled=False)}, Pace.PAUSED),
    ],
)
def test_the_pace_of_a_group_tells_a_stall_from_a_backlog_that_drains(fields, pace):
    assert group(**fields).pace is pace


@pytest.mark.parametrize("seconds", [6.0, 10.0, 30.0, 33.0, 60.0])
@pytest.mark.parametrize("interval", [5.0, 5.2])
def test_a_group_that_keeps_up_is_never_called_falling_behind_whenever_it_commits(
    seconds, interval
):
    def seen(phase, share):
        """A hundred messages each second, and a member that commits now and then."""
        meter = metered(*(
            (at, 100_000 + int(100 * at), int(100 * share * ((at + phase) // interval * interval)))
            for at in (0.0, seconds)
        ))  # fmt: skip
        came, went = meter.rates
        return group(lag=5000, came=came, went=went, members=1, measured=meter.seconds).pace

    phases = [interval * each / 50 for each in range(50)]

    assert Pace.GROWING not in {seen(phase, 1.0) for phase in phases}
    # One that finishes half of it falls behind; a few seconds cannot show that.
    expected = Pace.GROWING if seconds >= WINDOW else Pace.KEEPING
    assert {seen(phase, 0.5) for phase in phases} == {expected}
