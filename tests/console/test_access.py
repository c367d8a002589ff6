"""The door: who gets in, from where, and what they may do."""

from __future__ import annotations

import asyncio
import logging

from starlette.routing import Route

from orbitmq.client.routes import Queue
from orbitmq.console import answers as streams
from orbitmq.console.answers import LARGEST
from orbitmq.console.app import api
from orbitmq.testing import AsyncEmbeddedCluster
from tests.console.conftest import read_only
from tests.support.consoles import DEADLINE, console_of
from tests.support.consuming import until

PASSWORD = "correct horse battery"  # noqa: S105
TOKEN = "staple-of-pipelines"  # noqa: S105


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


async def test_a_name_that_points_here_is_not_enough(desk):
    for host in ("evil.example", "localhost.evil.example", "evil.example:80", ""):
        answer = await desk.browser.ask("GET", "/api/v1/now", headers={"host": host})

        assert answer.status == 403
        assert "--allow-host" in answer.json["error"]


async def test_addresses_of_this_machine_are_always_fine(desk):
    for host in ("localhost", "localhost:8090", "127.0.0.1", "[::1]:8090"):
        assert (await desk.browser.ask("GET", "/api/v1/now", headers={"host": host})).status == 200


async def test_a_host_with_a_path_in_it_opens_no_door():
    async with AsyncEmbeddedCluster() as cluster, console_of(cluster, password=PASSWORD) as browser:
        for host in ("127.0.0.1:80/static/?", "[::1]/static/#", "localhost:1/x?", "[::1]x", "a b"):
            for method, path in (("GET", "/api/v1/topics"), ("DELETE", "/api/v1/topics/x")):
                answer = await browser.ask(method, path, headers={"host": host})

                assert answer.status in (400, 401, 403), (host, path)


async def test_another_site_cannot_make_it_work_either(desk):
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        headers = {"sec-fetch-site": site}
        answer = await desk.browser.ask("GET", "/api/v1/topology", headers=headers)
        page = await desk.browser.ask("GET", "/topology", headers=headers)

        assert answer.status == status
        # A link to the page itself is fine wherever it is.
        assert page.status == 200


async def test_files_outside_of_the_page_s_own_are_not_given_away(desk):
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/views",
        "/static/%00",
    ):
        answer = await desk.browser.ask("GET", path)

        assert b"import" not in answer.body.replace(b"@import", b"") or b"<html" in answer.body
        assert b"root:" not in answer.body
        assert answer.status in (200, 400, 404), path
        if answer.status == 200:
            assert b'id="boot"' in answer.body, path


async def test_a_stream_ends_with_the_session(monkeypatch):
    monkeypatch.setattr(streams, "_SILENCE", 0.05)
    async with AsyncEmbeddedCluster() as cluster, console_of(cluster, password=PASSWORD) as browser:
        answer = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})
        browser.csrf = answer.json["csrf"]
        listening = asyncio.create_task(browser.ask("GET", "/api/v1/events"))
        events = browser.console.state.events
        await until(lambda: events.listeners == 1)
        await browser.post("/logout", None, 204)
        async with asyncio.timeout(DEADLINE):
            ended = await listening

    assert ended.status == 200
    assert ended.body.startswith(b"retry:")


async def test_those_whom_nobody_knows_may_not_send_much():
    async with AsyncEmbeddedCluster() as cluster, console_of(cluster, password=PASSWORD) as browser:
        answer = await browser.ask("POST", "/api/v1/login", {"password": "x" * 5000})

    assert answer.status == 400


async def test_a_name_can_be_allowed():
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, allowed_hosts=("Console.Example.org",)) as browser,
    ):
        answer = await browser.ask("GET", "/", headers={"host": "console.example.ORG:443"})

    assert answer.status == 200


