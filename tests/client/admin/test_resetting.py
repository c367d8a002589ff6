"""Moving progress: plan, apply, read back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orbitmq.broker.metrics import runtime_info
from orbitmq.broker.settings import shown
from orbitmq.client.admin.resets import QueueMove, ResetFailed, ResetTo, target
from orbitmq.client.routes import Queue
from tests.support.client_admin import GROUP, World

A0 = Queue("orders", "broker-a", 0)
A1 = Queue("orders", "broker-a", 1)
B0 = Queue("orders", "broker-b", 0)
B1 = Queue("orders", "broker-b", 1)


async def _filled(world: World) -> None:
    """Ten messages in A0 and four in B1; the group has consumed six and four."""
    await world.admin.groups.create(GROUP)
    await world.fill(A0, 10)
    await world.fill(B1, 4)
    await world.report(A0, 6)
    await world.report(B1, 4)


@pytest.mark.feature("L3")
async def test_a_plan_says_what_is_skipped_and_repeated_and_changes_nothing(world):
    await _filled(world)

    plan = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.offset(0))

    moves = {move.queue: move for move in plan.moves}
    assert list(moves) == [A0, A1, B0, B1]
    assert (moves[A0].from_offset, moves[A0].to_offset) == (6, 0)
    assert (moves[A0].replayed, moves[A0].skipped) == (6, 0)
    assert moves[A1].from_offset is None
    assert (plan.replayed, plan.skipped, plan.online) == (10, 0, ())
    assert world.progress(A0) == 6
    forward = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.end())
    assert (forward.replayed, forward.skipped) == (0, 4)

    report = await world.admin.progress.apply(plan)

    assert report.is_effective
    assert {each.move.queue: each.read_back for each in report.outcomes} == dict.fromkeys(moves, 0)
    assert [world.progress(queue) for queue in moves] == [0, 0, 0, 0]


@pytest.mark.feature("L3")
@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (ResetTo.begin(), {A0: 0, A1: 0, B0: 0, B1: 0}),
        (ResetTo.end(), {A0: 10, A1: 0, B0: 0, B1: 4}),
        (ResetTo.shift(-2), {A0: 4, A1: 0, B0: 0, B1: 2}),
        (ResetTo.shift(100), {A0: 10, A1: 0, B0: 0, B1: 4}),
        (ResetTo.by_queue({A0: 3}), {A0: 3, B1: 4}),
    ],
    ids=lambda value: str(value) if isinstance(value, ResetTo) else "",
)
async def test_an_offline_group_goes_where_it_is_told(world, to, expected):
    await _filled(world)

    await world.admin.progress.reset(GROUP, "orders", to)

    assert {queue: world.progress(queue) for queue in expected} == expected
    progress = await world.admin.groups.progress(GROUP)
    assert {
        each.queue: each.consumer_offset for each in progress.queues if each.queue in expected
    } == expected


@pytest.mark.feature("L3")
@pytest.mark.feature("G9")
async def test_a_time_means_the_first_message_at_or_after_it(world):
    await world.admin.groups.create(GROUP)
    records = await world.fill(A0, 6)
    at = records[3].store_ms / 1000

    exact = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.time(at))
    moment = datetime.fromtimestamp(at + 0.001, UTC)
    later = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.time(moment))
    earlier = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.time(at - 0.5))
    future = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.time(at + 1000))

    offsets = [plan.moves[0].to_offset for plan in (exact, later, earlier, future)]
    assert offsets == [3, 4, 3, 6]


@pytest.mark.feature("G9")
async def test_of_many_messages_of_one_instant_the_first_is_meant(world, monkeypatch):
    await world.admin.groups.create(GROUP)
    await world.fill(A0, 2)
    stopped = world.cluster.clock.now()
    monkeypatch.setattr(world.cluster.clock, "now", lambda: stopped)
    for _ in range(20):
        await world.send(A0)
    records = [each for each in world.cluster.messages("orders") if each.queue_id == 0]
    assert len({each.store_ms for each in records[2:]}) == 1

    plan = await world.admin.progress.plan_reset(
        GROUP, "orders", ResetTo.time(records[2].store_ms / 1000)
    )

    assert plan.moves[0].to_offset == 2


@pytest.mark.parametrize("wrong_by", [-1, 1, -5, 5])
async def test_a_broker_that_answers_a_neighbour_of_the_time_is_corrected(
    world, monkeypatch, wrong_by
):
    # 4.9 answers with the nearer of two neighbours.
    await world.admin.groups.create(GROUP)
    records = await world.fill(A0, 12)
    for broker in world.cluster.brokers:
        store = broker.parts.store
        right = store.offset_by_time

        def wrong(*args, right=right):
            return max(0, right(*args) + wrong_by)

        monkeypatch.setattr(store, "offset_by_time", wrong)

    plan = await world.admin.progress.plan_reset(
        GROUP, "orders", ResetTo.time(records[6].store_ms / 1000)
    )

    assert plan.moves[0].to_offset == 6


@pytest.mark.feature("L3")
async def test_a_group_that_is_online_is_sent_there_by_its_next_pull(world):
    await _filled(world)
    await world.consumer("c1")
    client = await world.client("broker-a")

    plan = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.by_queue({A0: 2}))
    report = await world.admin.progress.apply(plan)

    assert plan.online == ("c1",)
    assert report.is_effective
    # What a member reports of the time before does not count.
    await world.report(A0, 7)
    assert world.progress(A0) == 2
    told = await client.pull("orders", 0, 7, consumer_group=GROUP)
    assert (told.code, told.ext_fields["nextBeginOffset"]) == (21, "2")


@pytest.mark.feature("L3")
async def test_a_reset_without_effect_is_an_error_that_names_the_queues(world, monkeypatch):
    await _filled(world)
    # A broker that says yes and does nothing.
    progress = world.cluster.brokers[0].parts.progress
    monkeypatch.setattr(progress, "reset", lambda *_: None)

    with pytest.raises(ResetFailed, match="broker-a:0 is at 6 instead of 0") as failed:
        await world.admin.progress.reset(GROUP, "orders", ResetTo.begin())

    effective = {each.move.queue: each.is_effective for each in failed.value.report.outcomes}
    assert effective == {A0: False, A1: False, B0: True, B1: True}


# Brokers that are not ours.


def _as_apache(monkeypatch: pytest.MonkeyPatch, *, server_side: bool) -> None:
    """Let brokers look like Apache's, which show by a setting how they reset."""
    setting = {"useServerSideResetOffset": "true" if server_side else "false"}
    monkeypatch.setattr(
        "orbitmq.broker.handlers.admin.shown", lambda *args: {**shown(*args), **setting}
    )
    monkeypatch.setattr(
        "orbitmq.broker.handlers.admin.runtime_info",
        lambda *args: {k: v for k, v in runtime_info(*args).items() if k != "groupFindings"},
    )


