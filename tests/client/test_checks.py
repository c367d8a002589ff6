"""Settings of the client: every wrong value is refused by its name, and with what is allowed."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.consumer.settings import (
    ConsumeSettings,
    FlowSettings,
    PullSettings,
    RebalanceSettings,
)
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings
from orbitmq.client.ranges.read import RangeSettings, WindowLimits
from orbitmq.client.ranges.write import WritingSettings
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import SettingError

#: What users know the objects of each class by.
NAMES: dict[type[Any], str] = {
    ClientSettings: "client",
    SendSettings: "sending",
    ConsumeSettings: "consume",
    FlowSettings: "flow",
    PullSettings: "pull",
    RebalanceSettings: "rebalance",
    LockSettings: "locks",
    PollSettings: "poll",
    RangeSettings: "ranges",
    WindowLimits: "window",
    WritingSettings: "writing",
}

#: Every number of every class: a whole one, or seconds.
WHOLE, DURATION, SWITCH = {"int", "int | None"}, {"float", "float | None"}, {"bool"}


def fields(kinds: set[str]) -> list[tuple[type[Any], str]]:
    return [
        (settings, field.name)
        for settings in NAMES
        for field in dataclasses.fields(settings)
        if field.type in kinds
    ]


@pytest.mark.parametrize("wrong", [1.5, "3", True, -1])
@pytest.mark.parametrize(("settings", "name"), fields(WHOLE))
def test_a_whole_number_is_whole(settings, name, wrong):
    with pytest.raises(SettingError, match=f"{NAMES[settings]}.{name} must be .*got"):
        settings(**{name: wrong})


@pytest.mark.parametrize("wrong", ["x", True, -1, float("nan"), float("inf"), timedelta(-1)])
@pytest.mark.parametrize(("settings", "name"), fields(DURATION))
def test_a_duration_is_seconds(settings, name, wrong):
    with pytest.raises(SettingError, match=f"{NAMES[settings]}.{name} must be .*got"):
        settings(**{name: wrong})


@pytest.mark.parametrize(("settings", "name"), fields(DURATION))
def test_a_duration_may_be_a_timedelta(settings, name):
    usual = getattr(settings(), name)
    seconds = 7.0 if usual is None else usual

    made = settings(**{name: timedelta(seconds=seconds)})

    assert type(getattr(made, name)) is float
    assert getattr(made, name) == pytest.approx(seconds)


@pytest.mark.parametrize("wrong", ["no", 0, 1, None])
@pytest.mark.parametrize(("settings", "name"), fields(SWITCH))
def test_a_switch_is_true_or_false(settings, name, wrong):
    with pytest.raises(SettingError, match=f"{NAMES[settings]}.{name} must be True or False"):
        settings(**{name: wrong})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_cached_messages": 65_536}, "flow.max_cached_messages must be 1 to 65535, got 65536"),
        ({"max_cached_bytes": 2 << 30}, "flow.max_cached_bytes must be 1 to 1073741824, got"),
        ({"max_span": 0}, "flow.max_span must be 1 to 65535, got 0"),
    ],
)
def test_bounds_are_said_in_full(given, text):
    with pytest.raises(SettingError, match=text):
        FlowSettings(**given)


def test_objects_of_settings_are_of_their_class():
    server = "127.0.0.1:9876"
    with pytest.raises(SettingError, match="sending must be an object of SendSettings, got float"):
        AsyncProducer("p", name_server=server, sending=3.0)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="polling must be an object of PollSettings"):
        AsyncPullConsumer("g", name_server=server, polling=5)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="strategy must be one of AVG"):
        AsyncPullConsumer("g", name_server=server, strategy="nope")
    with pytest.raises(SettingError, match=r"poll\.pull must be an object of PullSettings"):
        PollSettings(pull=PollSettings())  # type: ignore[arg-type]
