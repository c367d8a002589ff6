"""How queues are pulled: sizes, waits, and what is put off for how long."""

from __future__ import annotations

from dataclasses import dataclass

from orbitmq.client.checks import Fields
from orbitmq.client.errors import SettingError

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Every interval of a pull, in seconds."""

    batch_size: int = 32  #: messages asked for at once; Apache's brokers give no more than 32
    batch_bytes: int = 256 * KIB  #: bytes asked for at once
    hold: float = 15.0  #: how long the broker may keep an empty pull
    timeout: float = 30.0  #: when the client gives a pull up; above `hold`
    interval: float = 0.0  #: between messages that were fetched and the next pull
    error_delay: float = 1.0  #: after a pull that failed
    busy_delay: float = 0.02  #: after a broker that asks for less (FLOW_CONTROL)
    flow_delay: float = 0.05  #: while too much is cached
    paused_delay: float = 1.0  #: while the application wants nothing
    #: Between two corrections of an illegal offset of one queue; the first is made at once. (Java's
    #: clients of version 4 wait as long before each, because handlers that run could undo it. Here
    #: and in version 5 they cannot.)
    correction_delay: float = 10.0
    #: Send the subscription with every pull: brokers then serve groups that they do not know.
    post_subscription: bool = False

    def __post_init__(self) -> None:
        fields = Fields(self, "pull")
        fields.whole("batch_size", most=1024)
        fields.whole("batch_bytes", most=1024 * KIB * KIB)
        fields.durations("hold", least=0, most=3600)
        fields.durations("interval", least=0, most=65.535)
        delays = ("error_delay", "busy_delay", "flow_delay", "paused_delay", "correction_delay")
        fields.durations(*delays, least=0.001, most=3600)
        fields.durations("timeout")
        fields.switches("post_subscription")
        if not self.hold < self.timeout:
            raise SettingError(
                f"pull.timeout must be above pull.hold ({self.hold:g} s), got {self.timeout:g}"
            )
