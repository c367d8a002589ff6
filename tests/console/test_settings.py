"""Settings that cannot work are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbitmq.client.settings import ClientSettings
from orbitmq.console.settings import Budget, ConsoleSettings
from orbitmq.errors import SettingError

CLIENT = ClientSettings(name_servers=("127.0.0.1:9876",))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"port": 70000}, "console.port"),
        ({"every": 0}, "console.every"),
        ({"session": -1}, "console.session"),
        ({"attempts": 0}, "console.attempts"),
        ({"password": "short"}, "console.password"),
        ({"host": "0.0.0.0"}, "console.host"),  # noqa: S104
        ({"host": "console.example.org"}, "console.host"),
        ({"certificate": Path("a.pem")}, "console.private_key"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(fields, named):
    with pytest.raises(SettingError, match=named.replace(".", r"\.")):
        ConsoleSettings(client=CLIENT, **fields)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_password(host):
    assert ConsoleSettings(client=CLIENT, host=host).password is None


def test_no_secret_is_shown():
    settings = ConsoleSettings(client=CLIENT, password="correct horse", token="battery staple")  # noqa: S106

    assert "correct horse" not in repr(settings)
    assert "battery staple" not in repr(settings)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(SettingError, match=r"console\.budget\.ages"):
        Budget(ages=0)
