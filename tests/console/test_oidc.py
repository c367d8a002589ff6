"""OpenID Connect, against a provider on loopback."""

from __future__ import annotations

import asyncio
import html
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest

from orbitmq.console.roles import Role
from orbitmq.console.settings import OidcSettings
from orbitmq.errors import SettingError
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consoles import Answer, Browser, console_of
from tests.support.oidc import CLIENT, SECRET, OidcProvider, new_key

pytestmark = pytest.mark.feature("W6")

ROLES = {"sre": Role.ADMIN, "shop": Role.OPERATOR, "everybody": Role.READER}


@pytest.fixture
def provider():
    with OidcProvider(claims={"groups": ["shop", "others"]}) as found:
        yield found


def settings(provider: OidcProvider, **changes: Any) -> OidcSettings:
    usual: dict[str, Any] = {
        "issuer": provider.issuer,
        "client_id": CLIENT,
        "client_secret": SECRET,
        "roles": ROLES,
    }
    return OidcSettings(**usual | changes)


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster() as found:
        await found.create_topic("orders")
        yield found


@pytest.fixture
async def page(cluster, provider):
    async with console_of(cluster, oidc=settings(provider)) as found:
        yield found


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def sent_back(address: str) -> str:
    """Where the provider's page sends the browser."""
    try:
        urllib.request.build_opener(_Stay).open(address, timeout=10)
    except urllib.error.HTTPError as answer:
        return answer.headers["location"]
    raise AssertionError("the provider did not send the browser back")


async def returned(page: Browser) -> str:
    """Begin a login and go through the provider; the path and query of the way back."""
    begun = await page.ask("GET", "/login/oidc")
    assert begun.status == 303, begun.body
    back = urlsplit(await asyncio.to_thread(sent_back, begun.headers["location"]))
    assert back.netloc == f"127.0.0.1:{page.console.port}"
    return f"{back.path}?{back.query}"


async def finished(page: Browser) -> Answer:
    answer = await page.ask("GET", await returned(page))
    if answer.status == 200:
        await page.begin()
    return answer


def words(answer: Answer) -> str:
    return html.unescape(answer.body.decode())


async def test_somebody_whom_the_provider_knows_gets_the_role_of_a_group(page, provider):
    assert (await page.get("/me"))["provider"] == "127.0.0.1"
    answer = await finished(page)
    me = await page.get("/me")
    await page.post("/send", {"topic": "orders", "body": "x"})
    await page.send("DELETE", "/topics/orders", None, 403)
    (line,) = (await page.get("/audit"))["lines"]

    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert "refresh" in words(answer)
    assert (me["user"], me["role"]) == ("grace", "operator")
    assert line["who"] == "grace (by 127.0.0.1), 127.0.0.1"
    assert provider.asked == ["/.well-known/openid-configuration", "/authorize", "/token", "/keys"]
    await page.post("/logout", None, 204)
    await page.get("/topics", 401)


@pytest.mark.parametrize(
    ("claims", "changes", "role"),
    [
        ({"groups": ["everybody", "sre", "shop"]}, {}, "admin"),
        ({"groups": "everybody"}, {}, "reader"),
        ({"groups": []}, {"roles": {"*": Role.READER, "sre": Role.ADMIN}}, "reader"),
        ({"groups": ["sre"]}, {"roles": {"*": Role.READER, "sre": Role.ADMIN}}, "admin"),
        ({"realm_access": {"roles": ["shop"]}}, {"claim": "realm_access.roles"}, "operator"),
        ({"groups": ["others"]}, {}, None),
        ({"groups": None}, {}, None),
        ({"groups": [None, {"sre": 1}, 7]}, {}, None),
        ({"groups": True}, {}, None),
        ({"realm_access": "sre"}, {"claim": "realm_access.roles"}, None),
    ],
)
async def test_a_claim_decides_about_the_role(cluster, provider, claims, changes, role):
    provider.claims |= claims
    async with console_of(cluster, oidc=settings(provider, **changes)) as page:
        answer = await finished(page)
        me = await page.get("/me")

    assert me.get("role") == role
    if role is None:
        assert answer.status == 403
        assert "grace has no role here" in words(answer)


NOW = int(time.time())


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"iss": "http://127.0.0.1:1"}, "issuer"),
        ({"aud": "another application"}, "Audience"),
        ({"aud": [CLIENT, "another application"]}, "another application"),
        ({"azp": "another application"}, "another application"),
        ({"nonce": "of an earlier login"}, "another login"),
        ({"nonce": None}, "another login"),
        ({"exp": NOW - 3600}, "expired"),
        ({"exp": None}, "exp"),
        ({"iat": NOW + 3600}, "iat"),
        ({"sub": None}, "sub"),
    ],
)
async def test_a_token_that_is_not_for_this_login_opens_nothing(page, provider, claims, said):
    provider.claims |= claims
    answer = await finished(page)

    assert answer.status == 403
    assert said in words(answer)
    await page.get("/topics", 401)


