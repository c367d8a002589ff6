"""Users of the console: their file, their roles, and the sessions that end with them."""

from __future__ import annotations

import asyncio
import json
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.routing import Route

from orbitmq.console import http
from orbitmq.console.app import api
from orbitmq.console.logins import Logins
from orbitmq.console.roles import RULES, Right, Role, has_right
from orbitmq.console.settings import BadInput, Forbidden, NotThere, TooManyAttempts, UsersUnusable
from orbitmq.console.users import Users
from tests.console.conftest import QUEUE, Desk
from tests.console.test_access import HandClock, changes
from tests.support.consoles import DEADLINE, Browser, console_of
from tests.support.consuming import until

pytestmark = pytest.mark.feature("W6")

PASSWORD = "correct horse battery"  # noqa: S105
PEOPLE = {"ada": Role.ADMIN, "olga": Role.OPERATOR, "rob": Role.READER}
DOCS = Path(__file__).parents[2] / "docs" / "console.md"


@pytest.fixture(scope="module")
def hired(tmp_path_factory):
    """A file with a user of each role, made once: digests take their time."""
    file = tmp_path_factory.mktemp("users") / "users.json"
    for name, role in PEOPLE.items():
        Users(file).add(name, role, PASSWORD)
    return file.read_bytes()


@pytest.fixture
def users(tmp_path, hired):
    file = tmp_path / "users.json"
    file.write_bytes(hired)
    return Users(file)


@dataclass
class Crew:
    """A cluster, a console without a login, and one with users."""

    desk: Desk
    users: Users
    page: Browser

    async def browser(self, name: str) -> Browser:
        """The browser of somebody who is logged in."""
        browser = Browser(self.page.console)
        await browser.log_in(name, PASSWORD)
        return browser


@pytest.fixture
async def crew(desk, users):
    async with console_of(desk.cluster, users=users.file, masked=("card",)) as page:
        yield Crew(desk, users, page)


#: The right that each address needs; `None`: every session, or none at all.
NEEDS = {
    ("POST", "/login"): None,
    ("POST", "/logout"): None,
    ("POST", "/password"): None,  # of oneself
    ("POST", "/progress/plan"): None,
    ("POST", "/dead-letters/{group}/replay/command"): None,
    ("POST", "/pipelines/{name:path}"): None,  # drivers have a token of their own
    ("PUT", "/topics/{topic}/decoder"): Right.DECODERS,
    ("POST", "/topics"): Right.TOPICS,
    ("PATCH", "/topics/{topic}"): Right.TOPICS,
    ("DELETE", "/topics/{topic}"): Right.TOPICS,
    ("POST", "/send"): Right.SEND,
    ("POST", "/messages/resend"): Right.SEND,
    ("POST", "/groups/{group}/pause"): Right.PROGRESS,
    ("POST", "/groups/{group}/resume"): Right.PROGRESS,
    ("POST", "/progress/apply"): Right.PROGRESS,
    ("POST", "/dead-letters/{group}/replay"): Right.RESEND,
    ("DELETE", "/replays/{id}"): Right.RESEND,
    ("DELETE", "/pipelines/{name:path}"): Right.PIPELINES,
    ("POST", "/alerts/{name}/test"): Right.ALERTS,
    ("POST", "/silences"): Right.ALERTS,
    ("DELETE", "/silences/{identity}"): Right.ALERTS,
    ("DELETE", "/access/sessions/{id}"): Right.ACCESS,
    ("POST", "/access/users"): Right.ACCESS,
    ("PATCH", "/access/users/{name}"): Right.ACCESS,
    ("DELETE", "/access/users/{name}"): Right.ACCESS,
}


