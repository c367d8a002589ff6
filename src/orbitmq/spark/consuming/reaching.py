"""How drivers and tasks reach the cluster, from what a user says or the environment does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orbitmq.client.rangeaccess import ClientTls, Credentials, RangeAccess
from orbitmq.client.settings import resolve
from orbitmq.spark.access import access_options
from orbitmq.spark.optiontext import OptionTexts


def reach(
    name_server: str | Iterable[str] | None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
    timeout: float = 3.0,
) -> RangeAccess:
    """Name servers and secrets, each from the environment where it is not given."""
    given = name_server if name_server is None or isinstance(name_server, str) else (*name_server,)
    servers = resolve(given).name_servers
    found = access_options(OptionTexts({"nameServer": ";".join(servers)}), None, timeout)
    return replace(
        found,
        credentials=credentials or found.credentials,
        tls=tls if tls is not None else found.tls,
    )


def options_of(access: RangeAccess) -> dict[str, str]:
    """The same as options of the source.

    Secrets too, also those that were found in the environment: the source is planned by a process
    of the JVM or of a Connect server, which need not have the variables of this one.
    """
    options: dict[str, object] = {"nameServer": ";".join(access.name_servers)}
    if (credentials := access.credentials) is not None:
        options |= {
            "accessKey": credentials.access_key,
            "secretKey": credentials.secret_key,
            "securityToken": credentials.security_token,
        }
    if (tls := access.tls) is not None:
        options |= {
            "tls.enabled": "true",
            "tls.authority": tls.authority,
            "tls.certificate": tls.certificate,
            "tls.key": tls.key,
            "tls.keyPassword": tls.key_password,
            "tls.verify": str(tls.verify).lower(),
            "tls.verifyHost": str(tls.verify_host).lower(),
        }
    return {name: str(value) for name, value in options.items() if value is not None}
