"""Consoles of a cluster in the process, asked over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from orbitmq.client.settings import ClientSettings
from orbitmq.console.app import Console
from orbitmq.console.settings import ConsoleSettings
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings

#: Nothing in a test takes as long; what does has failed.
DEADLINE = 40.0
#: Whatever a browser could take for markup.
HOSTILE = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Browser:
    """Asks a console as a page would: keeps cookies, sends the token."""

    console: Console
    csrf: str = ""
    cookies: dict[str, str] = field(default_factory=dict)
    #: What stands before the addresses of one of several clusters.
    base: str = ""

    def within(self, cluster: str) -> Browser:
        """The same browser in one of several clusters."""
        return replace(self, base=f"/clusters/{quote(cluster, safe='')}")

    @property
    def url(self) -> str:
        """The address of the console, to which paths are appended."""
        return self.console.url.rstrip("/")

    async def ask(
        self,
        method: str,
        path: str,
        content: object | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        port = self.console.port
        sent = {"host": f"127.0.0.1:{port}", "connection": "close"}
        data = body or b""
        if content is not None:
            data = json.dumps(content).encode()
            sent["content-type"] = "application/json"
        if method != "GET":
            sent["x-csrf-token"] = self.csrf
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent |= {"content-length": str(len(data))} | dict(headers or {})
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        async with asyncio.timeout(DEADLINE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
                answer = _parsed(await reader.read())
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        for text in (value for name, value in answer.headers.items() if name == "set-cookie"):
            name, _, value = text.partition(";")[0].partition("=")
            self.cookies[name] = value.strip('"')
        return answer

    @contextlib.asynccontextmanager
    async def listening(self, path: str) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
        """A stream that is open; gives what waits until some words were in it, and says all."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        head = f"GET /api/v1{path} HTTP/1.1\r\nhost: 127.0.0.1:{self.console.port}\r\n"
        async with asyncio.timeout(DEADLINE):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.console.port)
        said = bytearray()

        async def until(words: bytes) -> bytes:
            async with asyncio.timeout(DEADLINE):
                while words not in said:
                    more = await reader.read(65536)
                    assert more, f"it ended without {words!r}: {bytes(said)!r}"
                    said.extend(more)
            return bytes(said)

        try:
            writer.write(f"{head}cookie: {cookies}\r\n\r\n".encode())
            await until(b"retry: ")
            yield until
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.ask("GET", f"{self.base}/api/v1{path}")
        assert answer.status == status, answer.body
        return answer.json

    async def post(self, path: str, content: object | None = None, status: int = 200) -> Any:
        answer = await self.ask(
            "POST", f"{self.base}/api/v1{path}", {} if content is None else content
        )
        assert answer.status == status, answer.body
        return answer.json if answer.body else None

    async def send(self, method: str, path: str, content: object = None, status: int = 200) -> Any:
        answer = await self.ask(method, f"{self.base}/api/v1{path}", content)
        assert answer.status == status, answer.body
        return answer.json if answer.body else None

    async def begin(self) -> None:
        """Get the token of the page."""
        self.csrf = (await self.get("/me")).get("csrf", "")

    async def log_in(self, user: str, password: str, status: int = 200) -> Any:
        """Log in as a user of the file, as the login page does."""
        found = await self.post("/login", {"user": user, "password": password}, status)
        self.csrf = found.get("csrf", "")
        return found

    async def until(self, path: str, condition: Callable[[Any], object]) -> Any:
        """Ask until the answer is as wanted."""
        content: Any = None
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    answer = await self.ask("GET", f"{self.base}/api/v1{path}")
                    content = answer.json
                    # What is looked for in a list that is still empty is not there yet.
                    with contextlib.suppress(LookupError):
                        if answer.status == 200 and condition(content):
                            return content
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{path} did not become as wanted: {content}") from None


def _parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Answer(int(first.split()[1]), headers, body)


def _joined(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)


def settings_for(cluster: AsyncEmbeddedCluster | str, **changes: Any) -> ConsoleSettings:
    """Settings of a console that looks often; at a cluster, or at that of a name server."""
    name_server = cluster if isinstance(cluster, str) else cluster.name_server
    client: ClientSettings = quick_settings(name_server)
    usual: dict[str, Any] = {"client": client, "port": 0, "every": 0.1, "write": True}
    return ConsoleSettings(**usual | changes)


@contextlib.asynccontextmanager
async def console_of(cluster: AsyncEmbeddedCluster, **changes: Any) -> AsyncIterator[Browser]:
    """A console for the time of the block, seen through a browser that has loaded the page."""
    async with Console(settings_for(cluster, **changes), clock=cluster.clock) as console:
        browser = Browser(console)
        if not console.settings.needs_login:
            await browser.begin()
            await browser.until("/now", lambda content: content["at"])
        yield browser
