"""Logins of the console: passwords, sessions, and the limit on guessing.

Sessions live in memory: a restart of the console ends them all. One of a user of the file ends when
the user is removed, or gets another password or role.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from orbitmq.clock import Clock
from orbitmq.console.roles import Right, Role, has_right
from orbitmq.console.settings import Forbidden, TooManyAttempts, UsersUnusable
from orbitmq.console.users import User, Users

#: Seconds in which wrong passwords are counted.
WINDOW = 60.0
MOST_SESSIONS = 1000
#: Wrong passwords from all addresses, as a multiple of those from one address.
_EVERYWHERE = 10
_MOST_ADDRESSES = 10_000
#: Digests of passwords that are made at the same time; each takes a processor for a while.
_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A login; without a password all pages share one session."""

    csrf: str
    until: float
    #: Says which session is meant, and opens none.
    id: str = ""
    user: str | None = None
    #: None: a session without a user, which may do what the console may.
    role: Role | None = None
    #: The identity provider that vouched for the user; None: the file of users.
    via: str | None = None
    address: str = ""
    since: float = 0.0
    #: The user's entry in the file when the session began.
    entry: User | None = None

    def may(self, right: Right) -> bool:
        return has_right(self.role, right)


class Logins:
    """Passwords, sessions, and the limit on guessing.

    Passwords are compared in constant time. A session is a random token, of which only the digest
    is kept, and a second token that the page sends with every request that changes something.
    """

    def __init__(
        self,
        password: str | None,
        clock: Clock,
        *,
        lasts: float,
        attempts: int,
        users: Users | None = None,
        has_provider: bool = False,
    ) -> None:
        """With `users` their passwords open sessions, and `password` does not."""
        self.users = users
        self._digest = None if password is None else _digest(password)
        self._has_provider = has_provider
        self._clock = clock
        self._lasts = lasts
        self._attempts = attempts
        self._sessions: dict[bytes, Session] = {}
        #: When and as whom an address failed to log in.
        self._wrong: dict[str, deque[tuple[float, str | None]]] = {}
        self._checks = asyncio.Semaphore(_AT_ONCE)
        #: The only session of a console without a password.
        self._open = Session(csrf=secrets.token_urlsafe(24), until=float("inf"))

    @property
    def is_needed(self) -> bool:
        return self._digest is not None or self.users is not None or self._has_provider

    async def log_in(self, password: str, address: str, user: str | None = None) -> str:
        """The token of a new session. Raises `TooManyAttempts` or `Forbidden`."""
        now = self._clock.monotonic()
        self._check_attempts(address, now)
        # It counts as wrong until it is right: others may be tried meanwhile.
        self._note_wrong(address, now, user)
        entry: User | None = None
        if self.users is not None:
            try:
                async with self._checks:
                    entry = await asyncio.to_thread(self.users.check, user or "", password)
            except UsersUnusable:
                self._forgive(address, user)
                raise
            if entry is None:
                raise Forbidden("the user or the password is wrong")
        elif self._digest is None or not hmac.compare_digest(_digest(password), self._digest):
            raise Forbidden("the password is wrong")
        self._forgive(address, user)
        if entry is None:
            return self.begin(None, None, address)
        return self.begin(user, entry.role, address, entry=entry)

    def begin(
        self,
        user: str | None,
        role: Role | None,
        address: str,
        *,
        via: str | None = None,
        entry: User | None = None,
    ) -> str:
        """The token of a new session of an authenticated user."""
        now = self._clock.monotonic()
        self._forget_old(now)
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = Session(
            id=secrets.token_urlsafe(9),
            csrf=secrets.token_urlsafe(24),
            until=now + self._lasts,
            user=user,
            role=role,
            via=via,
            address=address,
            since=self._clock.now(),
            entry=entry,
        )
        return token

    def log_out(self, token: str | None) -> None:
        if token is not None:
            self._sessions.pop(_digest(token), None)

    def session(self, token: str | None) -> Session | None:
        """The session of a token; None: there is none."""
        if not self.is_needed:
            return self._open
        if token is None:
            return None
        session = self._sessions.get(_digest(token))
        if session is None or not self._is_valid(session):
            return None
        return session

    @property
    def sessions(self) -> Sequence[Session]:
        """All sessions, the newest first."""
        return [each for each in reversed(self._sessions.values()) if self._is_valid(each)]

    def end(self, identity: str) -> Session | None:
        """End a session by its id; None: there is none."""
        for token, session in self._sessions.items():
            if session.id == identity:
                return self._sessions.pop(token)
        return None

    def _is_valid(self, session: Session) -> bool:
        if session.until <= self._clock.monotonic():
            return False
        if session.entry is None:
            return True
        try:
            return self.users is not None and (
                self.users.all.get(session.user or "") == session.entry
            )
        except UsersUnusable:
            # Who may log in is not known.
            return False

    def _check_attempts(self, address: str, now: float) -> None:
        for wrong, most in (
            (self._wrong.get(address, ()), self._attempts),
            (
                [each for some in self._wrong.values() for each in some],
                self._attempts * _EVERYWHERE,
            ),
        ):
            recent = [time for time, _ in wrong if now - time < WINDOW]
            if len(recent) >= most:
                raise TooManyAttempts(WINDOW - (now - min(recent)))

    def _note_wrong(self, address: str, now: float, user: str | None) -> None:
        if len(self._wrong) >= _MOST_ADDRESSES:
            self._wrong = {
                each: some for each, some in self._wrong.items() if now - some[-1][0] < WINDOW
            }
        some = self._wrong.setdefault(address, deque(maxlen=self._attempts))
        some.append((now, user))

    def _forgive(self, address: str, user: str | None) -> None:
        """Forget the wrong attempts as a user; those as others count on."""
        wrong = self._wrong.pop(address, ())
        if kept := [each for each in wrong if each[1] != user]:
            self._wrong[address] = deque(kept, maxlen=self._attempts)

    def _forget_old(self, now: float) -> None:
        self._sessions = {
            token: session
            for token, session in self._sessions.items()
            if session.until > now and self._is_valid(session)
        }
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
