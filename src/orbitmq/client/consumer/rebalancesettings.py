"""How often shares are worked out anew, and how queues change hands."""

from __future__ import annotations

from dataclasses import dataclass

from orbitmq.client.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings:
    """Times in seconds. The defaults are RocketMQ's, where it has them."""

    interval: float = 20.0  #: between rounds when nothing happens
    retry: float = 1.0  #: before the next round when this one left something undone
    spacing: float = 0.05  #: rounds are never closer, however many notices come
    #: How long the loss of a queue waits for handler calls that run; with order locks, without end.
    handover: float = 10.0
    answer: float = 1.0  #: how long a member may take to say what it holds
    stalled: float = 120.0  #: an owned queue that was not pulled for so long is begun anew
    persist: float = 5.0  #: how often progress is put by
    #: After a broker connection was lost and made again, members that are missing are waited for.
    return_grace: float = 3.0
    #: A queue that somebody else still holds is asked for again after so long, and slower then.
    first_poll: float = 0.02
    slowest_poll: float = 0.2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                if name in ("handover", "return_grace", "spacing") and value == 0:
                    continue
                raise SettingError(f"rebalance.{name} must be a positive number, got {value!r}")
