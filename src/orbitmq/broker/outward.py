"""How a broker speaks to others: name servers it registers with, the master it follows."""

from __future__ import annotations

from orbitmq.broker.settings import OutwardSettings
from orbitmq.clock import Clock
from orbitmq.remoting.channels import Channels
from orbitmq.remoting.owner import Prepare
from orbitmq.wire.acl import Credentials, sign
from orbitmq.wire.command import Command


def outward_channels(settings: OutwardSettings, clock: Clock) -> Channels:
    """Connections as the settings say. Raises `SettingError` for a certificate of no use."""
    tls = None if settings.tls is None else settings.tls.context()
    return Channels(tls=tls, prepare=_signing(settings), clock=clock)


def _signing(settings: OutwardSettings) -> Prepare | None:
    if settings.access_key is None or settings.secret_key is None:
        return None
    credentials = Credentials(access_key=settings.access_key, secret_key=settings.secret_key)

    def prepare(request: Command) -> Command:
        return sign(request, credentials)

    return prepare
