"""Passwords, sessions, and the limit on guessing.

Passwords are compared in constant time. A session is a random token, of which only the digest is
kept; it has a second token that the page puts into every request that changes something, so that a
form on another site cannot.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import deque
from dataclasses import dataclass

from orbitmq.clock import Clock
from orbitmq.console.errors import Forbidden, TooManyAttempts

#: Seconds in which wrong passwords are counted.
WINDOW = 60.0
MOST_SESSIONS = 1000
#: Wrong passwords from anywhere together, as a multiple of those from one address.
_EVERYWHERE = 10
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who knows the password, or anybody on a console without one."""

    csrf: str
    until: float


class Logins:
    """Lets people in."""

    def __init__(self, password: str | None, clock: Clock, *, lasts: float, attempts: int) -> None:
        self._digest = None if password is None else _digest(password)
        self._clock = clock
        self._lasts = lasts
        self._attempts = attempts
        self._sessions: dict[bytes, Session] = {}
        self._wrong: dict[str, deque[float]] = {}
        #: The session of everybody where there is no password.
        self._open = Session(secrets.token_urlsafe(24), float("inf"))

    @property
    def is_needed(self) -> bool:
        return self._digest is not None

    def log_in(self, password: str, address: str) -> str:
        """The token of a new session. Raises `TooManyAttempts` or `Forbidden`."""
        now = self._clock.monotonic()
        self._check_attempts(address, now)
        if self._digest is None or not hmac.compare_digest(_digest(password), self._digest):
            self._note_wrong(address, now)
            raise Forbidden("the password is wrong")
        self._wrong.pop(address, None)
        self._forget_old(now)
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = Session(secrets.token_urlsafe(24), now + self._lasts)
        return token

    def log_out(self, token: str | None) -> None:
        if token is not None:
            self._sessions.pop(_digest(token), None)

    def session(self, token: str | None) -> Session | None:
        """Whose session this is; None: nobody's."""
        if not self.is_needed:
            return self._open
        if token is None:
            return None
        session = self._sessions.get(_digest(token))
        if session is None or session.until <= self._clock.monotonic():
            return None
        return session

    def _check_attempts(self, address: str, now: float) -> None:
        for wrong, most in (
            (self._wrong.get(address, ()), self._attempts),
            (
                [time for times in self._wrong.values() for time in times],
                self._attempts * _EVERYWHERE,
            ),
        ):
            recent = [time for time in wrong if now - time < WINDOW]
            if len(recent) >= most:
                raise TooManyAttempts(WINDOW - (now - min(recent)))

    def _note_wrong(self, address: str, now: float) -> None:
        if len(self._wrong) >= _MOST_ADDRESSES:
            self._wrong = {
                each: times for each, times in self._wrong.items() if now - times[-1] < WINDOW
            }
        times = self._wrong.setdefault(address, deque(maxlen=self._attempts))
        times.append(now)

    def _forget_old(self, now: float) -> None:
        self._sessions = {
            token: session for token, session in self._sessions.items() if session.until > now
        }
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]


_port = re.compile(r"[^:\[]:([0-9]{1,5})$").search


def cookie_name(host: str) -> str:
    """The cookie that holds a session's token; `host` is what the browser asks for.

    Browsers keep cookies by host and not by port: two consoles on one machine would log each
    other's people out.
    """
    found = _port(host)
    return f"orbitmq_console_{found[1]}" if found else "orbitmq_console"


def same_text(given: str, wanted: str) -> bool:
    """Whether two secrets are the same, in a time that tells nothing."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
