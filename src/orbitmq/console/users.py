"""The file of the console's users: names, roles, and digests of passwords.

Passwords are kept as scrypt digests. The file is replaced as a whole, can be read by its owner
alone, and is read again when it changes. Needs no web framework.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import time
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from orbitmq.atomicfile import Disk, FolderLock, replace_file
from orbitmq.console.roles import Role
from orbitmq.console.settings import SHORTEST_PASSWORD, BadInput, NotThere, UsersUnusable

#: About 16 MiB and a quarter of a second for each guess.
_COST, _BLOCK, _PARALLEL = 2**14, 8, 5
_MEMORY = 64 * 1024 * 1024
_LONGEST_PASSWORD = 1024
#: Seconds to wait for another change of the file.
_PATIENCE = 5.0

_is_name = re.compile(r"[\w.@+-]{1,64}").fullmatch


class User(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may log in."""

    role: Role
    #: The scrypt digest of the password, with its parameters and salt.
    password: str

    def __repr__(self) -> str:
        return f"User(role={self.role.value!r})"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    users: dict[str, User] = {}


def digest(password: str) -> str:
    """What the file keeps of a password. Raises `BadInput` for one that is easily guessed."""
    if not SHORTEST_PASSWORD <= len(password) <= _LONGEST_PASSWORD:
        raise BadInput(
            f"a password has {SHORTEST_PASSWORD} to {_LONGEST_PASSWORD} characters, "
            f"got {len(password)}"
        )
    salt = secrets.token_bytes(16)
    found = _scrypt(password, salt, _COST, _BLOCK, _PARALLEL)
    return ":".join(("scrypt", str(_COST), str(_BLOCK), str(_PARALLEL), _text(salt), _text(found)))


def is_password(given: str, kept: str) -> bool:
    """Whether a password is the one of a digest, in constant time."""
    try:
        kind, cost, block, parallel, salt, wanted = kept.split(":")
        if kind != "scrypt" or len(given) > _LONGEST_PASSWORD:
            return False
        found = _scrypt(given, _raw(salt), int(cost), int(block), int(parallel))
        return hmac.compare_digest(found, _raw(wanted))
    except ValueError:
        return False


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    # One text may be typed as different code points.
    raw = unicodedata.normalize("NFC", password).encode()
    return hashlib.scrypt(raw, salt=salt, n=cost, r=block, p=parallel, maxmem=_MEMORY, dklen=32)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


#: What a password is compared with when there is no such user: it takes as long.
_NOBODY: Final = f"scrypt:{_COST}:{_BLOCK}:{_PARALLEL}:{_text(bytes(16))}:{_text(bytes(32))}"


class Users:
    """The users of a file, as they are now."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen: tuple[int, int, int] | None = None
        self._known: Mapping[str, User] = {}

    @property
    def all(self) -> Mapping[str, User]:
        """All users, by name. Raises `UsersUnusable`."""
        try:
            found = self.file.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen != self._seen:
                self._known = _read(self.file)
                self._seen = seen
        except OSError as error:
            raise UsersUnusable(self.file, error) from error
        return self._known

    def check(self, name: str, password: str) -> User | None:
        """The user with this name and password; None: there is none. Takes a while."""
        user = self.all.get(name)
        is_right = is_password(password, _NOBODY if user is None else user.password)
        return user if is_right else None

    def add(self, name: str, role: Role, password: str) -> None:
        """Add a user. Raises `BadInput` for a name that is taken or cannot be one."""
        if not _is_name(name):
            raise BadInput(
                f"a user's name has 1 to 64 letters, digits or characters of . @ + - _, "
                f"got {name[:80]!r}"
            )
        user = User(role, digest(password))
        with self._changing(must_exist=False) as users:
            if name in users:
                raise BadInput(f"there is a user {name!r} already")
            users[name] = user

    def remove(self, name: str) -> None:
        """Raises `NotThere` for an unknown name."""
        with self._changing() as users:
            _known_user(users, name)
            del users[name]

    def change(self, name: str, *, role: Role | None = None, password: str | None = None) -> None:
        """Change what is given. Raises `NotThere` for an unknown name."""
        kept = None if password is None else digest(password)
        with self._changing() as users:
            user = _known_user(users, name)
            users[name] = User(role or user.role, kept or user.password)

    @contextlib.contextmanager
    def _changing(self, *, must_exist: bool = True) -> Iterator[dict[str, User]]:
        """The users, which are written when the block ends; one change at a time."""
        if must_exist:
            _ = self.all  # or nothing is made beside it, either
        lock = FolderLock(self.file.with_name(f"{self.file.name}.lock"), _PRIVATE)
        try:
            until = time.monotonic() + _PATIENCE
            while not lock.take():
                if time.monotonic() > until:
                    raise UsersUnusable(self.file, "another process changes it")
                time.sleep(0.02)
            users = dict(_read(self.file)) if must_exist or self.file.exists() else {}
            yield users
            content = msgspec.json.encode(_Content(dict(sorted(users.items()))))
            replace_file(self.file, msgspec.json.format(content, indent=2) + b"\n", disk=_PRIVATE)
        except OSError as error:
            raise UsersUnusable(self.file, error) from error
        finally:
            lock.release()


def _read(file: Path) -> Mapping[str, User]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Content).users
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsersUnusable(file, error) from error


def _known_user(users: Mapping[str, User], name: str) -> User:
    if name not in users:
        known = ", ".join(users) or "none"
        raise NotThere(f"there is no user {name[:80]!r}; there are: {known}")
    return users[name]


class _PrivateDisk(Disk):
    """Files that only their owner can read."""

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        if hasattr(os, "fchmod"):
            os.fchmod(fd, 0o600)
        return fd


_PRIVATE: Final = _PrivateDisk()
