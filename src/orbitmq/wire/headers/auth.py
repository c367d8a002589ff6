"""Administration of users and access rules."""

from __future__ import annotations

from orbitmq.wire.headers.base import Header


class UserRequest(Header, frozen=True, kw_only=True, gc=False):
    """AUTH_CREATE_USER, AUTH_UPDATE_USER, AUTH_DELETE_USER and AUTH_GET_USER."""

    username: str | None = None


class ListUsersRequest(Header, frozen=True, kw_only=True, gc=False):
    """AUTH_LIST_USER."""

    filter: str | None = None


class SubjectRequest(Header, frozen=True, kw_only=True, gc=False):
    """AUTH_CREATE_ACL, AUTH_UPDATE_ACL and AUTH_GET_ACL."""

    subject: str | None = None


class DeleteAclRequest(Header, frozen=True, kw_only=True, gc=False):
    """AUTH_DELETE_ACL."""

    subject: str | None = None
    policy_type: str | None = None
    resource: str | None = None


class ListAclsRequest(Header, frozen=True, kw_only=True, gc=False):
    """AUTH_LIST_ACL."""

    subject_filter: str | None = None
    resource_filter: str | None = None