async def test_an_apache_broker_with_server_side_reset_takes_queue_and_offset(world, monkeypatch):
    _as_apache(monkeypatch, server_side=True)
    await _filled(world)
    await world.consumer("c1")

    await world.admin.progress.reset(GROUP, "orders", ResetTo.by_queue({A0: 1}))

    assert world.progress(A0) == 1
    assert world.cluster.brokers[0].parts.progress.pending_reset("orders", GROUP, 0) == 1


async def test_an_older_broker_is_told_the_offsets_of_an_offline_group(world, monkeypatch):
    _as_apache(monkeypatch, server_side=False)
    await _filled(world)

    await world.admin.progress.reset(GROUP, "orders", ResetTo.by_queue({A0: 1, B1: 2}))

    assert (world.progress(A0), world.progress(B1)) == (1, 2)
    # It was a report, not the request that such brokers understand differently.
    assert world.cluster.brokers[0].parts.progress.pending_reset("orders", GROUP, 0) is None


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (ResetTo.begin(), (0, 0)),
        (ResetTo.end(), (10, 4)),
        (ResetTo.time("2001-02-03T04:05:06"), (0, 0)),
    ],
)
async def test_an_older_broker_pushes_a_time_to_an_online_group(world, monkeypatch, to, expected):
    _as_apache(monkeypatch, server_side=False)
    await _filled(world)
    await world.consumer("c1")

    report = await world.admin.progress.reset(GROUP, "orders", to)

    assert report.is_effective
    assert (world.progress(A0), world.progress(B1)) == expected