async def test_a_role_may_do_what_the_table_says_and_nothing_else(crew, monkeypatch):
    assert NEEDS.keys() == {
        (method, route.path)
        for route in api.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"GET", "HEAD"}
    }
    # What the console without a login began is known to the other one as well.
    for part in ("replays", "plans", "pipelines"):
        monkeypatch.setattr(
            crew.page.console.state, part, getattr(crew.desk.browser.console.state, part)
        )
    _, asked = await changes(crew.desk)
    asked |= {
        ("PUT", "/topics/{topic}/decoder"): ("/topics/orders/decoder", {"format": "text"}),
        ("POST", "/access/users"): (
            "/access/users",
            {"name": "new", "role": "reader", "password": PASSWORD},
        ),
        ("PATCH", "/access/users/{name}"): ("/access/users/new", {"role": "operator"}),
        ("DELETE", "/access/users/{name}"): ("/access/users/new", None),
        ("DELETE", "/access/sessions/{id}"): ("/access/sessions/unknown", None),
        ("DELETE", "/silences/{identity}"): ("/silences/unknown", None),
        ("POST", "/alerts/{name}/test"): ("/alerts/unknown/test", {}),
    }
    assert asked.keys() == {each for each, right in NEEDS.items() if right is not None}
    done = set()
    for name, role in reversed(PEOPLE.items()):
        browser = await crew.browser(name)
        for address, (path, content) in asked.items():
            right = NEEDS[address]
            assert right is not None
            before = len((await browser.get("/audit"))["lines"])
            answer = await browser.ask(address[0], f"/api/v1{path}", content)
            if not has_right(role, right):
                assert answer.status == 403, (name, address)
                assert answer.json["kind"] == "NotPermitted"
                assert f"the role {role} may not {RULES[right].about}" in answer.json["error"]
                assert len((await browser.get("/audit"))["lines"]) == before
            elif address not in done:
                done.add(address)
                expected = 404 if "unknown" in path else 299
                assert answer.status <= expected, (name, address, answer.body)
                lines = (await browser.get("/audit"))["lines"]
                assert expected == 404 or lines[0]["who"] == f"{name}, 127.0.0.1", address
    assert done == asked.keys()


def test_the_documentation_has_the_same_table():
    def marks(rule):
        return " | ".join(
            "●" if list(Role).index(role) >= list(Role).index(rule.least) else "" for role in Role
        )

    text = " ".join(DOCS.read_text().split())
    for rule in RULES.values():
        row = " ".join(f"| {rule.about} | {marks(rule)} |".split())
        assert row in text, row


async def test_what_a_page_is_told_about_its_rights(crew):
    assert await crew.page.get("/me") == {"login": True, "version": None, "users": True}
    reader, operator, admin = [await crew.browser(each) for each in ("rob", "olga", "ada")]
    told = [await each.get("/me") for each in (reader, operator, admin)]

    assert [(each["user"], each["role"]) for each in told] == [
        ("rob", "reader"),
        ("olga", "operator"),
        ("ada", "admin"),
    ]
    assert told[0]["rights"] == ["look"]
    assert set(told[1]["rights"]) == {
        *("look", "send", "resend", "progress", "pipelines", "decoders", "alerts")
    }
    assert set(told[2]["rights"]) == set(Right)
    assert told[0]["needs"]["topics"] == "admin"
    await reader.get("/access", 403)


async def test_a_console_without_write_rights_gives_them_to_nobody(desk, users):
    async with console_of(desk.cluster, users=users.file, write=False) as page:
        told = await page.log_in("ada", PASSWORD)
        refused = await page.post("/send", {"topic": "orders", "body": "x"}, 403)
        await page.send(
            "POST", "/access/users", {"name": "n", "role": "reader", "password": PASSWORD}
        )

    assert set(told["rights"]) == {"look", "masked", "access", "decoders"}
    assert "--write" in refused["error"]


async def test_only_an_admin_sees_masked_fields(crew):
    await crew.desk.world.send(QUEUE, b'{"card": "4711", "city": "Porto"}', UNIQ_KEY="AA" * 16)
    seen = {}
    for name in PEOPLE:
        browser = await crew.browser(name)
        found = await browser.until("/messages?topic=orders", lambda it: it["rows"])
        body = await browser.ask("GET", f"/api/v1/messages/body?id={found['rows'][0]['offset_id']}")
        filtered = await browser.ask("GET", "/api/v1/messages?topic=orders&where=card%20%3D%201")
        seen[name] = ("4711" in json.dumps(found), b"4711" in body.body, filtered.status)

    assert seen == {
        "ada": (True, True, 200),
        "olga": (False, False, 400),
        "rob": (False, False, 400),
    }


async def test_without_users_nobody_sees_masked_fields_or_manages_users(desk):
    async with console_of(desk.cluster, masked=("card",)) as page:
        told = await page.get("/me")
        await page.get("/access", 403)

    assert set(Right) - set(told["rights"]) == {Right.MASKED, Right.ACCESS}


