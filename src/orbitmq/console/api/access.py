"""Who may do what: the session, logins, users."""

from __future__ import annotations

import asyncio
import html
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from orbitmq import __version__
from orbitmq.console.http import answer, cookie_name, pick, read_body
from orbitmq.console.logins import Session
from orbitmq.console.roles import RULES, Right, Role
from orbitmq.console.settings import (
    OIDC_PATIENCE,
    BadInput,
    ConsoleError,
    NotLoggedIn,
    NotThere,
    UsersUnusable,
)
from orbitmq.console.state import (
    actor_of,
    address_of,
    check_right,
    clusters_of,
    session_of,
    session_token,
    state_of,
)
from orbitmq.console.users import Users
from orbitmq.console.words import Action, command

if TYPE_CHECKING:
    from orbitmq.console.oidc import Provider

log = logging.getLogger(__name__)

#: Bytes of a login request.
_LARGEST = 4096


class LoginRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A login."""

    password: str
    #: With a file of users.
    user: str | None = None


def me_content(request: Request, session: Session | None) -> dict[str, object]:
    """The rights of a session; without a session only how to log in."""
    clusters = clusters_of(request)
    if session is None:
        found: dict[str, object] = {"login": True, "version": None}
        if clusters.logins.users is not None:
            found["users"] = True
        if clusters.settings.oidc is not None:
            found["provider"] = urlsplit(clusters.settings.oidc.issuer).hostname
        return found
    state = state_of(request)
    several: dict[str, object] = {}
    if clusters.are_several:
        several = {"cluster": state.settings.name, "clusters": list(clusters.all)}
    return several | {
        "login": False,
        "can_log_out": clusters.logins.is_needed,
        # Who is vouched for by a provider has the password there.
        "can_change_password": session.entry is not None,
        "user": session.user,
        "role": session.role,
        "write": state.settings.write,
        "rights": [
            right
            for right, rule in RULES.items()
            if session.may(right) and (state.settings.write or not rule.is_change)
        ],
        "needs": {each: rule.least for each, rule in RULES.items()},
        "enable": state.enabling_command,
        "every": state.settings.every,
        "masked": state.settings.masked,
        "csrf": session.csrf,
        "version": __version__,
        "name_servers": state.settings.client.name_servers,
    }


async def me(request: Request) -> Response:
    """Whether to log in, what is allowed, and the token for requests that change something."""
    return answer(me_content(request, request.state.session))


async def log_in(request: Request) -> Response:
    """Begin a session with the `password`, of a `user` if there are any; sets a cookie."""
    logins = clusters_of(request).logins
    given = await read_body(request, LoginRequest, largest=_LARGEST)
    try:
        token = await logins.log_in(given.password, address_of(request), given.user)
    except UsersUnusable as error:
        # Users that are not logged in must not learn the path of the file.
        log.warning("nobody can log in: %s", error)
        raise UsersUnusable(None, "the console's log says why") from error
    response = answer(me_content(request, logins.session(token)))
    set_session(request, response, token)
    return response


def set_session(request: Request, response: Response, token: str) -> None:
    """Let the browser keep the token of a session."""
    response.set_cookie(
        _cookie(request),
        token,
        max_age=int(clusters_of(request).settings.session),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )


async def log_out(request: Request) -> Response:
    """End the session."""
    clusters_of(request).logins.log_out(session_token(request))
    response = Response(status_code=204)
    response.delete_cookie(_cookie(request), path="/")
    return response


def _cookie(request: Request) -> str:
    return cookie_name(request.headers.get("host", ""))


#: Where browsers come back from the identity provider.
CALLBACK = "/login/oidc/callback"


async def begin_oidc(request: Request) -> Response:
    """Send the browser to the identity provider."""
    provider = _provider(request)
    secret = request.cookies.get(f"{_cookie(request)}_oidc") or secrets.token_urlsafe(24)
    try:
        address = await provider.begin(secret, provider.settings.redirect or _callback(request))
    except ConsoleError as error:
        return _apology(error)
    response = RedirectResponse(address, 303, headers={"cache-control": "no-store"})
    response.set_cookie(
        f"{_cookie(request)}_oidc",
        secret,
        max_age=int(OIDC_PATIENCE),
        httponly=True,
        # The provider's page leads back here, with this cookie.
        samesite="lax",
        secure=request.url.scheme == "https",
        path="/login/oidc",
    )
    return response


async def finish_oidc(request: Request) -> Response:
    """Begin the session of a user that the identity provider has authenticated."""
    secret = request.cookies.get(f"{_cookie(request)}_oidc")
    provider = _provider(request)
    try:
        found = await provider.finish(secret, dict(request.query_params))
    except ConsoleError as error:
        log.info("a login by the identity provider failed: %s", error)
        return _apology(error)
    token = clusters_of(request).logins.begin(
        found.name, found.role, address_of(request), via=urlsplit(provider.settings.issuer).hostname
    )
    # The strict cookie is not sent along a redirect that began at another site; this page is ours.
    response = small_page(
        '<meta http-equiv="refresh" content="0;url=/">', "You are logged in.", 200
    )
    set_session(request, response, token)
    return response


def _provider(request: Request) -> Provider:
    provider = clusters_of(request).provider
    if provider is None:
        raise NotThere("this console knows no identity provider; start it with --oidc-issuer")
    return provider


def _callback(request: Request) -> str:
    return f"{request.url.scheme}://{request.headers.get('host', '')}{CALLBACK}"


def _apology(error: ConsoleError) -> Response:
    return small_page("", f"The login failed: {str(error).rstrip('.')}.", error.status)


def small_page(head: str, text: str, status: int) -> Response:
    """A page with one sentence."""
    return HTMLResponse(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>OrbitMQ console</title>{head}"
        '<link rel="stylesheet" href="/static/base.css">'
        '<link rel="stylesheet" href="/static/console.css"></head>'
        f'<body><div class="gate"><div class="card"><p>{html.escape(text)}</p>'
        '<p><a href="/">To the console</a></p></div></div></body></html>',
        status,
        headers={"cache-control": "no-store"},
    )


async def access(request: Request) -> Response:
    """The users, their sessions, and what each role may do."""
    check_right(request, Right.ACCESS)
    logins, mine = clusters_of(request).logins, session_of(request)
    users = logins.users
    return answer(
        {
            "users": None
            if users is None
            else [{"name": name, "role": user.role} for name, user in users.all.items()],
            "sessions": [
                pick(each, "id user role via address since", is_mine=each.id == mine.id)
                for each in logins.sessions
            ],
            "roles": list(Role),
            "rules": [
                {"about": rule.about, "least": rule.least, "is_change": rule.is_change}
                for rule in RULES.values()
            ],
        }
    )


async def end_session(request: Request) -> Response:
    """End a session; its pages show the login."""
    check_right(request, Right.ACCESS)
    clusters = clusters_of(request)
    found = clusters.logins.end(request.path_params["id"])
    if found is None:
        raise NotThere("this session has ended already")
    await clusters.note(
        actor_of(request), f"end a session of {found.user}", f"the one from {found.address} ended"
    )
    return Response(status_code=204)


class UserRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A new user."""

    name: str
    role: Role
    password: str