# Clone and skip.


async def test_the_backlog_of_all_topics_is_skipped_and_retries_are_left(world):
    await _filled(world)
    await world.cluster.create_topic("returns", queues=1)
    returns = Queue("returns", "broker-b", 0)
    await world.fill(returns, 3)
    await world.report(returns, 1)
    await world.admin.topics.create(f"%RETRY%{GROUP}", queues=1)
    retry = Queue(f"%RETRY%{GROUP}", "broker-a", 0)
    await world.send(retry)
    await world.report(retry, 0)

    plans = await world.admin.progress.plan_skip(GROUP)
    assert sorted(plan.topic for plan in plans) == ["orders", "returns"]
    assert sum(plan.skipped for plan in plans) == 6
    for plan in plans:
        await world.admin.progress.apply(plan)

    progress = await world.admin.groups.progress(GROUP)
    assert progress.lag == progress.retry_lag == 1
    every = await world.admin.progress.plan_skip(GROUP, retries=True)
    assert f"%RETRY%{GROUP}" in [plan.topic for plan in every]


@pytest.mark.feature("L7")
async def test_cloning_skipping_and_pausing_are_shown_first_and_leave_a_line(world, caplog):
    await _filled(world)
    caplog.set_level("INFO", logger="orbitmq.client.admin")

    # What is confirmed is the plan; without `apply` nothing happens.
    (clone,) = await world.admin.progress.plan_clone(GROUP, "audit")
    (skip,) = await world.admin.progress.plan_skip(GROUP)
    assert world.progress(A0, "audit") is None
    assert world.progress(A0) == 6
    await world.admin.progress.apply(clone)
    await world.admin.progress.apply(skip)
    await world.admin.groups.pause(GROUP)
    await world.admin.groups.resume(GROUP)

    assert (world.progress(A0, "audit"), world.progress(A0)) == (6, 10)
    lines = [
        (record.getMessage(), record.__dict__["group"])
        for record in caplog.records
        if record.name.startswith("orbitmq.client.admin")
    ]
    cloned = f"progress of group audit in orders moved to where group {GROUP} is"
    assert lines == [
        (f"{cloned}: 10 skipped, 0 replayed", "audit"),
        (f"progress of group {GROUP} in orders moved to the end: 4 skipped, 0 replayed", GROUP),
        (f"group {GROUP} paused at broker-a, broker-b", GROUP),
        (f"group {GROUP} resumed at broker-a, broker-b", GROUP),
    ]
    assert caplog.records[-3].__dict__["skipped"] == 4


# Plans: where progress goes, and what that skips and repeats.


QUEUE = Queue("orders", "broker-a", 0)

bounds = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)
progress = st.none() | st.integers(0, 60)


@given(bounds, progress, st.integers(-100, 100))
def test_a_shift_stays_inside_the_queue(limits, before, shift):
    low, high = limits

    to = target(ResetTo.shift(shift), QUEUE, progress=before, low=low, high=high, timed=None)

    assert to is not None
    assert low <= to <= high
    if before is not None and low <= before + shift <= high:
        assert to == before + shift


@given(bounds, st.integers(0, 60), st.data())
def test_messages_are_skipped_or_repeated_and_the_count_is_right(limits, before, data):
    low, high = limits
    assume(before <= high)
    to = data.draw(st.integers(low, high))

    move = QueueMove(QUEUE, before, to, low, high)

    there = set(range(low, high))
    next_before = {offset for offset in there if offset >= before}
    next_after = {offset for offset in there if offset >= to}
    assert move.skipped == len(next_before - next_after)
    assert move.replayed == len(next_after - next_before)
    assert not (move.skipped and move.replayed)
    assert move.is_change == (before != to)


@given(bounds, st.data())
def test_a_group_without_progress_repeats_nothing(limits, data):
    low, high = limits
    to = data.draw(st.integers(low, high))

    move = QueueMove(QUEUE, None, to, low, high)

    assert (move.skipped, move.replayed) == (to - low, 0)
    assert move.is_change
