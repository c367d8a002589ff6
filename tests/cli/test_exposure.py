"""Which addresses may be listened on without a word, and what protects the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.broker.settings import (
    AccessSettings,
    BrokerSettings,
    HttpSettings,
    ReplicationSettings,
)
from orbitmq.cli.main import Exposed
from orbitmq.cli.servers import check_broker, check_cluster, check_name_server, is_loopback
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from orbitmq.remoting.tls import ServerTls, TlsMode

OPEN = "198.51.100.7"
ACCOUNTS = AccessSettings(accounts=Path("accounts.toml"))
PERMISSIVE = ServerTls(certificate=Path("c.pem"), key=Path("k.pem"))
ENFORCING = replace(PERMISSIVE, mode=TlsMode.ENFORCING)
MUTUAL = replace(ENFORCING, client_authority=Path("ca.pem"))


def broker(host: str = OPEN, tls: ServerTls | None = None, **changes: object) -> BrokerSettings:
    settings = BrokerSettings(root=Path("here"), server=ServerSettings(host=host, tls=tls))
    return replace(settings, **changes)  # type: ignore[arg-type]  # the test names them right


def name_server(host: str = OPEN, tls: ServerTls | None = None) -> NameServerSettings:
    return NameServerSettings(server=ServerSettings(host=host, tls=tls))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_the_loopback_needs_no_word(host):
    assert is_loopback(host)
    assert check_cluster(name_server(host), broker(host), is_accepted=False) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", OPEN, "2001:db8::1"])  # noqa: S104
def test_what_others_reach_needs_one(host):
    with pytest.raises(Exposed, match="--insecure"):
        check_broker(broker(host), is_accepted=False)
    with pytest.raises(Exposed, match="--insecure"):
        check_name_server(name_server(host), is_accepted=False)

    assert check_cluster(name_server(host), broker(host), is_accepted=True) == []


def test_the_pages_of_a_broker_count_when_they_are_served():
    wide = HttpSettings(host=OPEN)
    settings = broker("127.0.0.1", http=wide)

    check_broker(settings, is_accepted=False)
    with pytest.raises(Exposed, match=r"broker\.http\.host"):
        check_broker(replace(settings, http=replace(wide, port=0)), is_accepted=False)


@pytest.mark.parametrize(
    ("tls", "warning"),
    [
        (None, "TLS is not set up"),
        (replace(PERMISSIVE, mode=TlsMode.DISABLED), "TLS is not set up"),
        (PERMISSIVE, "permissive"),
        (ENFORCING, None),
        (MUTUAL, None),
    ],
)
def test_accounts_are_protection_enough_and_tls_is_missed(tls, warning):
    warnings = check_broker(broker(tls=tls, access=ACCOUNTS), is_accepted=False)

    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_certificates_of_all_clients_are_protection_enough_and_tls_alone_is_not():
    assert check_cluster(name_server(tls=MUTUAL), broker(tls=MUTUAL), is_accepted=False) == []
    for tls in (PERMISSIVE, ENFORCING, replace(MUTUAL, mode=TlsMode.PERMISSIVE)):
        with pytest.raises(Exposed, match=r"broker\.access\.accounts"):
            check_broker(broker(tls=tls), is_accepted=False)
        with pytest.raises(Exposed, match=r"namesrv\.tls\.client_authority"):
            check_name_server(name_server(tls=tls), is_accepted=False)


def test_the_port_for_slaves_is_open_whatever_else_is_protected():
    serving = broker(tls=MUTUAL, access=ACCOUNTS, replication=ReplicationSettings(serve=True))

    with pytest.raises(Exposed, match="port for slaves"):
        check_broker(serving, is_accepted=False)

    assert check_broker(serving, is_accepted=True) == []


def test_a_name_server_beside_a_broker_with_accounts_is_warned_of():
    guarded = broker(tls=ENFORCING, access=ACCOUNTS)

    (warning,) = check_cluster(name_server(), guarded, is_accepted=False)

    assert "namesrv.host" in warning
    assert check_cluster(name_server("127.0.0.1"), guarded, is_accepted=False) == []
    assert check_cluster(name_server(tls=MUTUAL), guarded, is_accepted=False) == []