@pytest.mark.parametrize(
    ("algorithm", "key", "said"),
    [
        ("RS256", new_key(), "Signature verification failed"),
        ("HS256", "a secret that is long enough for a signature", "signed with 'HS256'"),
        ("none", "", "signed with 'none'"),
    ],
    ids=["another key", "a shared secret", "no key"],
)
async def test_a_token_that_the_provider_did_not_sign_opens_nothing(
    page, provider, algorithm, key, said
):
    provider.algorithm, provider.signs_with = algorithm, key
    answer = await finished(page)

    assert answer.status == 403
    assert said in words(answer)


async def test_a_new_key_of_the_provider_is_fetched_and_an_unknown_one_refused(page, provider):
    assert (await finished(page)).status == 200
    provider.rotate()
    assert (await finished(page)).status == 200
    assert provider.asked.count("/keys") == 2
    kept, provider.kid = provider.kid, "unheard-of"
    provider.get = _with_keys_of(provider, kept)
    answer = await finished(page)

    assert answer.status == 403
    assert "a key that the provider does not publish" in words(answer)


def _with_keys_of(provider: OidcProvider, kid: str) -> Any:
    usual = provider.get

    def get(handler: Any) -> None:
        signing, provider.kid = provider.kid, kid
        try:
            usual(handler)
        finally:
            provider.kid = signing

    return get


async def test_a_login_is_finished_once_and_in_the_browser_that_began_it(page):
    back = await returned(page)
    thief = Browser(page.console)
    stolen = await thief.ask("GET", back)
    assert (await page.ask("GET", back)).status == 200
    again = await page.ask("GET", back)
    forged = await page.ask("GET", "/login/oidc/callback?code=x&state=y")

    for answer in (stolen, again, forged):
        assert answer.status == 403
        assert "begin again" in words(answer)
        assert "set-cookie" not in answer.headers


async def test_what_the_provider_refuses_is_said_and_is_no_markup(page, provider):
    provider.refusal = {"error": "access_denied", "error_description": "<b>not you</b>"}
    answer = await finished(page)

    assert answer.status == 403
    assert b"<b>" not in answer.body
    assert "<b>not you</b>" in words(answer)


@pytest.mark.parametrize(
    ("methods", "secret", "status"),
    [
        (["client_secret_post"], SECRET, 200),
        (["none"], None, 200),
        (["client_secret_basic"], "a wrong one", 403),
    ],
)
async def test_the_console_proves_who_it_is(cluster, provider, methods, secret, status):
    provider.about = {"token_endpoint_auth_methods_supported": methods}
    async with console_of(cluster, oidc=settings(provider, client_secret=secret)) as page:
        assert (await finished(page)).status == status


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"issuer": "https://another.example"}, "another.example"),
        ({"token_endpoint": "http://192.0.2.1/token"}, "token_endpoint"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri"),
        ({"authorization_endpoint": None}, "authorization_endpoint"),
    ],
)
async def test_a_provider_that_says_strange_things_is_not_used(page, provider, about, said):
    provider.about = about
    answer = await page.ask("GET", "/login/oidc")

    assert answer.status == 502
    assert said in words(answer)


async def test_a_provider_that_is_away_leaves_the_page_with_the_reason_and_is_asked_again(
    cluster, provider
):
    with OidcProvider() as away:
        pass
    async with console_of(cluster, oidc=settings(provider, issuer=away.issuer)) as page:
        answer = await page.ask("GET", "/login/oidc")
        assert (await page.ask("GET", "/")).status == 200

    assert answer.status == 502
    assert "cannot be asked" in words(answer)


async def test_users_of_a_file_and_of_the_provider_go_together(cluster, provider, tmp_path):
    file = tmp_path / "users.json"
    file.write_text('{"users": {}}')
    async with console_of(cluster, oidc=settings(provider), users=file) as page:
        me = await page.get("/me")
        assert (await finished(page)).status == 200

    assert me == {"login": True, "version": None, "users": True, "provider": "127.0.0.1"}


async def test_with_a_provider_alone_no_password_opens_a_session(page):
    for given in ({"password": ""}, {"password": "", "user": "grace"}):
        await page.post("/login", given, 403)


async def test_without_a_provider_there_is_no_such_login(cluster):
    async with console_of(cluster) as page:
        for path in ("/login/oidc", "/login/oidc/callback?state=x"):
            assert (await page.ask("GET", path)).status == 404


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"issuer": "http://idp.example.org"}, "https://"),
        ({"issuer": "ftp://127.0.0.1"}, "https://"),
        ({"redirect": "javascript:alert(1)"}, "https://"),
        ({"client_id": ""}, "--oidc-client"),
        ({"roles": {}}, "--oidc-role"),
        ({"scopes": ("email",)}, "openid"),
    ],
)
def test_settings_that_cannot_work_are_refused(provider, changes, said):
    with pytest.raises(SettingError, match=said):
        settings(provider, **changes)
