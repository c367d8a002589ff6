"""Whether an address that is to be listened on can be reached from other machines, and by whom.

Nothing listens openly without protection unless that is accepted (`--insecure`). What protects:

    a broker                accounts, or TLS that demands a certificate of every client
    a name server           the latter; or beside a broker with accounts, with a warning
    the port for slaves     nothing: whoever connects there is sent the whole log
    the HTTP pages          nothing
"""

from __future__ import annotations

import ipaddress
import socket

from orbitmq.broker.settings import WILDCARDS, BrokerSettings
from orbitmq.cli.errors import Exposed
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.tls import ServerTls, TlsMode

_ACCOUNTS = "set broker.access.accounts"
_CERTIFICATES = "{0}.tls.mode to enforcing and {0}.tls.client_authority"


def check_cluster(
    name_server: NameServerSettings, broker: BrokerSettings, *, is_accepted: bool
) -> list[str]:
    """Both, in one command: what is to be warned of. Raises `Exposed`."""
    warnings = check_broker(broker, is_accepted=is_accepted)
    host = name_server.server.host
    if is_accepted or is_loopback(host) or broker.access.accounts is None:
        return warnings + check_name_server(name_server, is_accepted=is_accepted)
    if not _wants_certificates(name_server.server.tls):
        warnings.append(
            f"namesrv.host is {host!r}: the accounts do not guard the name server, where others "
            f"could register brokers; set {_CERTIFICATES.format('namesrv')}"
        )
    return warnings


def check_broker(settings: BrokerSettings, *, is_accepted: bool) -> list[str]:
    """What is to be warned of. Raises `Exposed` for what others reach unprotected."""
    if is_accepted:
        return []
    http, server, replication = settings.http, settings.server, settings.replication
    if http.port is not None and not is_loopback(http.host):
        raise Exposed("broker.http.host", http.host, "see what the broker does", "")
    if is_loopback(server.host):
        return []
    warnings: list[str] = []
    if not _wants_certificates(server.tls):
        if settings.access.accounts is None:
            remedy = f"{_ACCOUNTS}, or {_CERTIFICATES.format('broker')}"
            raise Exposed("broker.host", server.host, "read and delete messages", remedy)
        if problem := _tls_problem(server.tls):
            warnings.append(
                f"broker.host is {server.host!r}: there are accounts, but {problem}, so that "
                "messages can be read on their way"
            )
    if replication.serve:
        raise Exposed(
            "replication.serve is set and broker.host",
            server.host,
            "be sent the whole log by the port for slaves, which knows no accounts",
            "",
        )
    return warnings


def check_name_server(settings: NameServerSettings, *, is_accepted: bool) -> list[str]:
    """What is to be warned of. Raises `Exposed` for what others reach unprotected."""
    server = settings.server
    if is_accepted or is_loopback(server.host) or _wants_certificates(server.tls):
        return []
    remedy = f"set {_CERTIFICATES.format('namesrv')}"
    raise Exposed("namesrv.host", server.host, "register brokers and delete topics", remedy)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host in WILDCARDS:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        # Nobody can listen there; whoever tries says so.
        return True
    return all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found
    )


def _wants_certificates(tls: ServerTls | None) -> bool:
    return tls is not None and tls.mode is TlsMode.ENFORCING and tls.client_authority is not None


def _tls_problem(tls: ServerTls | None) -> str:
    if tls is None or tls.mode is TlsMode.DISABLED:
        return "TLS is not set up (broker.tls.certificate, broker.tls.key)"
    if tls.mode is TlsMode.PERMISSIVE:
        return "TLS is left to the clients (broker.tls.mode is permissive)"
    return ""
