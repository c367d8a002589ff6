"""Settings of a client: where they come from, and what is refused."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.errors import SettingError
from orbitmq.remoting.settings import Address
from orbitmq.wire.command import Credentials


@pytest.mark.parametrize(
    "given",
    ["a:9876;b:9877", "a:9876,b:9877", " a ; b:9877;", ["a:9876", "b:9877"], ("a;a", "b:9877")],
)
def test_name_servers_may_be_written_in_many_ways(given):
    settings = resolve(given)

    assert settings.name_servers == ("a:9876", "b:9877")
    assert settings.addresses == (Address("a", 9876), Address("b", 9877))


def test_what_is_given_comes_before_settings_and_settings_before_the_environment():
    environment = {"ORBITMQ_NAME_SERVER": "orbit:1", "NAMESRV_ADDR": "java:2;other:3"}
    client = ClientSettings(name_servers=("mine:4",), request_timeout=7.0)

    given = resolve("given:5", client, environment=environment)
    own = resolve(None, client, environment=environment)
    orbit = resolve(environment=environment)
    java = resolve(environment={"NAMESRV_ADDR": "java:2;other:3", "ORBITMQ_NAME_SERVER": " "})

    assert (given.name_servers, given.request_timeout) == (("given:5",), 7.0)
    assert own is client
    assert orbit.name_servers == ("orbit:1",)
    assert java.name_servers == ("java:2", "other:3")


def test_without_any_name_server_it_is_the_one_that_up_starts():
    assert resolve(environment={}).name_servers == ("127.0.0.1:9876",)


@pytest.mark.parametrize("given", ["", ";", [], "host:port", "http://host:1", "a:1:2", [5], 5])
def test_what_names_no_server_is_refused(given):
    with pytest.raises(SettingError, match=r"name.server"):
        resolve(given, environment={})


@pytest.mark.parametrize("given", ["http://host:9876", "tcp://host:9876/", "a:1;http://host:9876"])
def test_a_scheme_before_an_address_is_named_as_what_is_too_much(given):
    with pytest.raises(SettingError, match="has no scheme: write host:9876"):
        resolve(given, environment={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_timeout", 0),
        ("request_timeout", math.nan),
        ("route_refresh", -1),
        ("heartbeat", "30"),
        ("stop_timeout", True),
        ("instance", "a@b"),
        ("instance", ""),
        ("unit", "line\n"),
        ("client_ip", 7),
        ("namespace", "a%b"),
        ("namespace", ""),
        ("name_servers", "a:b"),
        ("channel", None),
        ("credentials", "key:secret"),
        ("tls", True),
    ],
)
def test_a_wrong_setting_fails_when_it_is_made_and_is_named(name, value):
    with pytest.raises(SettingError, match=f"client.{name}"):
        ClientSettings(**{name: value})


def test_durations_may_be_timedeltas():
    given: dict[str, Any] = {
        "request_timeout": timedelta(seconds=5),
        "heartbeat": timedelta(minutes=1),
    }

    settings = ClientSettings(**given)

    assert (settings.request_timeout, settings.heartbeat) == (5.0, 60.0)


def test_credentials_are_never_shown():
    credentials = Credentials(access_key="who", secret_key="hush", security_token="token")  # noqa: S106
    settings = ClientSettings(name_servers=("a:1",), credentials=credentials)

    assert "hush" not in repr(settings) + str(settings) + repr(credentials)
    assert "token" not in repr(settings) + repr(credentials)
