"""TLS for either side: whether it is spoken, and with which certificates.

A client that speaks TLS begins with the byte 0x16, which no frame begins with (it would announce
more than 350 MB). One look at it therefore tells the two apart, and both can share a port.
"""

from __future__ import annotations

import enum
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from orbitmq.errors import SettingError

#: The first byte of a TLS handshake record.
TLS_HANDSHAKE = b"\x16"


class TlsMode(enum.Enum):
    """Which connections a server accepts."""

    DISABLED = "disabled"  #: plain connections only
    PERMISSIVE = "permissive"  #: both
    ENFORCING = "enforcing"  #: TLS only


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The certificate of a server, and what it asks of its clients."""

    certificate: Path  #: in PEM, with those above it
    key: Path  #: of the certificate, in PEM
    key_password: str | None = field(default=None, repr=False)  #: None: the key has none
    mode: TlsMode = TlsMode.PERMISSIVE  #: whether connections without TLS are taken, too
    #: Certificates that clients must be signed by; None: clients need none.
    client_authority: Path | None = None

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_own(context, "server", self.certificate, self.key, self.key_password)
        if self.client_authority is not None:
            _load_authority(context, "server.client_authority", self.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Which servers a client trusts, and the certificate that it shows."""

    #: Certificates to trust; None: those of the machine.
    authority: Path | None = None
    #: False trusts every server, as Apache's clients do by default.
    verify: bool = True
    verify_host: bool = True  #: whether a certificate must be for the address it comes from
    certificate: Path | None = None  #: our own, in PEM, for servers that ask for one
    key: Path | None = None  #: of our certificate, in PEM
    key_password: str | None = field(default=None, repr=False)  #: None: the key has none

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif self.authority is not None:
            _load_authority(context, "client.authority", self.authority)
            # A certificate named there is trusted also if another authority has signed it.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        else:
            context.load_default_certs()
        if self.verify and not self.verify_host:
            context.check_hostname = False
        if self.certificate is not None:
            _load_own(context, "client", self.certificate, self.key, self.key_password)
        return context


def _load_own(
    context: ssl.SSLContext, role: str, certificate: Path, key: Path | None, password: str | None
) -> None:
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=password or "")
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"{role} TLS: cannot use certificate {certificate} with key {key}: {error}"
        ) from error


def _load_authority(context: ssl.SSLContext, setting: str, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"{setting}: cannot use {authority}: {error}") from error
