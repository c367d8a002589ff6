"""The door: what is checked before any request reaches a view.

* The `Host` must be one under which this console is known. A name that somebody else owns and lets
  point here (DNS rebinding) would otherwise make a browser on this machine his hand. Addresses
  cannot be rebound, so they are always fine.
* What is asked for is the path as it was routed: an address that is put together with a header of
  the request could say something else.
* The interface answers pages of its own only. Others cannot read what it says, but they could make
  it work.
* Requests that change something must come from our own page: `Origin`, if there is one, must be
  this host, and the session's token must be in a header, which no form and no other site can set.
* Every answer carries a policy that lets the page run our scripts only.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orbitmq.console.answers import failed
from orbitmq.console.errors import ConsoleError, Forbidden, NotLoggedIn
from orbitmq.console.logins import Logins, Session, cookie_name, same_text

CSRF_HEADER = "x-csrf-token"

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: What can be asked for without a session: the page itself, which holds nothing, and the way in.
_OPEN_PATHS = ("/static/", "/health")
_LOGIN_PATHS = frozenset({"/api/v1/login", "/api/v1/me"})
#: Reports of pipelines have a token of their own; whoever may report may see what was reported, and
#: take it back.
PIPELINES = "/api/v1/pipelines/"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Door:
    """Checks requests, and marks answers."""

    def __init__(
        self, app: ASGIApp, *, logins: Logins, allowed_hosts: Iterable[str], token: str | None
    ) -> None:
        self._app = app
        self._logins = logins
        self._hosts = frozenset(name.lower() for name in allowed_hosts) | {"localhost"}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/api/"):
                    headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            self._check(Request(scope))
        except ConsoleError as error:
            await failed(error)(scope, receive, marked)
            return
        await self._app(scope, receive, marked)

    def _check(self, request: Request) -> None:
        self._check_host(request.headers)
        path: str = request.scope["path"]
        cookie = request.cookies.get(cookie_name(request.headers.get("host", "")))
        session = self._logins.session(cookie)
        request.scope.setdefault("state", {})["session"] = session
        if path.startswith("/api/"):
            _check_site(request.headers)
        if request.method not in _SAFE:
            self._check_origin(request.headers)
        if request.method == "POST" and path.startswith(PIPELINES):
            self._check_report(request)
            return
        if (
            request.method in ("GET", "DELETE")
            and f"{path}/".startswith(PIPELINES)
            and self._has_token(request)
        ):
            return
        if not path.startswith("/api/") or path in _LOGIN_PATHS or path.startswith(_OPEN_PATHS):
            return
        if session is None:
            raise NotLoggedIn
        if request.method not in _SAFE:
            _check_token(request, session)

    def _check_host(self, headers: Headers) -> None:
        host = _name(headers.get("host", ""))
        if host in self._hosts or _is_address(host):
            return
        raise Forbidden(
            f"this console is not known as {host[:100]!r}; allow the name with --allow-host"
        )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise Forbidden("the request comes from another site")

    def _check_report(self, request: Request) -> None:
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise Forbidden("a report is sent as application/json")
        if self._token is None and not self._logins.is_needed:
            return
        if not self._has_token(request):
            raise Forbidden(
                "a pipeline reports with the console's token: Authorization: Bearer TOKEN; start "
                "the console with ORBITMQ_CONSOLE_TOKEN or --token-file"
            )

    def _has_token(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        is_bearer = self._token is not None and kind.lower() == "bearer"
        return is_bearer and same_text(given, self._token or "")


def _check_site(headers: Headers) -> None:
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("the request comes from another site")


def _check_token(request: Request, session: Session) -> None:
    if not same_text(request.headers.get(CSRF_HEADER, ""), session.csrf):
        raise Forbidden("the page is out of date; load it again")


#: A name or an address, and a port: nothing else may be in the header.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")


def _name(host: str) -> str:
    """The host without its port; what cannot be one is returned as it is, and known to nobody."""
    match = _HOST.fullmatch(host.strip().lower())
    return host if match is None else match[1] or match[2]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
