"""The login of users, and what their roles leave on the page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect

from orbitmq.console.roles import Role
from orbitmq.console.settings import OidcSettings
from orbitmq.console.users import Users
from orbitmq.testing import AsyncEmbeddedCluster
from tests.browser.chromium import DESK, PHONE, watched
from tests.support.consoles import console_of
from tests.support.oidc import CLIENT, SECRET, OidcProvider

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PASSWORD = "correct horse battery"  # noqa: S105


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(browser, tmp_path_factory):
    """The address of a console with a user of each role."""
    users = Users(tmp_path_factory.mktemp("users") / "users.json")
    for name, role in (("ada", Role.ADMIN), ("olga", Role.OPERATOR), ("rob", Role.READER)):
        users.add(name, role, PASSWORD)
    async with AsyncEmbeddedCluster() as cluster, console_of(cluster, users=users.file) as page:
        await cluster.create_topic("orders", queues=2)
        yield page.url


async def enter(page, name, password=PASSWORD):
    await page.get_by_label("User").fill(name)
    await page.get_by_label("Password").fill(password)
    await page.get_by_role("button", name="Log in").click()


async def test_the_provider_of_another_site_leads_back_into_the_console(browser):
    # For browsers localhost and 127.0.0.1 are two sites.
    with OidcProvider(claims={"groups": ["sre"]}, host="localhost") as provider:
        oidc = OidcSettings(
            issuer=provider.issuer,
            client_id=CLIENT,
            client_secret=SECRET,
            roles={"sre": Role.ADMIN},
        )
        async with (
            AsyncEmbeddedCluster() as cluster,
            console_of(cluster, oidc=oidc) as page,
            watched(browser, page.url, viewport=PHONE) as screen,
        ):
            await screen.page.goto(page.url)
            await shot(screen.page, "provider")
            await screen.page.get_by_role("link", name="Log in with localhost").click()
            await screen.drawn()
            await screen.page.get_by_role("button", name="Menu").click()
            await expect(screen.page.locator(".side")).to_contain_text("grace · admin")
            await screen.page.get_by_role("button", name="Log out").click()
            await expect(screen.page.get_by_role("link", name="Log in with")).to_be_visible()


async def shot(page, name):
    """Keep a picture where ORBITMQ_LOOKS names a folder, to be looked at."""
    if folder := os.environ.get("ORBITMQ_LOOKS"):
        await page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
async def test_users_log_in_and_find_what_their_role_may_do(browser, url, viewport):
    async with watched(browser, url, viewport=viewport) as screen:
        page = screen.page
        await page.goto(f"{url}/topics/orders")
        await shot(page, f"login-{viewport['width']}")
        await enter(page, "rob", "wrong password")
        await expect(page.get_by_role("alert")).to_contain_text("the user or the password is wrong")
        assert screen.refused == [f"403 {url}/api/v1/login"]
        screen.errors.clear()
        await enter(page, "rob")
        await expect(page.get_by_role("heading", name="orders")).to_be_visible()
        await shot(page, f"reader-{viewport['width']}")

        await page.get_by_role("button", name="Delete").click(force=True)
        told = page.get_by_role("dialog")
        await expect(told).to_contain_text("rob is a reader here: an admin may do this.")
        await expect(told).to_contain_text("orbitmq topic delete orders")
        await shot(page, f"refused-{viewport['width']}")
        assert await screen.overflow() <= 0
        await expect(page.get_by_role("link", name="Users")).to_have_count(0)

        await page.goto(f"{url}/send?topic=orders")
        await expect(page.locator("main")).to_contain_text("an operator may do this")
        await expect(page.locator("main").get_by_role("button", name="Send")).to_be_disabled()


async def logged_in(screen, url, name, path="/"):
    await screen.page.goto(url + path)
    await enter(screen.page, name)
    await expect(screen.page.locator("main h1")).to_be_visible()


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
async def test_an_admin_manages_users_and_ends_a_session(browser, url, viewport):
    async with watched(browser, url, viewport=viewport) as screen, watched(browser, url) as other:
        await logged_in(other, url, "olga", "/topics")
        await logged_in(screen, url, "ada", "/access")
        page, name = screen.page, f"grace-{viewport['width']}"

        await page.get_by_role("button", name="New user").click()
        form = page.get_by_role("dialog")
        await form.get_by_label("Name").fill(name)
        await form.get_by_label("Role").select_option("operator")
        await form.get_by_label("Password").fill(PASSWORD)
        await shot(page, f"new-user-{viewport['width']}")
        await form.get_by_role("button", name="Add").click()
        row = page.get_by_role("table", name="Users").get_by_role("row", name=name)
        await expect(row).to_contain_text("operator")

        await row.get_by_role("button", name="Change").click()
        await form.get_by_label("Role").select_option("reader")
        await form.get_by_role("button", name="Change").click()
        await expect(row).to_contain_text("reader")
        await shot(page, f"users-{viewport['width']}")
        assert await screen.overflow() <= 0

        await row.get_by_role("button", name="Remove").click()
        await form.get_by_role("button", name="Remove").click()
        await expect(row).to_have_count(0)

        sessions = page.get_by_role("table", name="Sessions")
        # The login of an earlier test of this module may still be there.
        while await sessions.get_by_role("row", name="olga").count():
            target = sessions.get_by_role("row", name="olga").first
            await target.get_by_role("button", name="End").click()
            await page.wait_for_timeout(100)
        await expect(other.page.get_by_label("Password")).to_be_visible()
        assert {each.partition(" ")[0] for each in other.refused} == {"401"}
        other.errors.clear()
        await enter(other.page, "olga")
        await expect(other.page.locator("main h1")).to_be_visible()


async def test_a_user_changes_the_own_password_and_goes_on(browser, url):
    another = "battery staple horse"
    async with watched(browser, url) as screen:
        await logged_in(screen, url, "rob", "/topics")
        page = screen.page
        await page.get_by_role("button", name="Change password").click()
        form = page.get_by_role("dialog")
        await form.get_by_label("Present password").fill(PASSWORD)
        await form.get_by_label("Password, 8").fill(another)
        await form.get_by_role("button", name="Change", exact=True).click()
        await expect(page.locator("#toasts")).to_contain_text("Your password was changed")
        await page.get_by_role("link", name="Groups", exact=True).click()
        await expect(page.locator("h1")).to_have_text("Groups")

        await page.get_by_role("button", name="Log out").click()
        await enter(page, "rob", another)
        await expect(page.locator("main h1")).to_be_visible()
        screen.errors.clear()  # a request of the session that ended may have been on its way
