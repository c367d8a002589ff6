"""Users and access rules."""

from __future__ import annotations

from orbitmq.wire.bodies.base import Body


class UserInfo(Body, frozen=True, kw_only=True):
    """A user; the password only on the way to the broker."""

    password: str | None = None
    user_status: str | None = None
    user_type: str | None = None
    username: str | None = None


class PolicyEntry(Body, frozen=True, kw_only=True):
    """What is allowed or denied on one resource."""

    actions: tuple[str, ...] = ()
    decision: str | None = None
    resource: str | None = None
    source_ips: tuple[str, ...] = ()


class Policy(Body, frozen=True, kw_only=True):
    """Entries of one kind, custom or default."""

    entries: tuple[PolicyEntry, ...] = ()
    policy_type: str | None = None


class AclInfo(Body, frozen=True, kw_only=True):
    """What a subject may do."""

    policies: tuple[Policy, ...] = ()
    subject: str | None = None
