"""The frame that is arriving on one connection: how it goes on, and whether there is memory for it.

A peer has to go on with what it has begun: at least `rate` bytes in each second, over any `longest`
seconds. So a long frame may take its time on a slow line, and a short one that drips does not. The
time in which we do not read is ours and not the peer's.
"""

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
        "_held_up_at",
        "_monotonic",
        "_places",
        "_read_since",
        "_reader",
        "_received",
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
        #: When it began, or was last seen to go on well; None: there is none.
        self.began: float | None = None
        #: What was here of it by then.
        self._received = 0
        #: Since when nothing is read; None: it is.
        self._held_up_at: float | None = None
        self._read_since = float("-inf")
        #: Whether the rest is not to be read yet.
        self.must_wait = False

    @property
    def received(self) -> int:
        """Bytes of it that are here."""
        return self._reader.unfinished

    @property
    def read_since(self) -> float | None:
        """Since when the connection has been read from; None: it is not, now."""
        return self._read_since if self._held_up_at is None else None

    def note(self, now: float, *, is_another: bool) -> None:
        """Something was read; `is_another`: it completed the frame of before."""
        reader = self._reader
        unfinished = reader.unfinished
        if is_another or self.began is None:
            self.began = now if unfinished else None
            self._received = 0
            if self._held_up_at is not None:
                # It was on its way already when the reading was stopped.
                self._held_up_at = now
            if self._has_place or self.must_wait:
                self.leave()
        if unfinished < FREE_BYTES or self._has_place or self.must_wait:
            return
        if self._places is not None:
            self._has_place = self._places.enter(self, reader.announced)
            self.must_wait = not self._has_place

    def leave(self) -> None:
        """It is complete, or its connection is gone."""
        if self._places is not None and (self._has_place or self.must_wait):
            self._has_place = self.must_wait = False
            self._places.leave(self)

    def held_up(self) -> None:
        """The connection is not read from: the peer's time stands still. Idempotent."""
        if self._held_up_at is None:
            self._held_up_at = self._monotonic()

    def read_again(self) -> None:
        """The peer's time goes on."""
        if self._held_up_at is None:
            return
        self._read_since = self._monotonic()
        if self.began is not None:
            self.began += self._read_since - self._held_up_at
        self._held_up_at = None

    def place_given(self) -> None:
        """There is memory for it: read on."""
        self._has_place, self.must_wait = True, False
        self._go_on()

    def place_taken(self, reason: str) -> None:
        """Others wait for its memory."""
        self._has_place = self.must_wait = False
        self._give_up(reason)

    def check(self, now: float, longest: float, rate: float) -> None:
        """Give up a peer that brought less than `rate` bytes a second for longer than `longest`."""
        if self.began is None or self._held_up_at is not None:
            return
        passed = now - self.began
        if passed <= longest:
            return
        if self.received - self._received < rate * passed:
            if self._places is not None:
                self._places.too_slow += 1
            self._give_up(
                f"its frame of {self._reader.announced} bytes went on by fewer than {rate:g} bytes "
                f"a second for {longest:g} s"
            )
        else:
            self.began, self._received = now, self.received
