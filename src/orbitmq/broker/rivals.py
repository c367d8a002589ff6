"""Whether another broker has our place at a name server: our name and id, with its own address.

Name servers list one address for a name and an id. Two brokers that were given the same (the
default name, on two machines) displace each other with every registration, and each is told that
it is registered: half of the time clients are sent to the one, else to the other. When one of them
says goodbye, nobody is listed until the other registers again.

So a broker looks from time to time who is listed. Somebody else is a rival. It stays one while we
are listed again, because its next registration will come; it is gone when nobody is listed, or
when we were listed for as long as it may take to register twice.
"""

from __future__ import annotations

#: How often to look, in seconds.
LOOK = 5.0
#: The same as long as there is a rival: when it goes, clients should find us soon.
LOOK_CLOSELY = 1.0
#: After this time without a sign of it a rival is gone; brokers register every 60 s or more often.
FORGOTTEN_AFTER = 70.0


class Place:
    """Our place at one name server. Instants are seconds of a clock that never goes back."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._seen = 0.0
        #: The address of the broker that has our name and id; None when there is none.
        self.rival: str | None = None

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return LOOK if self.rival is None else LOOK_CLOSELY

    def saw(self, listed: str | None, now: float) -> bool:
        """Somebody is listed, or nobody; whether the place is free and should be taken."""
        if listed is None:
            self.rival = None
            return True
        if listed != self._ours:
            self.rival = listed
            self._seen = now
        elif self.rival is not None and now - self._seen > FORGOTTEN_AFTER:
            self.rival = None
        return False
