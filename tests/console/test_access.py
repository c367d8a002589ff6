"""Access: hosts, sites, passwords, sessions, tokens and write rights."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.routing import Route

from orbitmq.console import http
from orbitmq.console.app import api
from orbitmq.console.http import LARGEST
from orbitmq.console.logins import MOST_SESSIONS, Logins
from orbitmq.console.settings import Forbidden, TooManyAttempts
from orbitmq.testing import AsyncEmbeddedCluster
from tests.console.conftest import QUEUE, die, read_only
from tests.support.consoles import DEADLINE, console_of
from tests.support.consuming import until

PASSWORD = "correct horse battery"  # noqa: S105
TOKEN = "staple-of-pipelines"  # noqa: S105
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def locked():
    """A console with a password and a token for pipelines."""
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD, token=TOKEN) as browser,
    ):
        await cluster.create_topic("secret-plans")
        yield browser


async def log_in(browser):
    answer = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})
    assert answer.status == 200
    browser.csrf = answer.json["csrf"]
    return answer


async def test_every_answer_forbids_foreign_scripts(desk):
    for path in ("/", "/groups/x", "/static/main.js", "/api/v1/now", "/api/v1/nothing"):
        answer = await desk.browser.ask("GET", path)

        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
    assert answer.status == 404
    assert answer.json["error"]


async def test_only_addresses_and_known_names_of_this_host_are_served(desk):
    async def asked(host):
        return await desk.browser.ask("GET", "/api/v1/now", headers={"host": host})

    for host in ("evil.example", "localhost.evil.example", "evil.example:80", ""):
        answer = await asked(host)
        assert answer.status == 403
        assert "--allow-host" in answer.json["error"]
    for host in ("localhost", "localhost:8090", "127.0.0.1", "[::1]:8090"):
        assert (await asked(host)).status == 200
    async with console_of(desk.cluster, allowed_hosts=("Console.Example.org",)) as browser:
        allowed = await browser.ask("GET", "/", headers={"host": "console.example.ORG:443"})
    assert allowed.status == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80/static/?", "[::1]/static/#", "localhost:1/x?", "[::1]x", "a b"]
)
async def test_a_path_in_the_host_header_does_not_replace_the_login(locked, host):
    for method, path in (("GET", "/api/v1/topics"), ("DELETE", "/api/v1/topics/x")):
        answer = await locked.ask(method, path, headers={"host": host})

        assert answer.status in (400, 401, 403), path


async def test_other_sites_may_link_to_the_page_but_not_use_the_api(desk):
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        headers = {"sec-fetch-site": site}
        answer = await desk.browser.ask("GET", "/api/v1/topology", headers=headers)
        page = await desk.browser.ask("GET", "/topology", headers=headers)

        assert (answer.status, page.status) == (status, 200)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-csrf-token": ""},
        {"x-csrf-token": "wrong"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
)
async def test_another_site_cannot_change_anything(desk, headers):
    draft = {"name": "made-by-evil", "queues": 1}

    answer = await desk.browser.ask("POST", "/api/v1/topics", draft, headers=headers)

    assert answer.status == 403
    names = [topic.name for topic in await desk.world.admin.topics.list()]
    assert "made-by-evil" not in names


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/views",
        "/static/%00",
    ],
)
async def test_files_outside_of_the_static_ones_are_not_served(desk, path):
    answer = await desk.browser.ask("GET", path)

    assert b"root:" not in answer.body
    assert answer.status in (400, 404) or b'id="boot"' in answer.body


async def test_without_write_rights_the_answer_names_the_command(desk):
    read_only(desk.browser)
    refused = await desk.browser.post("/topics", {"name": "new"}, 403)
    preview = await desk.browser.post("/topics", {"name": "new", "queues": 2, "dry_run": True})

    assert "orbitmq topic create new" in refused["error"]
    assert preview["command"] == f"orbitmq topic create new --queues 2{desk.aim}"
    assert (await desk.browser.get("/me"))["write"] is False


#: Requests other than GET that change neither the cluster nor the list of pipelines, and reports
#: of drivers, which have a token.
HARMLESS = {
    ("POST", "/login"),
    ("POST", "/logout"),
    ("POST", "/password"),
    ("POST", "/progress/plan"),
    ("POST", "/dead-letters/{group}/replay/command"),
    ("POST", "/pipelines/{name:path}"),
    # How this console shows bodies; the cluster stays as it is.
    ("PUT", "/topics/{topic}/decoder"),
    # Users of this console; the cluster stays as it is.
    ("DELETE", "/access/sessions/{id}"),
    ("POST", "/access/users"),
    ("PATCH", "/access/users/{name}"),
    ("DELETE", "/access/users/{name}"),
    # Needs a webhook; `test_users.py` asks it.
    ("POST", "/alerts/{name}/test"),
}


async def changes(desk):
    """A request for every address that changes something, by method and route."""
    page = desk.browser
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    await die(desk.world, 3)
    await page.post("/pipelines/q", {"state": "stopped"}, 204)
    slow = await page.post("/dead-letters/billing/replay", {"rate": 0.01}, 202)
    sent = await desk.world.send(QUEUE, b"x", UNIQ_KEY="7F0000010000AA01" * 2)
    move = {"action": "reset", "group": "billing", "topic": "orders", "to": "latest"}
    plan = (await page.post("/progress/plan", move))["plan"]
    quiet = {"subject": "orders", "for": 60, "reason": "why"}
    silent = await page.post("/silences", quiet, 201)
    asked: dict[tuple[str, str], tuple[str, object]] = {
        ("DELETE", "/replays/{id}"): (f"/replays/{slow['id']}", None),
        ("POST", "/topics"): ("/topics", {"name": "new", "queues": 1}),
        ("PATCH", "/topics/{topic}"): ("/topics/orders", {"queues": 3}),
        ("POST", "/send"): ("/send", {"topic": "orders", "body": "x"}),
        ("POST", "/messages/resend"): ("/messages/resend", {"id": sent.msg_id}),
        ("POST", "/groups/{group}/pause"): ("/groups/billing/pause", {}),
        ("POST", "/groups/{group}/resume"): ("/groups/billing/resume", {}),
        ("POST", "/progress/apply"): ("/progress/apply", {"plan": plan}),
        ("POST", "/dead-letters/{group}/replay"): ("/dead-letters/billing/replay", {"count": 1}),
        ("DELETE", "/pipelines/{name:path}"): ("/pipelines/q", None),
        ("DELETE", "/topics/{topic}"): ("/topics/new", None),
        ("POST", "/silences"): ("/silences", quiet),
        ("DELETE", "/silences/{identity}"): (f"/silences/{silent['id']}", None),
    }
    return slow["id"], asked


async def test_every_address_that_changes_something_needs_write_rights_and_leaves_an_audit_line(
    desk,
):
    page = desk.browser
    slow, asked = await changes(desk)
    changing = {
        (method, route.path)
        for route in api.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"GET", "HEAD"}
    }
    # A new address is classified here.
    assert changing == asked.keys() | HARMLESS

    async def lines():
        return len((await page.get("/audit"))["lines"])

    before_all = await lines()
    read_only(page)
    for (method, _), (path, content) in asked.items():
        refused = await page.send(method, path, content, 403)
        assert "--write" in refused["error"], path
    assert await lines() == before_all
    assert (await page.get(f"/replays/{slow}"))["is_running"]

    read_only(page, write=True)
    for (method, _), (path, content) in asked.items():
        before = await lines()
        answer = await page.ask(method, f"/api/v1{path}", content)
        assert answer.status < 300, (path, answer.body)
        if path.endswith("/replay"):
            await page.until(f"/replays/{answer.json['id']}", lambda it: not it["is_running"])
        assert await lines() > before, path


async def test_nothing_is_shown_before_the_password_and_after_the_logout(locked, caplog):
    caplog.set_level(logging.DEBUG)

    page = (await locked.ask("GET", "/")).body.decode()
    me = await locked.get("/me")
    before = [(await locked.ask("GET", f"/api/v1/{it}")).status for it in ("topics", "events")]
    wrong = await locked.ask("POST", "/api/v1/login", {"password": "correct horse"})
    large = await locked.ask("POST", "/api/v1/login", {"password": "x" * 5000})
    cookie = (await log_in(locked)).headers["set-cookie"]
    await locked.until("/topics?search=secret-plans", lambda found: found["total"] == 1)
    inside = (await locked.ask("GET", "/")).body.decode()
    await locked.post("/logout", None, 204)
    after = await locked.ask("GET", "/api/v1/topics")

    assert me == {"login": True, "version": None}
    assert (*before, wrong.status, large.status, after.status) == (401, 401, 403, 400, 401)
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    for text in (page, inside, caplog.text):
        assert PASSWORD not in text
        assert TOKEN not in text


async def test_a_stream_ends_with_the_session(locked, monkeypatch):
    monkeypatch.setattr(http, "SILENCE", 0.05)
    await log_in(locked)
    listening = asyncio.create_task(locked.ask("GET", "/api/v1/events"))
    await until(lambda: locked.console.state.events.listeners == 1)

    await locked.post("/logout", None, 204)
    async with asyncio.timeout(DEADLINE):
        ended = await listening

    assert ended.status == 200
    assert ended.body.startswith(b"retry:")


async def test_after_wrong_passwords_an_address_has_to_wait():
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD, attempts=2) as browser,
    ):
        for _ in range(2):
            await browser.post("/login", {"password": "no idea at all"}, 403)
        answer = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})

    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 0


async def test_two_consoles_on_one_machine_keep_their_logins_apart(locked):
    async with AsyncEmbeddedCluster() as cluster, console_of(cluster, password=PASSWORD) as second:
        # A browser sends both the cookies of the host, whatever the port.
        second.cookies = locked.cookies
        for browser in (locked, second):
            await log_in(browser)
        for browser in (locked, second):
            await browser.get("/audit")
        await second.post("/logout", None, 204)
        await locked.get("/audit")
        await second.get("/audit", 401)

    assert len(locked.cookies) == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"authorization": "Bearer wrong"}, 403),
        ({"authorization": f"Basic {TOKEN}"}, 403),
        (BEARER | {"content-type": "text/plain"}, 403),
        (BEARER, 204),
    ],
)
async def test_pipelines_report_with_the_token(locked, headers, status):
    report = {"state": "running"}

    answer = await locked.ask("POST", "/api/v1/pipelines/q", report, headers=headers)

    assert answer.status == status


async def test_the_token_permits_to_read_and_forget_reports_and_nothing_else(locked):
    await locked.ask("POST", "/api/v1/pipelines/q", {"state": "running"}, headers=BEARER)

    async def asked(path, headers, method="GET"):
        return (await locked.ask(method, f"/api/v1/{path}", headers=headers)).status

    wrong = {"authorization": "Bearer wrong"}
    assert await asked("pipelines", BEARER) == await asked("pipelines/q", BEARER) == 200
    assert await asked("pipelines", wrong) == await asked("pipelines", {}) == 401
    for path in ("now", "topics", "pipelinesx", "pipelines/../topics"):
        assert await asked(path, BEARER) in (401, 404)
    assert await asked("pipelines/q", wrong, "DELETE") == 401
    assert await asked("pipelines/q", BEARER, "DELETE") == 204
    assert await asked("topics/orders", BEARER, "DELETE") == 401


@pytest.mark.parametrize("body", [b"[" * (LARGEST + 1), b"{nonsense"], ids=["large", "no JSON"])
async def test_requests_that_are_too_large_or_no_json_are_refused(desk, body):
    assert (await desk.browser.ask("POST", "/api/v1/send", body=body)).status == 400


class HandClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def logins(clock):
    return Logins(PASSWORD, clock, lasts=100.0, attempts=3)


async def guess(logins, *addresses, user=None):
    for address in addresses:
        with pytest.raises(Forbidden):
            await logins.log_in("wrong password", address, user)


async def test_the_right_password_opens_a_session_that_ends(logins, clock):
    token = await logins.log_in(PASSWORD, "10.0.0.1")
    assert logins.session(token) is not None
    assert logins.session("another") is None
    assert logins.session(None) is None

    clock.time += 100.0
    assert logins.session(token) is None


async def test_guessing_from_many_addresses_is_limited_as_well(logins):
    await guess(logins, *(f"10.0.0.{number}" for number in range(30)))

    with pytest.raises(TooManyAttempts):
        await logins.log_in("wrong password", "10.0.1.1")


async def test_logging_out_ends_one_session_and_the_number_of_sessions_is_bounded(logins):
    mine, *others = [await logins.log_in(PASSWORD, "a") for _ in range(3)]
    logins.log_out(mine)
    logins.log_out(None)
    assert [logins.session(each) is None for each in (mine, *others)] == [True, False, False]

    tokens = [await logins.log_in(PASSWORD, "a") for _ in range(MOST_SESSIONS)]
    assert [logins.session(each) is None for each in (*others, tokens[-1])] == [True, True, False]
