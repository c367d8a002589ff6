"""How often shares are worked out anew, and how queues change hands."""

from __future__ import annotations

from dataclasses import dataclass

from orbitmq.client.checks import Fields

_MAY_BE_ZERO = ("handover", "return_grace", "spacing", "silence", "persist_idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings:
    """Times in seconds. The defaults are RocketMQ's, where it has them."""

    interval: float = 20.0  #: between rounds when nothing happens
    retry: float = 1.0  #: before the next round when this one left something undone
    spacing: float = 0.05  #: rounds are never closer, however many notices come
    #: How long the loss of a queue waits for handler calls that run; with order locks, without end.
    handover: float = 10.0
    answer: float = 1.0  #: how long a member may take to say what it holds
    silence: float = 5.0  #: how long one that did not say is left alone (see `handover`)
    #: How long a member keeps a queue that is ours, although it answers, if it does not let go
    #: (Java members not so long: see `handover`).
    longest_wait: float = 300.0
    stalled: float = 120.0  #: an owned queue that was not pulled for so long is begun anew
    persist: float = 5.0  #: how often progress is put by
    #: Also when a queue had nothing to do for so long (see `reporting`); 0: only as often as that.
    persist_idle: float = 0.2
    #: After a broker was connected to, members that no broker lists are waited for (see `survey`).
    return_grace: float = 3.0
    #: A queue that somebody else still holds is asked for again after so long, and slower then.
    first_poll: float = 0.02
    slowest_poll: float = 0.2

    def __post_init__(self) -> None:
        fields = Fields(self, "rebalance")
        fields.durations(*_MAY_BE_ZERO, least=0)
        fields.durations(*(name for name in self.__slots__ if name not in _MAY_BE_ZERO))
