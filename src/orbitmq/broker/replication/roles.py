"""What a broker does for replication, by its role: masters serve, slaves follow."""

from __future__ import annotations

from collections.abc import Sequence

from orbitmq.broker.parts import Parts
from orbitmq.broker.replication.copying import Copying
from orbitmq.broker.replication.following import Following
from orbitmq.broker.replication.master import MasterPlace
from orbitmq.broker.replication.serving import Serving
from orbitmq.store.arrivals import Arrival


class Replication:
    """A broker's part in replication: at most one of both sides."""

    def __init__(
        self,
        serving: Serving | None = None,
        following: Following | None = None,
        copying: Copying | None = None,
    ) -> None:
        self.serving = serving
        self.following = following
        self.copying = copying

    @property
    def is_master_gone(self) -> bool:
        """Whether this is a slave that is on its own: then it serves whoever comes."""
        return self.following is not None and self.following.is_alone


def begin_replicating(parts: Parts) -> None:
    """Give the broker its part; jobs begin with the background.

    Raises `ListenFailed`. To be called when everything else of `parts` is there.
    """
    settings = parts.settings
    if settings.is_slave:
        parts.replication = _follow(parts)
    elif settings.replication.serve:
        parts.replication = Replication(serving=_serve(parts))
    else:
        parts.replication = Replication()


def _serve(parts: Parts) -> Serving:
    serving = Serving(parts)
    parts.registration.ha_port = serving.address.port
    parts.background.add(serving)
    held = parts.held

    def arrived(arrivals: Sequence[Arrival]) -> None:
        serving.arrived(arrivals)
        held.arrived(arrivals)

    parts.store.on_arrival(arrived)
    return serving


def _follow(parts: Parts) -> Replication:
    master = MasterPlace(parts.settings.replication)
    parts.registration.on_master = master.learn
    following = Following(parts, master)
    copying = Copying(parts, master, lambda: following.is_in_step)
    following.on_growth.append(copying.grown)
    # The master delivers; what it has delivered is kept here for the day it is gone.
    for deliverer in (parts.delays, parts.timers):
        parts.background.every(parts.settings.delays.save_interval, deliverer.file.save_soon)
        parts.on_stop(deliverer.file.close)
    parts.background.add(following)
    parts.background.add(copying)
    return Replication(following=following, copying=copying)