async def test_another_site_cannot_change_anything(desk):
    wish = {"name": "made-by-evil", "queues": 1}
    for headers in (
        {"x-csrf-token": ""},
        {"x-csrf-token": "wrong"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        answer = await desk.browser.ask("POST", "/api/v1/topics", wish, headers=headers)

        assert answer.status == 403, headers
    names = [topic.name for topic in await desk.world.admin.topics.list()]
    assert "made-by-evil" not in names


async def test_without_write_rights_it_says_how_to_do_it_instead():
    async with AsyncEmbeddedCluster() as cluster, console_of(cluster, write=False) as browser:
        await cluster.create_topic("orders")
        aim = f"--name-server {cluster.name_server}"
        refused = [
            await browser.post("/topics", {"name": "new"}, 403),
            await browser.send("PATCH", "/topics/orders", {"queues": 9}, 403),
            await browser.send("DELETE", "/topics/orders", None, 403),
            await browser.post("/send", {"topic": "orders", "body": "x"}, 403),
            await browser.post("/groups/g/pause", None, 403),
            await browser.post("/dead-letters/g/replay", {"count": 1}, 403),
            await browser.post("/progress/apply", {"plan": "x"}, 403),
        ]
        assert cluster.messages("orders") == []
        assert (await browser.get("/me"))["write"] is False
        preview = await browser.post("/topics", {"name": "new", "queues": 2, "dry_run": True})

    assert all("--write" in each["error"] for each in refused)
    assert "orbitmq topic create new" in refused[0]["error"]
    assert preview["command"] == f"orbitmq topic create new --queues 2 {aim}"


#: Addresses that are not asked with GET and change nothing of the cluster or the list of pipelines:
#: the way in and out, plans, previews, and the reports of drivers, who have a token for that.
HARMLESS = {
    ("POST", "/login"),
    ("POST", "/logout"),
    ("POST", "/progress/plan"),
    ("POST", "/dead-letters/{group}/replay/command"),
    ("POST", "/pipelines/{name:path}"),
}


async def test_every_address_that_changes_something_needs_the_right_and_leaves_a_line(desk):
    page = desk.browser
    await desk.world.consumer("client-1", subscriptions={"orders": "*"})
    queue = Queue("orders", "broker-a", 0)
    for number in range(3):
        await desk.world.die(queue, b"x", "KeyError", group="billing", KEYS=f"order-{number}")
    await page.post("/pipelines/q", {"state": "stopped"}, 204)
    slow = await page.post("/dead-letters/billing/replay", {"rate": 0.01}, 202)
    move = {"action": "reset", "group": "billing", "topic": "orders", "to": "end"}
    plan = (await page.post("/progress/plan", move))["plan"]
    asked: dict[tuple[str, str], tuple[str, object]] = {
        ("DELETE", "/replays/{id}"): (f"/replays/{slow['id']}", None),
        ("POST", "/topics"): ("/topics", {"name": "new", "queues": 1}),
        ("PATCH", "/topics/{topic}"): ("/topics/orders", {"queues": 3}),
        ("POST", "/send"): ("/send", {"topic": "orders", "body": "x"}),
        ("POST", "/groups/{group}/pause"): ("/groups/billing/pause", {}),
        ("POST", "/groups/{group}/resume"): ("/groups/billing/resume", {}),
        ("POST", "/progress/apply"): ("/progress/apply", {"plan": plan}),
        ("POST", "/dead-letters/{group}/replay"): ("/dead-letters/billing/replay", {"count": 1}),
        ("DELETE", "/pipelines/{name:path}"): ("/pipelines/q", None),
        ("DELETE", "/topics/{topic}"): ("/topics/new", None),
    }
    changing = {
        (method, route.path)
        for route in api.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"GET", "HEAD"}
    }
    # Whoever adds an address says here what it does.
    assert changing == asked.keys() | HARMLESS

    async def lines():
        return len((await page.get("/audit"))["lines"])

    read_only(page)
    for (method, _), (path, content) in asked.items():
        refused = await page.send(method, path, content, 403)
        assert "--write" in refused["error"], path
    assert await lines() == 0
    assert (await page.get(f"/replays/{slow['id']}"))["is_running"]

    read_only(page, write=True)
    for (method, _), (path, content) in asked.items():
        before = await lines()
        answer = await page.ask(method, f"/api/v1{path}", content)
        assert answer.status < 300, (path, answer.body)
        if path.endswith("/replay"):
            await page.until(f"/replays/{answer.json['id']}", lambda it: not it["is_running"])
        assert await lines() > before, path


async def test_who_may_only_look_may_stop_a_dry_run(desk):
    read_only(desk.browser)
    wish = {"dry_run": True}

    begun = await desk.browser.post("/dead-letters/billing/replay", wish, 202)
    await desk.browser.send("DELETE", f"/replays/{begun['id']}")

    assert (await desk.browser.get("/audit"))["lines"] == []


async def test_nothing_is_shown_before_the_password(caplog):
    caplog.set_level(logging.DEBUG)
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD, token=TOKEN) as browser,
    ):
        await cluster.create_topic("secret-plans")
        page = (await browser.ask("GET", "/")).body.decode()
        me = await browser.get("/me")
        before = await browser.ask("GET", "/api/v1/topics")
        events = await browser.ask("GET", "/api/v1/events")
        wrong = await browser.ask("POST", "/api/v1/login", {"password": "correct horse"})
        right = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})
        cookie = right.headers["set-cookie"]
        browser.csrf = right.json["csrf"]
        await browser.until("/topics?search=secret-plans", lambda found: found["total"] == 1)
        inside = (await browser.ask("GET", "/")).body.decode()
        await browser.post("/logout", None, 204)
        after = await browser.ask("GET", "/api/v1/topics")

    assert (before.status, events.status, wrong.status, after.status) == (401, 401, 403, 401)
    assert me == {"login": True, "version": None}
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    for text in (page, inside, caplog.text):
        assert PASSWORD not in text
        assert TOKEN not in text


