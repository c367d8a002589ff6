"""The options that say how the cluster is reached.

Secrets may be given as options, but better in the environment of the driver: options are part of
the plan that Spark keeps, and in what it shows of them it hides only names that look like secrets.
They travel to the workers inside the reader and are in no text that we print. Files (certificates,
keys) are named, not sent: every machine of a Spark cluster has to have them at the same place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from orbitmq.client.errors import SettingError
from orbitmq.client.rangeaccess import ClientTls, Credentials, RangeAccess
from orbitmq.client.settings import split_name_servers
from orbitmq.spark.errors import OptionRefused
from orbitmq.spark.optiontext import OptionTexts

ACCESS_OPTIONS: Final = (
    "nameServer",
    "accessKey",
    "secretKey",
    "securityToken",
    "tls.enabled",
    "tls.authority",
    "tls.certificate",
    "tls.key",
    "tls.keyPassword",
    "tls.verify",
    "tls.verifyHost",
)
#: Where these are looked for when they are no options; as the `orbitmq` command does.
_VARIABLES: Final = {
    "nameServer": "ORBITMQ_NAME_SERVER",
    "accessKey": "ORBITMQ_ACCESS_KEY",
    "secretKey": "ORBITMQ_SECRET_KEY",
    "securityToken": "ORBITMQ_SECURITY_TOKEN",
    "tls.enabled": "ORBITMQ_TLS",
    "tls.authority": "ORBITMQ_TLS_CA",
    "tls.certificate": "ORBITMQ_TLS_CERTIFICATE",
    "tls.key": "ORBITMQ_TLS_KEY",
    "tls.keyPassword": "ORBITMQ_TLS_KEY_PASSWORD",
}


def access_options(
    texts: OptionTexts, environment: Mapping[str, str] | None, timeout: float
) -> RangeAccess:
    """How to reach the cluster, by options or else by the environment. Raises `OptionRefused`."""
    variables = os.environ if environment is None else environment

    def given(option: str) -> str | None:
        return texts.get(option) or variables.get(_VARIABLES[option]) or None

    name_server = given("nameServer")
    if name_server is None:
        raise OptionRefused("nameServer", None, "host:port, several with ; between them")
    try:
        name_servers = split_name_servers(name_server)
    except SettingError as error:
        raise OptionRefused("nameServer", name_server, f"host:port ({error})") from None
    if not name_servers:
        raise OptionRefused("nameServer", name_server, "host:port, several with ; between them")
    access_key, secret_key = given("accessKey"), given("secretKey")
    if (access_key is None) != (secret_key is None):
        missing = "secretKey" if secret_key is None else "accessKey"
        raise OptionRefused(missing, None, "given with the other of accessKey and secretKey")
    credentials = None
    if access_key is not None and secret_key is not None:
        credentials = Credentials(
            access_key=access_key, secret_key=secret_key, security_token=given("securityToken")
        )
    return RangeAccess(
        name_servers=name_servers,
        credentials=credentials,
        tls=_tls(texts, given),
        timeout=timeout,
    )


def _tls(texts: OptionTexts, given: Callable[[str], str | None]) -> ClientTls | None:
    is_wanted = any(name.startswith("tls.") for name in texts.names())
    is_wanted = is_wanted or given("tls.authority") is not None or _is_on(given("tls.enabled"))
    if not texts.flag("tls.enabled", default=is_wanted):
        return None
    certificate, key = given("tls.certificate"), given("tls.key")
    if key is not None and certificate is None:
        raise OptionRefused("tls.certificate", None, "given with tls.key")
    authority = given("tls.authority")
    return ClientTls(
        authority=None if authority is None else Path(authority),
        verify=texts.flag("tls.verify", default=True),
        verify_host=texts.flag("tls.verifyHost", default=True),
        certificate=None if certificate is None else Path(certificate),
        key=None if key is None else Path(key),
        key_password=given("tls.keyPassword"),
    )


def _is_on(text: str | None) -> bool:
    """Whether a variable says yes, in one of the ways in which that is said."""
    return text is not None and text.lower() in ("1", "true", "yes", "on")
