"""Passwords, sessions, and the limit on guessing."""

from __future__ import annotations

import pytest

from orbitmq.console.access import MOST_SESSIONS, WINDOW, Logins, cookie_name
from orbitmq.console.errors import Forbidden, TooManyAttempts

PASSWORD = "correct horse"  # noqa: S105


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def logins(clock: HandClock, password: str | None = PASSWORD) -> Logins:
    return Logins(password, clock, lasts=100.0, attempts=3)


def test_the_right_password_opens_a_session_that_ends():
    clock = HandClock()
    gate = logins(clock)

    token = gate.log_in(PASSWORD, "10.0.0.1")
    assert gate.session(token) is not None
    assert gate.session("another") is None
    assert gate.session(None) is None

    clock.time += 100.0
    assert gate.session(token) is None


def test_after_some_wrong_passwords_even_the_right_one_has_to_wait():
    clock = HandClock()
    gate = logins(clock)
    for _ in range(3):
        with pytest.raises(Forbidden):
            gate.log_in("wrong password", "10.0.0.1")

    with pytest.raises(TooManyAttempts) as refused:
        gate.log_in(PASSWORD, "10.0.0.1")
    assert 0 < refused.value.wait <= WINDOW
    assert gate.log_in(PASSWORD, "10.0.0.2")

    clock.time += WINDOW
    assert gate.log_in(PASSWORD, "10.0.0.1")


def test_guessing_from_many_addresses_is_limited_as_well():
    gate = logins(HandClock())
    for number in range(30):
        with pytest.raises(Forbidden):
            gate.log_in("wrong password", f"10.0.0.{number}")

    with pytest.raises(TooManyAttempts):
        gate.log_in("wrong password", "10.0.1.1")


def test_logging_out_ends_the_session_and_no_other():
    gate = logins(HandClock())
    mine, yours = gate.log_in(PASSWORD, "a"), gate.log_in(PASSWORD, "b")

    gate.log_out(mine)
    gate.log_out(None)

    assert gate.session(mine) is None
    assert gate.session(yours) is not None


def test_sessions_are_limited_in_number():
    gate = logins(HandClock())
    tokens = [gate.log_in(PASSWORD, "a") for _ in range(MOST_SESSIONS + 1)]

    assert gate.session(tokens[0]) is None
    assert gate.session(tokens[-1]) is not None


def test_without_a_password_everybody_has_the_same_session_and_no_password_fits():
    gate = logins(HandClock(), password=None)

    assert gate.session(None) is not None
    with pytest.raises(Forbidden):
        gate.log_in("", "a")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8090", "orbitmq_console_8090"),
        ("127.0.0.1:8091", "orbitmq_console_8091"),
        ("[::1]:8092", "orbitmq_console_8092"),
        ("[::1]", "orbitmq_console"),
        ("console.example.org", "orbitmq_console"),
        ("", "orbitmq_console"),
    ],
)
def test_a_cookie_is_named_by_the_port_that_a_browser_asks_for(host, name):
    assert cookie_name(host) == name
