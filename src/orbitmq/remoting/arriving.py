"""The frame that is arriving on one connection: since when, and whether there is memory for it."""

from __future__ import annotations

from collections.abc import Callable

from orbitmq.remoting.address import Address
from orbitmq.remoting.unfinished import FREE_BYTES, UnfinishedFrames
from orbitmq.wire.frame import FrameReader


class ArrivingFrame:
    """Keeps account of what a connection's reader has of a frame that is not complete."""

    __slots__ = (
        "_give_up",
        "_go_on",
        "_has_place",
        "_monotonic",
        "_places",
        "_reader",
        "began",
        "must_wait",
        "remote",
    )

    def __init__(
        self,
        reader: FrameReader,
        places: UnfinishedFrames | None,
        remote: Address,
        monotonic: Callable[[], float],
        *,
        go_on: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """`go_on` is called when the connection may be read from again, `give_up` when it is to be
        closed; without `places` there is memory for everything."""
        self._reader = reader
        self._places = places
        self.remote = remote
        self._monotonic = monotonic
        self._go_on = go_on
        self._give_up = give_up
        self._has_place = False
        #: When it began; None: none has.
        self.began: float | None = None
        #: Whether the rest is not to be read yet.
        self.must_wait = False

    def note(self, now: float, *, is_another: bool) -> None:
        """Something was read; `is_another`: it completed the frame of before."""
        reader = self._reader
        if is_another or self.began is None:
            self.began = now if reader.unfinished else None
            self.leave()
        if reader.unfinished > FREE_BYTES and self._places is not None and not self._has_place:
            self._has_place = self._places.enter(self, reader.announced)
            self.must_wait = not self._has_place

    def leave(self) -> None:
        """It is complete, or its connection is gone."""
        if self._places is not None and (self._has_place or self.must_wait):
            self._has_place = self.must_wait = False
            self._places.leave(self)

    def place_given(self) -> None:
        """There is memory for it: read on."""
        self._has_place, self.must_wait = True, False
        # Until now it was not for the peer to finish it.
        self.began = self._monotonic()
        self._go_on()

    def place_taken(self, reason: str) -> None:
        """Others wait for its memory."""
        self._has_place = False
        self._give_up(reason)

    def check(self, now: float, longest: float, *, is_read: bool) -> None:
        """Give up a peer that takes longer than `longest` to finish it."""
        if self.began is None or now - self.began <= longest:
            return
        if is_read:
            self._give_up(f"its frame of {self._reader.announced} bytes took over {longest:g} s")
        else:
            # It could not go on: its time begins when it is read from again.
            self.began = now
