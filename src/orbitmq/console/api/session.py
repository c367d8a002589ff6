"""Who asks, and what this console lets them do."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq import __version__
from orbitmq.console.answers import answer, given
from orbitmq.console.logins import Session, cookie_name
from orbitmq.console.parts import Parts, parts_of, session_token, who

#: Bytes of what those may send whom nobody knows yet.
_LARGEST = 4096


class Password(msgspec.Struct, forbid_unknown_fields=True):
    """What somebody types."""

    password: str


def me_content(parts: Parts, session: Session | None) -> dict[str, object]:
    """Nothing but the wish for a password, for those who have not given it."""
    if session is None:
        return {"login": True, "version": None}
    return {
        "login": False,
        "can_log_out": parts.logins.is_needed,
        "write": parts.settings.write,
        "csrf": session.csrf,
        "version": __version__,
        "name_servers": parts.settings.client.name_servers,
    }


async def me(request: Request) -> Response:
    """Whether to log in, what is allowed, and the token for requests that change something."""
    return answer(me_content(parts_of(request), request.state.session))


async def log_in(request: Request) -> Response:
    """Begin a session with the `password`; the answer sets a cookie."""
    parts = parts_of(request)
    given_password = (await given(request, Password, largest=_LARGEST)).password
    token = parts.logins.log_in(given_password, who(request))
    response = answer(me_content(parts, parts.logins.session(token)))
    response.set_cookie(
        _cookie(request),
        token,
        max_age=int(parts.settings.session),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )
    return response


async def log_out(request: Request) -> Response:
    """End the session."""
    parts_of(request).logins.log_out(session_token(request))
    response = Response(status_code=204)
    response.delete_cookie(_cookie(request), path="/")
    return response


def _cookie(request: Request) -> str:
    return cookie_name(request.headers.get("host", ""))


routes = [
    Route("/me", me),
    Route("/login", log_in, methods=["POST"]),
    Route("/logout", log_out, methods=["POST"]),
]
