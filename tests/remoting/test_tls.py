"""TLS and plain connections on one port."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from orbitmq.errors import SettingError
from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import Address, ConnectFailed, ConnectionLost, ServerSettings
from orbitmq.remoting.tls import ClientTls, ServerTls, TlsMode
from tests.support.remoting import DEADLINE, RawPeer, serving, until

#: Self-signed, for localhost and 127.0.0.1.
FOLDER = Path(__file__).resolve().parents[1] / "data" / "tls"
CERTIFICATE = FOLDER / "certificate.pem"
KEY = FOLDER / "key.pem"

CODE = 10
HANDLERS = {CODE: lambda _, request: request.answer(0, body=request.body)}


def _settings(mode: TlsMode, **more: Path) -> ServerSettings:
    return ServerSettings(tls=ServerTls(certificate=CERTIFICATE, key=KEY, mode=mode, **more))  # type: ignore[arg-type]  # paths only


TRUSTING = ClientTls(authority=CERTIFICATE)


@pytest.mark.parametrize("mode", [TlsMode.PERMISSIVE, TlsMode.ENFORCING])
@pytest.mark.parametrize("size", [0, 300_000, 5_000_000])
async def test_requests_and_answers_of_any_size_pass_through_tls(mode, size):
    async with serving(HANDLERS, _settings(mode)) as server:
        connection = await connect(server.address, tls=TRUSTING.context())
        answer = await connection.request(CODE, body=bytes(size), timeout=DEADLINE)
        connection.close()
        await connection.wait_closed()

    assert bytes(answer.body) == bytes(size)


async def test_a_permissive_server_takes_plain_connections_on_the_same_port():
    async with serving(HANDLERS, _settings(TlsMode.PERMISSIVE)) as server:
        safe = await connect(server.address, tls=TRUSTING.context())
        plain = await connect(server.address)
        answers = await asyncio.gather(
            safe.request(CODE, timeout=DEADLINE), plain.request(CODE, timeout=DEADLINE)
        )
        safe.close()
        plain.close()

    assert [answer.code for answer in answers] == [0, 0]


async def test_an_enforcing_server_refuses_plain_connections(caplog):
    async with serving(HANDLERS, _settings(TlsMode.ENFORCING)) as server:
        connection = await connect(server.address)
        with caplog.at_level(logging.WARNING), pytest.raises(ConnectionLost):
            await connection.request(CODE, timeout=DEADLINE)

    assert "without TLS, which is required here" in caplog.text


async def test_a_server_with_tls_disabled_refuses_it_and_says_why(caplog):
    for settings in (_settings(TlsMode.DISABLED), ServerSettings()):
        async with serving(HANDLERS, settings) as server:
            with caplog.at_level(logging.WARNING), pytest.raises(ConnectFailed):
                await connect(server.address, tls=TRUSTING.context())
            plain = await connect(server.address)

            assert (await plain.request(CODE, timeout=DEADLINE)).code == 0
            assert "TLS, which is disabled here" in caplog.text
            caplog.clear()
            plain.close()


async def test_a_client_that_does_not_know_the_certificate_does_not_connect():
    async with serving(HANDLERS, _settings(TlsMode.PERMISSIVE)) as server:
        with pytest.raises(ConnectFailed, match=r"(?i)certificate"):
            await connect(server.address, tls=ClientTls().context())
        # Unless it is told to believe anybody, as Apache's clients do by default.
        trusting = await connect(server.address, tls=ClientTls(verify=False).context())

        assert (await trusting.request(CODE, timeout=DEADLINE)).code == 0
        trusting.close()


async def test_a_server_may_ask_for_the_certificate_of_its_clients():
    settings = _settings(TlsMode.ENFORCING, client_authority=CERTIFICATE)
    known = ClientTls(authority=CERTIFICATE, certificate=CERTIFICATE, key=KEY)
    async with serving(HANDLERS, settings) as server:
        friend = await connect(server.address, tls=known.context())
        assert (await friend.request(CODE, timeout=DEADLINE)).code == 0
        with pytest.raises((ConnectFailed, ConnectionLost)):
            await _ask_once(server.address)
        friend.close()


async def _ask_once(address: Address) -> None:
    """With TLS 1.3 a client learns only after its handshake that it was not accepted."""
    connection = await connect(address, tls=TRUSTING.context())
    await connection.request(CODE, timeout=DEADLINE)


async def test_a_broken_handshake_ends_that_connection_only(caplog):
    async with serving(HANDLERS, _settings(TlsMode.PERMISSIVE)) as server:
        with caplog.at_level(logging.WARNING):
            async with RawPeer.connected(server.address) as peer:
                await peer.send(b"\x16" + bytes(200))
                await until(lambda: "no TLS handshake" in caplog.text)
        connection = await connect(server.address, tls=TRUSTING.context())

        assert (await connection.request(CODE, timeout=DEADLINE)).code == 0
        assert len(server.connections) == 1
        connection.close()


async def test_a_handshake_has_a_deadline():
    tls = ServerTls(certificate=CERTIFICATE, key=KEY)
    async with serving(HANDLERS, ServerSettings(tls=tls, handshake=0.05)) as server:
        async with RawPeer.connected(server.address) as peer:
            await peer.send(b"\x16")

            assert await peer.is_closed_by_the_other_side()
        await until(lambda: not server.connections)


@pytest.mark.parametrize(
    ("tls", "named"),
    [
        (ServerTls(certificate=FOLDER / "none.pem", key=KEY), "none.pem"),
        (ServerTls(certificate=KEY, key=KEY), "cannot use certificate"),
        (ServerTls(certificate=CERTIFICATE, key=KEY, client_authority=KEY), "client_authority"),
        (ClientTls(authority=FOLDER / "none.pem"), "client.authority"),
        (ClientTls(certificate=CERTIFICATE, key=CERTIFICATE), "client TLS"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(tls, named):
    with pytest.raises(SettingError, match=named):
        tls.context()
