"""OpenID Connect: the authorization code flow with PKCE, and the check of the ID token.

The provider's addresses come from its discovery document, its keys from its JWKS. A login that was
begun here is kept in memory under its `state`, belongs to one browser, and can be finished once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt

from orbitmq.clock import Clock
from orbitmq.console.roles import Role
from orbitmq.console.settings import (
    OIDC_PATIENCE,
    Forbidden,
    OidcSettings,
    ProviderAway,
    check_provider_address,
)
from orbitmq.errors import SettingError

#: Seconds for an answer of the provider.
TIMEOUT = 10.0
_LARGEST = 1024 * 1024
_MOST = 1000
#: Seconds by which the clocks of the provider and of this machine may differ.
_LEEWAY = 30
#: With a key pair only: a secret that both sides know could be used by anybody who knows it.
_ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody the provider vouches for."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class _Begun:
    """A login that a user finishes at the provider."""

    browser: str
    nonce: str
    verifier: str
    redirect: str
    until: float


class Provider:
    """An identity provider."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._begun: dict[str, _Begun] = {}
        self._about: Mapping[str, Any] | None = None
        self._keys: Mapping[str, Any] | None = None
        self._lock = asyncio.Lock()

    async def begin(self, browser: str, redirect: str) -> str:
        """Where to send the browser: to the provider. `browser` is a secret of the browser."""
        about = await self._discovered()
        now = self._clock.monotonic()
        self._begun = {key: each for key, each in self._begun.items() if each.until > now}
        while len(self._begun) >= _MOST:
            del self._begun[next(iter(self._begun))]
        state = secrets.token_urlsafe(24)
        begun = _Begun(
            browser,
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            redirect=redirect,
            until=now + OIDC_PATIENCE,
        )
        self._begun[state] = begun
        challenge = hashlib.sha256(begun.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": redirect,
            "scope": " ".join(self.settings.scopes),
            "state": state,
            "nonce": begun.nonce,
            "code_challenge": base64.urlsafe_b64encode(challenge).decode().rstrip("="),
            "code_challenge_method": "S256",
        }
        address = str(about["authorization_endpoint"])
        return f"{address}{'&' if '?' in address else '?'}{urllib.parse.urlencode(query)}"

    async def finish(self, browser: str | None, answer: Mapping[str, str]) -> Identity:
        """The one who logged in. `answer` is what the provider sent the browser back with."""
        begun = self._begun.get(answer.get("state", ""))
        if (
            begun is None
            or begun.until <= self._clock.monotonic()
            or not secrets.compare_digest(begun.browser.encode(), (browser or "").encode())
        ):
            raise Forbidden("this login was not begun in this browser, or is too old; begin again")
        del self._begun[answer["state"]]
        about = await self._discovered()
        if answer.get("iss", about["issuer"]) != about["issuer"]:
            raise Forbidden("another identity provider answered than was asked")
        if "error" in answer:
            said = answer.get("error_description") or answer["error"]
            raise Forbidden(f"the identity provider refused the login: {said[:200]}")
        tokens = await self._redeem(about, begun, answer.get("code", ""))
        claims = await self._verified(about, str(tokens.get("id_token", "")), begun.nonce)
        return self._identity(claims)

    async def _redeem(
        self, about: Mapping[str, Any], begun: _Begun, code: str
    ) -> Mapping[str, Any]:
        settings = self.settings
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": begun.redirect,
            "code_verifier": begun.verifier,
        }
        headers = {}
        methods = about.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        if settings.client_secret is None:
            form["client_id"] = settings.client_id
        elif "client_secret_basic" in methods:
            pair = ":".join(
                urllib.parse.quote_plus(each)
                for each in (settings.client_id, settings.client_secret)
            )
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": settings.client_id, "client_secret": settings.client_secret}
        return await _ask(str(about["token_endpoint"]), form, headers)

    async def _verified(
        self, about: Mapping[str, Any], token: str, nonce: str
    ) -> Mapping[str, Any]:
        """The claims of an ID token. Raises `Forbidden` unless it is for this login."""
        try:
            header = jwt.get_unverified_header(token)
            key = await self._key(about, header.get("kid"), str(header.get("alg")))
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(_ALGORITHMS),
                audience=self.settings.client_id,
                issuer=self.settings.issuer,
                leeway=_LEEWAY,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise Forbidden(
                f"the identity provider's token is not valid: {str(error) or type(error).__name__}"
            ) from error
        if not secrets.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise Forbidden("the identity provider's token is of another login")
        is_shared = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", None if is_shared else self.settings.client_id) != (
            self.settings.client_id
        ):
            raise Forbidden("the identity provider's token is for another application")
        return claims

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        settings = self.settings
        name = next(
            (
                str(claims[each])
                for each in (settings.name_claim, "email", "sub")
                if claims.get(each)
            ),
            "",
        )
        # A claim may be a text, a list of them, or deeper, as Keycloak's `realm_access.roles`.
        found: Any = claims
        for part in settings.claim.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        some = found if isinstance(found, list) else [found]
        held = [each for each in some if isinstance(each, str)]
        roles = [role for value, role in settings.roles.items() if value == "*" or value in held]
        if not roles:
            raise Forbidden(
                f"{name} has no role here: no value of the claim {settings.claim!r} is one of "
                f"{', '.join(settings.roles)}"
            )
        order = list(Role)
        return Identity(name, max(roles, key=order.index))

    async def _discovered(self) -> Mapping[str, Any]:
        async with self._lock:
            if self._about is None:
                issuer = self.settings.issuer
                about = await _ask(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
                if about.get("issuer") != issuer:
                    raise ProviderAway(
                        f"{issuer} says that it is {about.get('issuer')!r}: give that as the issuer"
                    )
                for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                    try:
                        check_provider_address(str(about.get(name, "")))
                    except SettingError as error:
                        raise ProviderAway(f"{name} of {issuer}: {error}") from error
                self._about = about
            return self._about

    async def _key(self, about: Mapping[str, Any], kid: str | None, algorithm: str) -> jwt.PyJWK:
        if algorithm not in _ALGORITHMS:
            raise jwt.InvalidAlgorithmError(f"it is signed with {algorithm[:20]!r}")
        for is_fresh in (False, True):
            async with self._lock:
                if self._keys is None or is_fresh:
                    self._keys = await _ask(str(about["jwks_uri"]))
            usable = [
                each
                for each in self._keys.get("keys", ())
                if each.get("use", "sig") == "sig" and each.get("kty") != "oct"
            ]
            named = [each for each in usable if each.get("kid") == kid] if kid else usable
            if len(named) == 1:
                return jwt.PyJWK(named[0], None if "alg" in named[0] else algorithm)
        raise jwt.InvalidKeyError("it is signed with a key that the provider does not publish")


async def _ask(
    address: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Mapping[str, Any]:
    """The JSON object at an address. Raises `ProviderAway` or `Forbidden`."""
    return await asyncio.to_thread(_asked, address, form, headers or {})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The provider's addresses are where they say: a redirect could lead anywhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def _asked(
    address: str, form: Mapping[str, str] | None, headers: Mapping[str, str]
) -> Mapping[str, Any]:
    data = None if form is None else urllib.parse.urlencode(form).encode()
    request = urllib.request.Request(  # noqa: S310  # the address is checked
        address, data, {"accept": "application/json", **headers}
    )
    where = urllib.parse.urlsplit(address)._replace(query="").geturl()
    try:
        with _opener.open(request, timeout=TIMEOUT) as answer:
            raw = answer.read(_LARGEST)
        found = json.loads(raw)
    except urllib.error.HTTPError as error:
        if form is not None and error.code in (400, 401, 403):
            raise Forbidden(
                f"the identity provider refused the login: {_reason(error.read(_LARGEST))}"
            ) from error
        raise ProviderAway(f"{where} answered {error.code}") from error
    except (OSError, ValueError) as error:
        raise ProviderAway(f"{where} cannot be asked: {error}") from error
    if not isinstance(found, dict):
        raise ProviderAway(f"{where} did not answer a JSON object")
    return found


def _reason(raw: bytes) -> str:
    try:
        found = json.loads(raw)
        return str(found.get("error_description") or found["error"])[:200]
    except (ValueError, LookupError, AttributeError):
        return "no reason given"
