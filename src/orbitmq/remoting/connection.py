"""A connection between two peers, either of which may ask and answer.

Work is done in turns. A turn begins with a read. All requests that it completes are given to the
owner one after the other; then the owner is told that the turn is done, and may answer what it
collected (a broker writes the store once for all sends of a turn). Everything that was sent within
the turn is written at its end, at once. Outside of a turn - held pulls are answered, the peer is
asked something - what is sent waits for the end of the current step of the loop, so that several
answers again become one write. What most likely has nothing else to be written with it, while
somebody waits for it, is written at once: a request with no other in flight, and the answer to a
held pull when a write of messages woke no other.

A peer can make us hold only a bounded amount. While it does not take its answers (`slow_bytes`),
has many or large requests open (`open_requests`, `open_bytes`), or sends a long frame for which
there is no memory (`unfinished`), nothing more is read from it, and requests that were already read
wait in a backlog. What exceeds `unwritten_bytes` nevertheless ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from orbitmq.clock import Clock, SystemClock
from orbitmq.remoting.address import NOWHERE, socket_address
from orbitmq.remoting.arriving import ArrivingFrame
from orbitmq.remoting.asking import Asking
from orbitmq.remoting.blocking import BlockingSide
from orbitmq.remoting.lanes import Lanes
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.remoting.onloop import call_on_loop
from orbitmq.remoting.outgoing import Outgoing
from orbitmq.remoting.owner import Answer, Owner, Prepare
from orbitmq.remoting.settings import ConnectionSettings
from orbitmq.remoting.sharedreading import SharedReading
from orbitmq.remoting.sharedsocket import SharedSocket, second_descriptor
from orbitmq.remoting.unfinished import UnfinishedFrames
from orbitmq.wire.codes import Flag, ResponseCode
from orbitmq.wire.command import Command, command_pieces, decode_command
from orbitmq.wire.errors import FrameError, OtherProtocol
from orbitmq.wire.frame import Bytes, Frame, FrameReader
from orbitmq.wire.versions import Gate

log = logging.getLogger(__name__)

_RESPONSE = int(Flag.RESPONSE)
_ONE_WAY = int(Flag.ONE_WAY)


class Connection(Asking, asyncio.Protocol):
    """One open socket, its requests and answers. Belongs to the loop that it was made on."""

    def __init__(
        self,
        owner: Owner,
        *,
        settings: ConnectionSettings | None = None,
        clock: Clock | None = None,
        prepare: Prepare | None = None,
        faults: Occurrences | None = None,
        places: UnfinishedFrames | None = None,
        silence: float | None = None,
    ) -> None:
        """`faults` counts what peers do wrong, `places` are for their long frames (None: no bound);
        a server shares them among its connections. `silence` is how long requests may go unanswered
        with nothing else heard before the peer is given up; None: for ever."""
        super().__init__(
            settings or ConnectionSettings(), prepare, (clock or SystemClock()).monotonic, silence
        )
        self._owner = owner
        self._faults = faults or Occurrences()
        # These are there from `connection_made` on, which comes before anything else.
        self._transport: asyncio.Transport
        self._out: Outgoing
        self._arriving: ArrivingFrame
        # There once threads write and read, too.
        self._shared: SharedSocket | None = None
        self._reading: SharedReading | None = None
        self._lanes: Lanes | None = None
        self._blocking: BlockingSide | None = None
        self._reader = FrameReader(self._settings.limits)
        self._places = places
        self._backlog: deque[Frame] = deque()
        self._in_turn = False
        self._flush_is_due = False
        self._resume_is_due = False
        self._is_slow = False
        self._is_finishing = False
        #: Whether requests have to wait: the sum of all reasons, looked at for every frame.
        self._is_held_up = False
        self._closed = self._loop.create_future()
        self._on_close: list[Callable[[Connection], None]] = []
        self._on_quick: list[Callable[[Connection], None]] = []
        #: Where we are on this connection.
        self.local = NOWHERE
        #: Whatever the owner wants to remember about the peer.
        self.context: Any = None
        # Below zero between an early `reply` and its `leave_open`.
        self._left_open = 0
        self._left_open_bytes = 0
        self.bytes_in = 0
        self._bytes_out = 0
        #: When something was last read or written, by the clock's `monotonic`.
        self.last_active = self._monotonic()

    def __repr__(self) -> str:
        return f"<Connection {self.remote} {'open' if self.is_open else 'closed'}>"

    # Threads

    def for_threads(self) -> BlockingSide:
        """What threads other than the loop's may use to ask, blocking. Called on the loop."""
        self._check_open()
        if self._blocking is None:
            self._shared = SharedSocket(
                self._loop, self._transport, self.flush, self.abort_from_thread
            )
            descriptor = second_descriptor(self._transport)
            if descriptor is not None:
                self._reading = SharedReading(
                    self._loop,
                    self._transport,
                    descriptor,
                    self._reader,
                    self._pending,
                    self,
                    self._settings,
                )
                if self._settings.lanes:
                    self._lanes = Lanes(
                        self._loop, self._transport, self.remote, self.probe_frame, self._settings
                    )
            self._blocking = BlockingSide(
                self, self._shared, self._reading, self._pending, self._opaques, self._lanes
            )
        return self._blocking

    def abort_from_thread(self, reason: str) -> None:
        """Have the connection aborted by the loop."""
        call_on_loop(self._loop, self.abort, reason)

    def note_read(self, size: int) -> None:
        """A thread has read so many bytes."""
        self.bytes_in += size
        self.last_active = self._last_read = self._monotonic()

    def note_heard(self, at: float) -> None:
        """The peer has answered a thread elsewhere: this connection is not idle.

        It may be dead all the same: that the peer lives says nothing about the way to it.
        """
        if at > self.last_active:
            self.last_active = at

    def frames_received(self, frames: Sequence[Frame], broken: FrameError | None) -> None:
        """Frames that threads read and that are not for them; `broken`: the stream ended."""
        if not self.is_open:
            return
        if self._is_held_up:
            self._backlog.extend(frames)
        else:
            try:
                self._turn(frames)
            except BaseException:
                # As the transport does when `data_received` fails: the rest was not served.
                self.abort("a request could not be served")
                raise
        if broken is not None:
            self._give_up(broken)

    # Answering

    def leave_open(self, request: Command) -> None:
        """Count a request to be answered with `reply` (or already so), or let go with `release`."""
        if request.flag & _ONE_WAY:
            return
        self._left_open += 1
        self._left_open_bytes += request.kept_bytes
        if not self._has_few_open:
            self._hold_up()

    def reply(self, request: Command, answer: Answer, *, at_once: bool = False) -> None:
        """Answer a request that was left open. Nothing is written for a one-way request."""
        if request.flag & _ONE_WAY:
            return
        try:
            self.send(answer, at_once=at_once)
        finally:
            self.release(request)

    def release(self, request: Command) -> None:
        """A request that was left open has been answered, or never will be."""
        if request.flag & _ONE_WAY:
            return
        self._left_open -= 1
        self._left_open_bytes -= request.kept_bytes
        if self._is_finishing and self._left_open <= 0:
            self.close()
        elif self._is_held_up:
            self._resume_soon()

    def send(self, answer: Answer, *, at_once: bool = False) -> None:
        """Send an encoded or unencoded command. Dropped when the peer is gone."""
        if isinstance(answer, Command):
            answer = command_pieces(answer, limits=self._settings.limits)
        self.send_pieces(answer, at_once=at_once)

    def send_pieces(self, pieces: Sequence[Bytes], *, at_once: bool = False) -> None:
        if not self.is_open:
            return
        self._out.add(pieces)
        if self._out.size >= self._settings.flush_bytes:
            self.flush()
        elif not self._in_turn and not self._flush_is_due:
            if at_once:
                self._flush(is_last=False)
            else:
                self._flush_is_due = True
                self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was sent now; otherwise it happens at the end of the turn."""
        self._flush(is_last=False)

    def _flush(self, *, is_last: bool) -> None:
        self._flush_is_due = False
        shared = self._shared
        if not self.is_open or not (self._out.size or (shared and shared.has_work)):
            return
        if self._transport.is_closing():
            # An earlier write failed; `connection_lost` comes with the next step of the loop.
            self._end("a write failed")
            return
        if shared is None:
            self._bytes_out += self._out.flush()
        else:
            self._bytes_out += shared.flush(self._out, is_last=is_last)
            if self._reading is not None and self._pending.has_own:
                self._reading.take_back()
        if not self._is_slow:
            self.last_active = self._monotonic()
        elif self._out.unwritten > self._settings.unwritten_bytes:
            self._fail(f"it left {self._out.unwritten} bytes unread")

    # Reading

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)
        self.last_active = self._last_read = self._monotonic()
        try:
            frames: Sequence[Frame] = self._reader.feed(data)
        except FrameError as error:
            if not self._is_held_up:
                self._turn(error.frames)
            self._give_up(error)
            return
        arriving = self._arriving
        if self._reader.unfinished or arriving.began is not None:
            arriving.note(self.last_active, is_another=bool(frames))
        if self._is_held_up:
            # Reading was stopped, and this was on its way already.
            self._backlog.extend(frames)
        else:
            self._turn(frames)
        if arriving.must_wait:
            # After the turn: what came before the long frame is not to wait for it.
            self._hold_up()
        elif self._reading is not None and not self._is_held_up:
            self._reading.turn_done()

    def check_frame(self, now: float, longest: float, rate: float) -> None:
        """Give up a peer that brought less than `rate` bytes a second of a frame that it has begun,
        for longer than `longest`."""
        if self.is_open:
            self._arriving.check(now, longest, rate)

    def _turn(self, frames: Iterable[Frame]) -> None:
        bad: FrameError | None = None
        rest = iter(frames)
        limits, received = self._settings.limits, self._owner.request_received
        self._in_turn = True
        try:
            for frame in rest:
                try:
                    command = decode_command(frame, limits)
                except FrameError as error:
                    bad = error
                    break
                if not command.flag & _RESPONSE:
                    if not self._is_finishing or not self._sent_away(command):
                        received(self, command)
                elif not self._pending.answer(command):
                    log.debug("answer to nothing", extra={"client": str(self.remote)})
                if self._is_held_up:
                    self._backlog.extend(rest)
                    break
            self._owner.turn_done(self)
        finally:
            self._in_turn = False
            if self._out.size or self._shared is not None:
                self._flush(is_last=False)
        if bad is not None:
            self._fail(f"it sent a frame that is no command: {bad}", abort=False)

    def _sent_away(self, request: Command) -> bool:
        """Tell a peer that understands it to go elsewhere; others are served to the end."""
        if request.version <= Gate.BEFORE_GO_AWAY:
            return False
        if not request.flag & _ONE_WAY:
            self.send(request.answer(ResponseCode.GO_AWAY, remark="please go away"))
        return True

    def _hold_up(self) -> None:
        self._is_held_up = True
        if self.is_open:
            self._transport.pause_reading()
            self._arriving.held_up()

    def _resume_soon(self) -> None:
        if not self._resume_is_due:
            self._resume_is_due = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Go on with what was read already, then read again."""
        self._resume_is_due = False
        if not self._may_go_on:
            return
        self._is_held_up = False
        waiting, self._backlog = self._backlog, deque()
        if waiting:
            self._turn(waiting)
        if not self._is_held_up:
            self._arriving.read_again()
            if self._reading is None or not self._reading.is_lent:
                self._transport.resume_reading()

    def read_again(self) -> None:
        """Threads have handed the reading back."""
        if self.is_open and not self._is_held_up:
            self._transport.resume_reading()

    @property
    def _may_go_on(self) -> bool:
        return (
            self.is_open
            and not self._is_slow
            and not self._arriving.must_wait
            and self._has_few_open
        )

    @property
    def _has_few_open(self) -> bool:
        settings = self._settings
        return (
            self._left_open < settings.open_requests and self._left_open_bytes < settings.open_bytes
        )

    # Life

    @property
    def bytes_out(self) -> int:
        """Bytes that were written, by threads as well."""
        return self._bytes_out + (self._shared.written if self._shared else 0)

    @property
    def open_requests(self) -> int:
        """Requests of the peer that were left open to be answered later."""
        return max(0, self._left_open)

    @property
    def unwritten(self) -> int:
        """Bytes that were sent and that the peer has not taken yet."""
        return 0 if self.remote is NOWHERE else self._out.unwritten

    @property
    def is_slow(self) -> bool:
        """Whether the peer leaves so much unread that nothing more should be sent for now."""
        return self._is_slow and self.is_open

    def when_quick(self, callback: Callable[[Connection], None]) -> None:
        """Have `callback` called once when the peer is no longer slow; never if it is gone."""
        self._on_quick.append(callback)

    def on_close(self, callback: Callable[[Connection], None]) -> None:
        """Have `callback` called when the connection has ended; at once when it has already."""
        if self._closed.done():
            callback(self)
        else:
            self._on_close.append(callback)

    def finish(self, reason: str = "finished") -> None:
        """Answer what is open, begin nothing new with peers that can go elsewhere, then close."""
        if not self.is_open:
            return
        self._is_finishing = True
        self.reason = reason
        if self._left_open <= 0:
            self.close(reason)

    def close(self, reason: str | None = None) -> None:
        """Write what was sent, then close; a peer that does not read delays that: see `abort`."""
        if not self.is_open:
            return
        self._flush(is_last=True)
        self._end(reason or (self.reason if self._is_finishing else "closed here"))
        self._transport.close()

    def abort(self, reason: str = "aborted here") -> None:
        """Close now; what was not written is lost."""
        if self._closed.done() or self.remote is NOWHERE:
            return
        self._end(reason)
        self._transport.abort()

    def abandon(self) -> None:
        """Close now, because the loop is about to end: only threads are told of it."""
        self._pending.forget_own()
        self.abort("its event loop ends")

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.is_open = False
        self._is_held_up = True
        self._backlog.clear()

    async def wait_closed(self) -> None:
        """Return when the connection has ended."""
        await asyncio.shield(self._closed)

    def _give_up(self, broken: FrameError) -> None:
        """The stream has no next frame."""
        problem = f"it sent bytes that are no frame: {broken}"
        # Whoever runs a wrong client is told so, whatever else came from that host before.
        kind = str(broken) if isinstance(broken, OtherProtocol) else ""
        self._fail(problem, abort=False, kind=kind)

    def _fail(self, problem: str, *, abort: bool = True, kind: str = "") -> None:
        """The peer did something that ends the connection; each `kind` of that is logged once."""
        if not self.is_open:
            return
        if count := self._faults.note(f"{self.remote.host} {kind}"):
            log.warning(
                "connection given up: %s (%d from this host so far)",
                problem[:300],
                count,
                extra={"client": str(self.remote)},
            )
        if abort:
            self.abort(problem)
        else:
            self.close(problem)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        settings = self._settings
        if hasattr(transport, "max_size"):
            # asyncio's selector transport; uvloop has a buffer of its own.
            transport.max_size = settings.read_size
        transport.set_write_buffer_limits(high=settings.slow_bytes, low=settings.resume_bytes)
        self._transport = transport
        self._out = Outgoing(transport)
        self.remote = socket_address(transport.get_extra_info("peername"))
        self.local = socket_address(transport.get_extra_info("sockname"))
        self._arriving = ArrivingFrame(
            self._reader,
            self._places,
            self.remote,
            self._monotonic,
            go_on=self._resume_soon,
            give_up=self._fail,
        )
        self._begin_asking()
        self.is_open = True
        self._owner.connection_opened(self)

    def pause_writing(self) -> None:
        self._is_slow = True
        self._hold_up()

    def resume_writing(self) -> None:
        self._is_slow = False
        self.last_active = self._monotonic()
        self._resume_soon()
        waiting, self._on_quick = self._on_quick, []
        for callback in waiting:
            callback(self)

    def eof_received(self) -> None:
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        is_in_order = self.is_open and exc is None
        self._end(self.reason if exc is None else str(exc) or type(exc).__name__)
        self._out.clear()
        if self._shared is not None:
            self._shared.close()
        if self._lanes is not None:
            self._lanes.close(is_in_order=is_in_order)
        if self._reading is not None:
            self._reading.close()
        else:
            # Whoever remembers the connection does not have to remember half a frame, too.
            self._reader.abandon()
        self._left_open = 0
        self._arriving.leave()
        self._pending.fail_all(self.reason)
        self._owner.connection_closed(self)
        if not self._closed.done():
            self._closed.set_result(None)
        for callback in self._on_close:
            callback(self)
        self._on_close.clear()
        self._on_quick.clear()
