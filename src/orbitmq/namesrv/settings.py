"""Every setting of the name server, with RocketMQ's default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.namesrv.errors import SettingError
from orbitmq.remoting.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_PORT = 9876


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerSettings:
    """How a name server behaves, and where it keeps what must outlive it."""

    #: Where `kvConfig.json` and `namesrv.properties` are kept; None: in memory only.
    home: Path | None = None
    scan_interval: float = 5.0  #: how often expired brokers are looked for
    heartbeat_timeout: float = 120.0  #: for brokers that do not name one
    order_message_enable: bool = False  #: routes carry the order configuration of their topic
    return_order_topic_config: bool = True  #: registrations are answered with all of it
    enable_all_topic_list: bool = True  #: whether all topics may be listed
    enable_topic_list: bool = True  #: whether topics of a cluster or kind may be listed
    need_wait_for_service: bool = False  #: give no routes for `wait_for_service` after the start
    wait_for_service: float = 45.0  #: see `need_wait_for_service`
    support_acting_master: bool = False  #: show the first slave as master where there is none
    delete_topic_with_broker_registration: bool = False  #: topics not registered again vanish
    #: Settings, besides those that never can, which requests must not change.
    config_black_list: tuple[str, ...] = ()
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=DEFAULT_PORT))

    def __post_init__(self) -> None:
        for name in ("scan_interval", "heartbeat_timeout"):
            if not getattr(self, name) > 0:
                raise SettingError(
                    f"name server: {name} must be positive, got {getattr(self, name)}"
                )
        if self.wait_for_service < 0:
            raise SettingError(
                f"name server: wait_for_service must not be negative, got {self.wait_for_service}"
            )
