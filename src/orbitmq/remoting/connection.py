"""A connection between two peers, either of which may ask and answer.

Work is done in turns. A turn begins with a read. All requests that it completes are given to the
owner one after the other; then the owner is told that the turn is done, and may answer what it
collected (a broker writes the store once for all sends of a turn). Everything that was sent within
the turn is written at its end, at once. Outside of a turn - a held pull is answered, the peer is
asked something - what is sent waits for the end of the current step of the loop, so that several
answers again become one write.

A peer can make us hold only a bounded amount. While it does not take its answers (`slow_bytes`), or
has many requests open (`open_requests`), nothing more is read from it, and requests that were
already read wait in a backlog. What exceeds `unwritten_bytes` nevertheless ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from orbitmq.clock import Clock, SystemClock
from orbitmq.remoting.address import NOWHERE, socket_address
from orbitmq.remoting.blocking import BlockingSide, Encode
from orbitmq.remoting.errors import ConnectionLost
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.remoting.outgoing import Outgoing
from orbitmq.remoting.owner import Answer, Owner, Prepare
from orbitmq.remoting.pending import Outcome, PendingRequests, settling
from orbitmq.remoting.settings import ConnectionSettings
from orbitmq.remoting.sharedsocket import SharedSocket
from orbitmq.wire.codes import Flag, ResponseCode, Serialization
from orbitmq.wire.command import Command, command_pieces, decode_command
from orbitmq.wire.errors import FrameError
from orbitmq.wire.frame import Bytes, Frame, FrameReader
from orbitmq.wire.headers.base import Header
from orbitmq.wire.versions import Gate

log = logging.getLogger(__name__)

_RESPONSE = int(Flag.RESPONSE)
_ONE_WAY = int(Flag.ONE_WAY)


class Connection(asyncio.Protocol):
    """One open socket, its requests and answers. Belongs to the loop that it was made on."""

    def __init__(
        self,
        owner: Owner,
        *,
        settings: ConnectionSettings | None = None,
        clock: Clock | None = None,
        prepare: Prepare | None = None,
        faults: Occurrences | None = None,
    ) -> None:
        """`faults` counts what peers do wrong; a server shares one among its connections."""
        self._owner = owner
        self._settings = settings or ConnectionSettings()
        self._monotonic = (clock or SystemClock()).monotonic
        self._prepare = prepare
        self._faults = faults or Occurrences()
        self._loop = asyncio.get_running_loop()
        # Both are there from `connection_made` on, which comes before anything else.
        self._transport: asyncio.Transport
        self._out: Outgoing
        # There once threads write, too.
        self._shared: SharedSocket | None = None
        self._blocking: BlockingSide | None = None
        self._pending = PendingRequests(self._loop, NOWHERE, 0)
        self._reader = FrameReader(self._settings.limits)
        self._opaques = itertools.count(1)
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
        #: Whether anything can still be sent.
        self.is_open = False
        #: Where the peer is.
        self.remote = NOWHERE
        #: Where we are on this connection.
        self.local = NOWHERE
        #: Whatever the owner wants to remember about the peer.
        self.context: Any = None
        #: Why the connection ended or will end.
        self.reason = "closed by the peer"
        # Below zero between an early `reply` and its `leave_open`.
        self._left_open = 0
        self.bytes_in = 0
        self._bytes_out = 0
        #: When something was last read or written, by the clock's `monotonic`.
        self.last_active = self._monotonic()

    def __repr__(self) -> str:
        return f"<Connection {self.remote} {'open' if self.is_open else 'closed'}>"

    # Asking

    async def request(
        self,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # cheaper than a scope: one timer for all
        serialization: Serialization = Serialization.JSON,
    ) -> Command:
        """Ask the peer and wait for its answer.

        Raises `ConnectionLost`, `RequestTimedOut` or `TooManyRequests`. An answer that refuses is
        an answer.
        """
        answered: asyncio.Future[Command] = self._loop.create_future()
        opaque = self.submit(
            code,
            header,
            settling(answered),
            body=body,
            extra=extra,
            timeout=timeout,
            serialization=serialization,
        )
        try:
            return await answered
        finally:
            self._pending.give_up(opaque)

    def submit(
        self,
        code: int,
        header: Header | None,
        outcome: Outcome,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        timeout: float | None = None,
        serialization: Serialization = Serialization.JSON,
    ) -> int:
        """Ask the peer; `outcome` is called with its answer or the error. Returns the opaque."""
        return self.submit_encoded(
            code,
            lambda opaque: self.encoded(
                Command.request(
                    code, header, opaque=opaque, body=body, extra=extra, serialization=serialization
                )
            ),
            outcome,
            timeout=timeout,
        )

    def submit_encoded(
        self, code: int, encode: Encode, outcome: Outcome, *, timeout: float | None = None
    ) -> int:
        """Like `submit`, with a request that the caller encodes when it is told its opaque.

        On a connection that `prepares` requests, `encode` has to make use of `encoded`.
        """
        self._check_open()
        opaque = self._next_opaque()
        pieces = encode(opaque)
        if timeout is None:
            timeout = self._settings.request_timeout
        self._pending.add(opaque, code, timeout, outcome)
        self.send_pieces(pieces)
        return opaque

    def give_up(self, opaque: int) -> None:
        """Nobody waits for the answer to this request any more."""
        self._pending.give_up(opaque)

    def notify(
        self,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        serialization: Serialization = Serialization.JSON,
    ) -> None:
        """Tell the peer something that it does not answer. Raises `ConnectionLost`."""
        self._check_open()
        self.send_pieces(
            self.encoded(
                Command.request(
                    code,
                    header,
                    opaque=self._next_opaque(),
                    body=body,
                    extra=extra,
                    one_way=True,
                    serialization=serialization,
                )
            )
        )

    @property
    def prepares(self) -> bool:
        """Whether requests are changed before they are sent: signed, for instance."""
        return self._prepare is not None

    def encoded(self, request: Command) -> Sequence[Bytes]:
        """A request, prepared, as the pieces to send. May be called by any thread."""
        if self._prepare is not None:
            request = self._prepare(request)
        return command_pieces(request, limits=self._settings.limits)

    def _next_opaque(self) -> int:
        return next(self._opaques) & 0x7FFFFFFF

    def for_threads(self) -> BlockingSide:
        """What threads other than the loop's may use to ask, blocking. Called on the loop."""
        self._check_open()
        if self._blocking is None:
            self._shared = SharedSocket(
                self._loop, self._transport, self.flush, self.abort_from_thread
            )
            self._blocking = BlockingSide(self, self._shared, self._pending, self._opaques)
        return self._blocking

    def abort_from_thread(self, reason: str) -> None:
        """Have the connection aborted by the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self.abort, reason)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.remote, self.reason)

    # Answering

    def leave_open(self, request: Command) -> None:
        """Count a request to be answered with `reply` (or already so), or let go with `release`."""
        if request.flag & _ONE_WAY:
            return
        self._left_open += 1
        if self._left_open >= self._settings.open_requests:
            self._hold_up()

    def reply(self, request: Command, answer: Answer) -> None:
        """Answer a request that was left open. Nothing is written for a one-way request."""
        if request.flag & _ONE_WAY:
            return
        try:
            self.send(answer)
        finally:
            self.release(request)

    def release(self, request: Command) -> None:
        """A request that was left open has been answered, or never will be."""
        if request.flag & _ONE_WAY:
            return
        self._left_open -= 1
        if self._is_finishing and self._left_open <= 0:
            self.close()
        elif self._is_held_up:
            self._resume_soon()

    def send(self, answer: Answer) -> None:
        """Send an encoded or unencoded command. Dropped when the peer is gone."""
        if isinstance(answer, Command):
            answer = command_pieces(answer, limits=self._settings.limits)
        self.send_pieces(answer)

    def send_pieces(self, pieces: Sequence[Bytes]) -> None:
        """Send the pieces of whole frames. Their buffers must not change any more."""
        if not self.is_open:
            return
        self._out.add(pieces)
        if self._out.size >= self._settings.flush_bytes:
            self.flush()
        elif not self._in_turn and not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was sent now; otherwise it happens at the end of the turn."""
        self._flush_is_due = False
        shared = self._shared
        if not self.is_open or not (self._out.size or (shared and shared.has_work)):
            return
        if self._transport.is_closing():
            # An earlier write failed; `connection_lost` comes with the next step of the loop.
            self._end("a write failed")
            return
        self._bytes_out += shared.flush(self._out) if shared else self._out.flush()
        if not self._is_slow:
            self.last_active = self._monotonic()
        elif self._out.unwritten > self._settings.unwritten_bytes:
            self._fail(f"it left {self._out.unwritten} bytes unread")

    # Reading

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)
        self.last_active = self._monotonic()
        try:
            frames: Sequence[Frame] = self._reader.feed(data)
        except FrameError as error:
            if not self._is_held_up:
                self._turn(error.frames)
            self._fail(f"it sent bytes that are no frame: {error}", abort=False)
            return
        if self._is_held_up:
            # Reading was stopped, and this was on its way already.
            self._backlog.extend(frames)
        else:
            self._turn(frames)

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
            self.flush()
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
            self._transport.resume_reading()

    @property
    def _may_go_on(self) -> bool:
        return self.is_open and not self._is_slow and self._left_open < self._settings.open_requests

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
    def pending_requests(self) -> int:
        """Requests of ours that wait for an answer."""
        return len(self._pending)

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
        self.flush()
        self._end(reason or (self.reason if self._is_finishing else "closed here"))
        self._transport.close()

    def abort(self, reason: str = "aborted here") -> None:
        """Close now; what was not written is lost."""
        if self._closed.done() or self.remote is NOWHERE:
            return
        self._end(reason)
        self._transport.abort()

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.is_open = False
        self._is_held_up = True
        self._backlog.clear()

    async def wait_closed(self) -> None:
        """Return when the connection has ended."""
        await asyncio.shield(self._closed)

    def _fail(self, problem: str, *, abort: bool = True) -> None:
        """The peer did something that ends the connection."""
        if not self.is_open:
            return
        if count := self._faults.note(self.remote.host):
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
        self._pending = PendingRequests(self._loop, self.remote, settings.pending_requests)
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
        self._end(self.reason if exc is None else str(exc) or type(exc).__name__)
        self._out.clear()
        if self._shared is not None:
            self._shared.close()
        self._left_open = 0
        self._pending.fail_all(self.reason)
        self._owner.connection_closed(self)
        if not self._closed.done():
            self._closed.set_result(None)
        for callback in self._on_close:
            callback(self)
        self._on_close.clear()
        self._on_quick.clear()