@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("ada", "wrong password"),
        ("nobody", PASSWORD),
        ("", PASSWORD),
        (None, PASSWORD),
        ("ada", ""),
    ],
)
async def test_a_wrong_user_or_password_is_refused_with_the_same_words(crew, user, password):
    refused = await crew.page.post("/login", {"user": user, "password": password}, 403)

    assert refused["error"] == "the user or the password is wrong"
    await crew.page.get("/topics", 401)


@pytest.mark.parametrize(
    "change",
    [
        lambda users: users.change("olga", password="another password"),  # noqa: S106
        lambda users: users.change("olga", role=Role.READER),
        lambda users: users.remove("olga"),
        lambda users: users.file.unlink(),
        lambda users: users.file.write_text("{broken"),
    ],
    ids=["password", "role", "removed", "no file", "a broken file"],
)
async def test_a_change_of_the_file_ends_the_sessions_and_streams_of_the_user(
    crew, change, monkeypatch, caplog
):
    monkeypatch.setattr(http, "SILENCE", 0.05)
    browser, other = await crew.browser("olga"), await crew.browser("ada")
    listening = asyncio.create_task(browser.ask("GET", "/api/v1/events"))
    await until(lambda: crew.page.console.state.events.listeners == 1)

    await asyncio.to_thread(change, crew.users)
    async with asyncio.timeout(DEADLINE):
        await listening
    await browser.get("/topics", 401)

    if crew.users.file.exists() and "broken" not in crew.users.file.read_text():
        await other.get("/topics")
    else:
        told = await browser.post("/login", {"user": "ada", "password": PASSWORD}, 503)
        assert "the console's log says why" in told["error"]
        assert str(crew.users.file) not in told["error"]
        assert str(crew.users.file) in caplog.text


async def test_a_user_who_is_added_while_the_console_runs_may_log_in(crew):
    await asyncio.to_thread(crew.users.add, "grace", Role.READER, PASSWORD)

    assert (await crew.page.log_in("grace", PASSWORD))["role"] == "reader"


async def test_a_user_changes_the_own_password_and_stays_logged_in(crew):
    browser, elsewhere = await crew.browser("rob"), await crew.browser("rob")
    wanted = {"current": PASSWORD, "password": "battery staple horse"}

    refused = await browser.post("/password", wanted | {"current": "a wrong one"}, 403)
    short = await browser.post("/password", wanted | {"password": "short"}, 400)
    changed = await browser.post("/password", wanted)
    browser.csrf = changed["csrf"]
    other = Browser(crew.page.console)

    assert ("wrong" in refused["error"], "8" in short["error"]) == (True, True)
    assert (changed["user"], changed["role"]) == ("rob", "reader")
    await browser.get("/topics")
    await elsewhere.get("/topics", 401)
    await other.log_in("rob", PASSWORD, 403)
    await other.log_in("rob", wanted["password"])
    line = (await browser.get("/audit"))["lines"][0]
    assert (line["who"], line["outcome"]) == ("rob, 127.0.0.1", "has another password")
    await crew.desk.browser.post("/password", wanted, 404)


async def test_an_admin_sees_and_ends_sessions(crew):
    admin, victim = await crew.browser("ada"), await crew.browser("rob")
    listed = (await admin.get("/access"))["sessions"]
    (target,) = [each for each in listed if each["user"] == "rob"]
    mine = [each for each in listed if each["is_mine"]]
    await admin.send("DELETE", f"/access/sessions/{target['id']}", None, 204)

    await victim.get("/topics", 401)
    await admin.send("DELETE", f"/access/sessions/{target['id']}", None, 404)
    assert [each["user"] for each in mine] == ["ada"]
    assert {"id", "user", "role", "via", "address", "since", "is_mine"} == target.keys()
    (line,) = (await admin.get("/audit"))["lines"]
    assert line["who"] == "ada, 127.0.0.1"
    assert "rob" in line["command"]


async def test_an_admin_manages_users_and_cannot_lock_everybody_out(crew):
    admin = await crew.browser("ada")
    new = {"name": "grace", "role": "operator", "password": PASSWORD}
    added = await admin.post("/access/users", new)
    for wrong in (new, new | {"name": "a b"}, new | {"name": "x", "password": "short"}):
        await admin.post("/access/users", wrong, 400)
    grace = await crew.browser("grace")
    await admin.send("PATCH", "/access/users/grace", {"role": "admin"})
    await grace.get("/topics", 401)
    await admin.send("PATCH", "/access/users/grace", {}, 400)
    await admin.send("PATCH", "/access/users/nobody", {"role": "admin"}, 404)
    await admin.send("DELETE", "/access/users/grace", None)
    kept = [
        await admin.send("DELETE", "/access/users/ada", None, 400),
        await admin.send("PATCH", "/access/users/ada", {"role": "reader"}, 400),
    ]

    assert f"user add grace --role operator --users {crew.users.file}" in added["command"]
    assert all("last admin" in each["error"] for each in kept)
    assert {each["name"] for each in (await admin.get("/access"))["users"]} == set(PEOPLE)
    assert PASSWORD not in json.dumps((await admin.get("/audit"))["lines"])


