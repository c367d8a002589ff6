"""Rates out of counters."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.groups import GroupSettings
from orbitmq.console.collect import GroupSample, Pace, TopicPart
from orbitmq.console.history import WINDOW, RateMeter


def test_commits_that_come_every_other_sample_give_a_steady_rate():
    meter = RateMeter()
    for step in range(20):
        time = step * 5.0
        meter.add(time, end=500 * step, done=500 * (step // 2 * 2))

    came, went = meter.rates

    assert came == 100.0
    assert 80.0 < went < 120.0


def test_a_reset_to_an_earlier_place_is_no_negative_rate():
    meter = RateMeter()
    for time, done in ((0.0, 1000), (5.0, 1100), (10.0, 0), (15.0, 50)):
        meter.add(time, end=2000, done=done)

    assert meter.rates == (0.0, 10.0)


def test_progress_that_rests_is_noticed_only_while_something_waits():
    meter = RateMeter()
    meter.add(0.0, end=10, done=10)
    meter.add(50.0, end=10, done=10)
    assert meter.moved_at == 50.0

    meter.add(60.0, end=12, done=10)
    meter.add(120.0, end=15, done=10)

    assert meter.moved_at == 50.0


def group(**fields: object) -> GroupSample:
    lag, came, went = (fields.pop(name, 0) for name in ("lag", "came", "went"))
    part = TopicPart("orders", lag, 1, came, went)  # type: ignore[arg-type]
    base = {"name": "g", "settings": GroupSettings("g"), "brokers": (), "parts": (part,)}
    return GroupSample(**base | fields)  # type: ignore[arg-type]


def test_a_group_s_pace_tells_a_stall_from_a_backlog_that_drains():
    assert group().pace is Pace.DONE
    assert group(lag=10, came=100, went=100).pace is Pace.KEEPING
    assert group(lag=10, came=100, went=150).pace is Pace.DRAINING
    assert group(lag=10, came=150, went=100).pace is Pace.GROWING
    assert group(lag=10, members=1, still=61.0).pace is Pace.STALLED
    assert group(lag=10, members=0).pace is Pace.SILENT
    assert group(lag=0, members=0).pace is Pace.DONE
    assert group(settings=GroupSettings("g", is_enabled=False)).pace is Pace.PAUSED


@pytest.mark.parametrize("seconds", [6.0, 10.0, 30.0, 33.0, 60.0])
@pytest.mark.parametrize("interval", [5.0, 5.2])
def test_a_group_that_keeps_up_is_never_called_falling_behind_whenever_it_reports(
    seconds, interval
):
    def seen(phase, share):
        """A hundred messages each second, and a member that reports now and then."""
        meter = RateMeter()
        for at in (0.0, seconds):
            reported = (at + phase) // interval * interval
            meter.add(at, end=100_000 + int(100 * at), done=int(100 * share * reported))
        came, went = meter.rates
        return group(lag=5000, came=came, went=went, members=1, measured=meter.seconds).pace

    phases = [interval * each / 50 for each in range(50)]

    assert Pace.GROWING not in {seen(phase, 1.0) for phase in phases}
    # One that finishes half of it falls behind; a few seconds cannot show that.
    expected = Pace.GROWING if seconds >= WINDOW else Pace.KEEPING
    assert {seen(phase, 0.5) for phase in phases} == {expected}


def test_the_time_until_nothing_waits_follows_from_both_rates():
    assert group(lag=100, came=10, went=30).drains_in == 5.0
    assert group(lag=100, came=30, went=30).drains_in is None
    assert group(lag=0).drains_in == 0.0
