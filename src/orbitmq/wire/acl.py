"""ACL 1.0: who signed a request, and whether the signature is right.

The signature is HMAC-SHA1 over the values of all fields, in the order of their names, and the body.
Names are not part of it, so a value can be moved between fields without notice: a weakness of the
protocol that both sides have to share. It authenticates and hides nothing; use TLS beside it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.versions import Gate

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
SECURITY_TOKEN = "SecurityToken"  # noqa: S105  # the name of a field
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a client signs with."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)


def sign(command: Command, credentials: Credentials) -> Command:
    """The same request with the fields that prove who sent it."""
    fields = {
        name: text
        for name, text in command.ext_fields.items()
        if name not in (ACCESS_KEY, SIGNATURE, SECURITY_TOKEN)
    }
    fields[ACCESS_KEY] = credentials.access_key
    if credentials.security_token is not None:
        fields[SECURITY_TOKEN] = credentials.security_token
    content = signed_content(fields, command.body, command.version)
    fields[SIGNATURE] = signature(content, credentials.secret_key)
    return command.with_fields(fields)


def access_key_of(command: Command) -> str | None:
    """Under whose name a request comes; None when it has no credentials.

    C++ clients without credentials send an empty key: that is none, too.
    """
    return command.ext_fields.get(ACCESS_KEY) or None


def is_signed_by(command: Command, secret_key: str) -> bool:
    """Whether the request was signed with this secret. Takes the same time, right or wrong."""
    claimed = command.ext_fields.get(SIGNATURE, "")
    content = signed_content(command.ext_fields, command.body, command.version)
    return hmac.compare_digest(claimed.encode("utf-8", "replace"), _digest(content, secret_key))


def signed_content(fields: Mapping[str, str], body: Bytes, version: int) -> bytes:
    """What is signed: the values in the order of their names, then the body."""
    skipped = {SIGNATURE}
    if version <= Gate.UNSIGNED_UNIQUE_KEY_QUERY:
        skipped.add(UNIQUE_KEY_QUERY)
    names = sorted(fields.keys() - skipped, key=_java_order)
    text = "".join(fields[name] for name in names)
    return text.encode("utf-8", "replace") + body


def signature(content: bytes, secret_key: str) -> str:
    """The signature as it stands in its field."""
    return _digest(content, secret_key).decode()


def _digest(content: bytes, secret_key: str) -> bytes:
    # SHA-1 is what the protocol has; as an HMAC it is not broken.
    mac = hmac.digest(secret_key.encode("utf-8", "replace"), content, hashlib.sha1)
    return base64.b64encode(mac)


def _java_order(name: str) -> bytes:
    """Java compares strings by their UTF-16 units."""
    return name.encode("utf-16-be", "surrogatepass")