class UserChange(msgspec.Struct, forbid_unknown_fields=True):
    """What of a user becomes different; the user's sessions end."""

    role: Role | None = None
    password: str | None = None


async def add_user(request: Request) -> Response:
    """Add a user."""
    users = _users(request)
    wanted = await read_body(request, UserRequest, largest=_LARGEST)
    done = command(Action.ADD_USER, wanted.name, role=wanted.role.value, users=users.file)
    return await _changed(
        request, lambda: users.add(wanted.name, wanted.role, wanted.password), done, "added"
    )


async def change_user(request: Request) -> Response:
    """Give a user another role or password."""
    users, name = _users(request), request.path_params["name"]
    wanted = await read_body(request, UserChange, largest=_LARGEST)
    if wanted.role is None and wanted.password is None:
        raise BadInput("role or password must be given")
    if wanted.role is not None:
        _check_not_last(users, name, wanted.role)
        done = command(Action.SET_ROLE, name, wanted.role.value, users=users.file)
    else:
        done = command(Action.SET_PASSWORD, name, users=users.file)
    outcome = " and ".join(
        ([] if wanted.role is None else [f"is {wanted.role} now"])
        + ([] if wanted.password is None else ["has another password"])
    )
    return await _changed(
        request,
        lambda: users.change(name, role=wanted.role, password=wanted.password),
        done,
        outcome,
    )


