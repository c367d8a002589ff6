"""Several clusters in one console: each by its name, none in the way of another."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.console.roles import Role
from orbitmq.console.users import Users
from orbitmq.testing import AsyncEmbeddedCluster
from tests.console.test_pipelines_api import REPORT
from tests.support.client import quick_settings
from tests.support.consoles import Browser, console_of

pytestmark = pytest.mark.feature("W7")

PASSWORD = "correct horse battery"  # noqa: S105
#: Nobody listens there.
NOWHERE = "127.0.0.1:1"


@dataclass
class Several:
    """A console of `shop`, `lab 2` and `gone`, of which the last never answers."""

    page: Browser
    shop: AsyncEmbeddedCluster
    lab: AsyncEmbeddedCluster

    @property
    def clients(self):
        servers = {"shop": self.shop.name_server, "lab 2": self.lab.name_server, "gone": NOWHERE}
        return {name: quick_settings(server) for name, server in servers.items()}


@pytest.fixture
async def several(tmp_path):
    async with AsyncEmbeddedCluster() as shop, AsyncEmbeddedCluster() as lab:
        await shop.create_topic("orders", queues=2)
        await lab.create_topic("trials", queues=2)
        made = Several(None, shop, lab)  # type: ignore[arg-type]  # set below
        history = tmp_path / "console.sqlite"
        masked = ("card", "lab 2:email")
        changes = {"clusters": made.clients, "history": history, "masked": masked}
        async with console_of(shop, **changes) as made.page:
            yield made


async def test_the_list_has_every_cluster_with_its_state(several):
    page = several.page
    found = await page.until(
        "/clusters",
        lambda content: (
            [each["state"] for each in content["clusters"]] == ["up", "up", "unreachable"]
        ),
    )
    shop, lab, gone = found["clusters"]
    assert [each["name"] for each in found["clusters"]] == ["shop", "lab 2", "gone"]
    assert (shop["brokers_up"], shop["brokers"], shop["lag"], lab["open_letters"]) == (1, 1, 0, 0)
    assert (gone["at"], gone["lag"], gone["name_servers"]) == (None, None, [NOWHERE])
    assert NOWHERE in gone["problem"]
    # The one that is away holds nobody up.
    for name, before in (("shop", shop["at"]), ("lab 2", lab["at"])):
        await page.within(name).until("/now", lambda now, at=before: now["at"] > at)
    assert (await page.within("gone").get("/now"))["at"] is None


async def test_addresses_lead_into_the_cluster_they_name_and_others_into_the_first(several):
    page = several.page
    for base, topic in (("", "orders"), ("shop", "orders"), ("lab 2", "trials")):
        at = page.within(base) if base else page
        await at.until(
            "/topics?filter=own",
            lambda found, topic=topic: [each["name"] for each in found["rows"]] == [topic],
        )
    assert (await page.within("lab 2").get("/me"))["cluster"] == "lab 2"
    assert (await page.get("/me"))["clusters"] == ["shop", "lab 2", "gone"]
    assert "it has shop, lab 2, gone" in (await page.within("l").get("/topics", 404))["error"]


@pytest.mark.parametrize(
    ("path", "status", "place"),
    [
        ("/", 307, "/clusters"),
        ("/topics/a%2Fb?x=%201", 307, "/clusters/shop/topics/a%2Fb?x=%201"),
        ("/clusters", 200, None),
        ("/clusters/lab%202", 200, None),
        ("/clusters/lab%202/topics/a%2Fb", 200, None),
        ("/clusters/lab%202/nowhere", 404, None),
        ("/clusters/%3Cb%3E", 404, None),
    ],
)
async def test_pages_are_at_the_address_of_their_cluster(several, path, status, place):
    answer = await several.page.ask("GET", path, headers={"accept": "text/html"})

    assert (answer.status, answer.headers.get("location")) == (status, place)
    assert b"<b>" not in answer.body


async def test_changes_are_noted_where_they_were_made_and_history_is_kept_apart(several, tmp_path):
    lab = several.page.within("lab 2")
    await lab.post("/topics", {"name": "more", "queues": 2})
    await lab.post("/pipelines/etl", REPORT, 204)

    async with AsyncAdmin(name_server=several.lab.name_server) as admin:
        assert "more" in [each.name for each in await admin.topics.list()]
    assert "more" in (await lab.get("/audit"))["lines"][0]["command"]
    assert several.lab.name_server in (await lab.get("/audit"))["lines"][0]["command"]
    assert (await several.page.get("/audit"))["lines"] == []
    assert [each["name"] for each in (await lab.get("/pipelines"))["pipelines"]] == ["etl"]
    assert (await several.page.get("/pipelines"))["pipelines"] == []
    files = sorted(each.name for each in tmp_path.glob("*.sqlite"))
    assert files == ["console-gone.sqlite", "console-lab%202.sqlite", "console-shop.sqlite"]


async def test_a_field_is_masked_everywhere_or_in_one_cluster(several):
    for name, topic in (("shop", "orders"), ("lab 2", "trials")):
        page = several.page.within(name)
        body = json.dumps({"card": "1234", "email": "a@b.c"})
        await page.until("/now", lambda now: now["at"])
        sent = await page.post("/send", {"topic": topic, "body": body})
        shown = await page.get(f"/messages/one?topic={topic}&id={sent['id']}")
        assert ("1234" in json.dumps(shown), "a@b.c" in json.dumps(shown)) == (
            False,
            name == "shop",
        )


async def test_a_login_is_for_all_clusters_and_their_names_are_not_told_before(several, tmp_path):
    users = Users(tmp_path / "users.json")
    users.add("ada", Role.ADMIN, PASSWORD)
    async with console_of(several.shop, clusters=several.clients, users=users.file) as page:
        for name in ("lab 2", "nowhere"):
            at = page.within(name)
            await at.get("/now", 401)
            assert await at.get("/me") == {"login": True, "version": None, "users": True}
        page.csrf = (await page.within("lab 2").log_in("ada", PASSWORD))["csrf"]
        await page.within("shop").get("/now")
        await page.post("/access/users", {"name": "rob", "role": "reader", "password": PASSWORD})

        for name in several.clients:
            audit = (await page.within(name).get("/audit"))["lines"]
            assert [each["outcome"] for each in audit] == ["added"]


async def test_a_page_is_told_when_its_cluster_stops_to_answer(several):
    async with several.page.within("gone").listening("/events") as wait_for:
        await wait_for(b"event: sample")