async def test_a_restart_ends_the_sessions(crew):
    browser = await crew.browser("ada")
    async with console_of(crew.desk.cluster, users=crew.users.file) as again:
        again.cookies = {
            name.replace(str(crew.page.console.port), str(again.console.port)): value
            for name, value in browser.cookies.items()
        }
        await again.get("/topics", 401)


async def test_a_right_password_of_one_user_does_not_forgive_wrong_ones_of_another(users):
    logins = Logins(None, HandClock(), lasts=100.0, attempts=3, users=users)
    for _ in range(2):
        with pytest.raises(Forbidden):
            await logins.log_in("wrong password", "10.0.0.1", "ada")
    await logins.log_in(PASSWORD, "10.0.0.1", "rob")
    with pytest.raises(Forbidden):
        await logins.log_in("wrong password", "10.0.0.1", "ada")
    with pytest.raises(TooManyAttempts):
        await logins.log_in(PASSWORD, "10.0.0.1", "ada")


async def test_guesses_at_the_same_time_count_as_those_one_after_another(users):
    logins = Logins(None, HandClock(), lasts=100.0, attempts=3, users=users)
    guesses = [logins.log_in("wrong password", "10.0.0.1", "ada") for _ in range(6)]
    found = await asyncio.gather(*guesses, return_exceptions=True)

    assert [type(each) for each in found] == [Forbidden] * 3 + [TooManyAttempts] * 3


# The file.


def test_the_file_is_private_and_has_no_password_in_it(users):
    users.change("rob", role=Role.OPERATOR)
    text = users.file.read_text()

    assert stat.S_IMODE(users.file.stat().st_mode) == 0o600
    assert PASSWORD not in text
    assert len({each["password"] for each in json.loads(text)["users"].values()}) == len(PEOPLE)
    assert "password" not in repr(users.all["rob"])


def test_another_form_of_the_same_letters_is_the_same_password(users):
    users.change("rob", password="Zürich im Mai")  # noqa: S106

    assert users.check("rob", "Zu\u0308rich im Mai") is not None
    assert users.check("rob", "Zurich im Mai") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"users": {"ada": {"role": "king", "password": "x"}}}',
        '{"users": {"ada": {"role": "admin"}}}',
        '{"people": {}}',
    ],
)
def test_a_file_that_is_none_of_users_is_refused_and_kept(users, content):
    users.file.write_text(content)

    with pytest.raises(UsersUnusable, match=r"users\.json"):
        users.add("new", Role.READER, PASSWORD)
    assert users.file.read_text() == content


@pytest.mark.parametrize(
    "digest", ["", "plain", "scrypt:a:b:c:d:e", "scrypt:3:8:1:AA==:AA==", "md5:1:1:1:AA==:AA=="]
)
def test_a_digest_that_is_none_matches_no_password(users, digest):
    users.file.write_text(json.dumps({"users": {"ada": {"role": "admin", "password": digest}}}))

    assert users.check("ada", PASSWORD) is None


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/b", "a\n", "<b>"])
def test_a_name_that_cannot_be_one_is_refused(users, name):
    with pytest.raises(BadInput, match="a user's name has"):
        users.add(name, Role.READER, PASSWORD)


def test_changes_of_an_unknown_user_name_those_who_are_there(users):
    for change in (lambda: users.remove("nobody"), lambda: users.change("nobody", role=Role.ADMIN)):
        with pytest.raises(NotThere, match="ada, olga, rob"):
            change()
    with pytest.raises(BadInput, match="already"):
        users.add("ada", Role.READER, PASSWORD)


async def test_changes_at_the_same_time_are_all_kept(users):
    async def added(number):
        await asyncio.to_thread(Users(users.file).add, f"user-{number}", Role.READER, PASSWORD)

    await asyncio.gather(*(added(number) for number in range(4)))

    assert len(users.all) == len(PEOPLE) + 4