async def remove_user(request: Request) -> Response:
    """Remove a user; the user's sessions end."""
    users, name = _users(request), request.path_params["name"]
    _check_not_last(users, name, None)
    done = command(Action.REMOVE_USER, name, users=users.file)
    return await _changed(request, lambda: users.remove(name), done, "removed")


def _users(request: Request) -> Users:
    check_right(request, Right.ACCESS)
    users = clusters_of(request).logins.users
    if users is None:
        raise NotThere("this console has no file of users; start it with --users FILE")
    return users


class PasswordChange(msgspec.Struct, forbid_unknown_fields=True):
    """Another password of the user who asks."""

    current: str
    password: str


async def change_password(request: Request) -> Response:
    """Give oneself another password; other sessions of the user end."""
    clusters, session = clusters_of(request), session_of(request)
    logins, name = clusters.logins, session.user
    if logins.users is None or session.entry is None or name is None:
        raise NotThere("only users of the console's file have a password to change here")
    wanted = await read_body(request, PasswordChange, largest=_LARGEST)
    # Counted as a login, so that an open page does not help to guess the password.
    token = await logins.log_in(wanted.current, address_of(request), name)
    logins.log_out(token)
    done = command(Action.SET_PASSWORD, name, users=logins.users.file)
    users = logins.users
    await asyncio.to_thread(lambda: users.change(name, password=wanted.password))
    await clusters.note(actor_of(request), done, "has another password")
    if (entry := users.all.get(name)) is None:
        raise NotLoggedIn
    begun = logins.begin(name, entry.role, address_of(request), entry=entry)
    response = answer(me_content(request, logins.session(begun)))
    set_session(request, response, begun)
    return response


def _check_not_last(users: Users, name: str, role: Role | None) -> None:
    admins = [each for each, user in users.all.items() if user.role is Role.ADMIN]
    if admins == [name] and role is not Role.ADMIN:
        raise BadInput(f"{name} is the last admin; make another user an admin first")


async def _changed(
    request: Request, change: Callable[[], None], done: str, outcome: str
) -> Response:
    # Before the change, which may end the session of the request.
    who = actor_of(request)
    await asyncio.to_thread(change)
    await clusters_of(request).note(who, done, outcome)
    content: dict[str, Any] = {"command": done, "outcome": outcome}
    return answer(content)


#: Outside of the API: browsers come here from the provider's site.
pages = [Route("/login/oidc", begin_oidc), Route(CALLBACK, finish_oidc)]

routes = [
    Route("/me", me),
    Route("/login", log_in, methods=["POST"]),
    Route("/logout", log_out, methods=["POST"]),
    Route("/password", change_password, methods=["POST"]),
    Route("/access", access),
    Route("/access/sessions/{id}", end_session, methods=["DELETE"]),
    Route("/access/users", add_user, methods=["POST"]),
    Route("/access/users/{name}", change_user, methods=["PATCH"]),
    Route("/access/users/{name}", remove_user, methods=["DELETE"]),
]