async def test_guessing_is_slowed_down():
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD, attempts=2) as browser,
    ):
        for _ in range(2):
            await browser.post("/login", {"password": "no idea at all"}, 403)
        answer = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})

    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 0


async def test_pipelines_report_with_their_token():
    report = {"state": "running"}
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD, token=TOKEN) as browser,
    ):

        async def status(**headers):
            answer = await browser.ask("POST", "/api/v1/pipelines/q", report, headers=headers)
            return answer.status

        found = [
            await status(),
            await status(authorization="Bearer wrong"),
            await status(authorization=f"Basic {TOKEN}"),
            await status(authorization=f"Bearer {TOKEN}"),
        ]
        text = await browser.ask(
            "POST",
            "/api/v1/pipelines/q",
            body=b"{}",
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "text/plain"},
        )

    assert found == [403, 403, 403, 204]
    assert text.status == 403


async def test_requests_that_are_too_large_or_no_json_are_refused(desk):
    large = await desk.browser.ask("POST", "/api/v1/send", body=b"[" * (LARGEST + 1))
    broken = await desk.browser.ask("POST", "/api/v1/send", body=b"{nonsense")

    assert large.status == 400
    assert broken.status == 400


async def test_two_consoles_on_one_machine_keep_their_logins_apart():
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD) as first,
        console_of(cluster, password=PASSWORD) as second,
    ):
        # A browser sends both the cookies of the host, whatever the port.
        second.cookies = first.cookies
        for browser in (first, second):
            assert (
                await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})
            ).status == 200

        for browser in (first, second):
            await browser.get("/audit")
        await second.begin()
        out = await second.ask("POST", "/api/v1/logout")
        await first.get("/audit")
        await second.get("/audit", 401)

    assert len(first.cookies) == 2
    assert out.status == 204


async def test_whoever_may_report_may_see_what_was_reported_and_nothing_else():
    right = {"authorization": f"Bearer {TOKEN}"}
    async with (
        AsyncEmbeddedCluster() as cluster,
        console_of(cluster, password=PASSWORD, token=TOKEN) as browser,
    ):
        report = {"state": "running"}
        await browser.ask("POST", "/api/v1/pipelines/q", report, headers=right)

        async def asked(path, headers, method="GET"):
            return (await browser.ask(method, f"/api/v1/{path}", headers=headers)).status

        assert await asked("pipelines", right) == 200
        assert await asked("pipelines/q", right) == 200
        assert await asked("pipelines", {"authorization": "Bearer wrong"}) == 401
        assert await asked("pipelines", {}) == 401
        for path in ("now", "topics", "pipelinesx", "pipelines/../topics"):
            assert await asked(path, right) in (401, 404)
        assert await asked("pipelines/q", {"authorization": "Bearer wrong"}, "DELETE") == 401
        assert await asked("pipelines/q", right, "DELETE") == 204
        assert await asked("topics/orders", right, "DELETE") == 401
