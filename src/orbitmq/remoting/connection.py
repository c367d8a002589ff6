"""A connection between two peers. Either side may send requests.

Work is done in turns. A turn is a read and all requests that it completes; `turn_done` then lets
the owner answer what it collected (a broker writes the store once for all sends of a turn). Answers
are written together at the end of the turn, and outside of a turn at the end of the loop's step;
with `at_once` they are written immediately.

The memory per peer is bounded. While a peer does not read its answers (`slow_bytes`), has many or
large requests open (`open_requests`, `open_bytes`), or sends a long frame for which there is no
memory (`FrameMemory`), nothing more is read from it, and requests that were read before wait in a
backlog. Above `unwritten_bytes` the connection is aborted.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import msgspec

from orbitmq.clock import Clock, SystemClock
from orbitmq.logonce import LogEveryNth
from orbitmq.remoting.blocking import PROBE
from orbitmq.remoting.settings import (
    NOWHERE,
    Address,
    ConnectionLost,
    ConnectionSettings,
    RemotingError,
    RequestTimedOut,
    TooManyRequests,
    socket_address,
)
from orbitmq.wire.codes import (
    Flag,
    FrameError,
    Gate,
    OtherProtocol,
    ResponseCode,
    Serialization,
)
from orbitmq.wire.command import Command, command_pieces, decode_command
from orbitmq.wire.frame import Bytes, Frame, FrameReader
from orbitmq.wire.headers import Header

if TYPE_CHECKING:
    from orbitmq.remoting.blocking import Encode


log = logging.getLogger(__name__)

_RESPONSE = int(Flag.RESPONSE)
_ONE_WAY = int(Flag.ONE_WAY)


class Connection(asyncio.Protocol):
    """One open socket, its requests and answers. Belongs to the loop that it was created on."""

    def __init__(
        self,
        owner: Owner,
        *,
        settings: ConnectionSettings | None = None,
        clock: Clock | None = None,
        prepare: Prepare | None = None,
        faults: LogEveryNth | None = None,
        memory: FrameMemory | None = None,
        silence: float | None = None,
    ) -> None:
        """`faults` counts protocol errors of peers, `memory` bounds their long frames (None: no
        bound); a server shares both among its connections. `silence`: how long requests may stay
        unanswered, with nothing received, before the connection is closed; None: no limit."""
        self._settings = settings or ConnectionSettings()
        self._prepare = prepare
        #: Whether requests are changed before they are sent, for example signed.
        self.prepares = prepare is not None
        self._monotonic = (clock or SystemClock()).monotonic
        self._silence = silence
        #: The time of the last read.
        self._last_read = self._monotonic()
        #: When the oldest unanswered request was sent, if nothing was read since.
        self._silent_since = float("-inf")
        self._is_probing = False
        self._loop = asyncio.get_running_loop()
        # No request is possible before the peer is known; then the address is replaced.
        self._pending = PendingRequests(self._loop, NOWHERE, 0)
        self._opaques = itertools.count(1)
        #: Whether anything can still be sent.
        self.is_open = False
        #: The peer's address.
        self.remote = NOWHERE
        #: The reason why the connection ended or will end.
        self.reason = "closed by the peer"
        self._owner = owner
        self._faults = faults or LogEveryNth()
        # Set by `connection_made`, which is called first.
        self._transport: asyncio.Transport
        self._out: Outgoing
        self._arriving: ArrivingFrame
        self._reader = FrameReader(self._settings.limits)
        #: Whether the rest of a long frame is read at once, as far as it has arrived.
        self._reads_long = False
        self._memory = memory
        self._backlog: deque[Frame] = deque()
        self._in_turn = False
        self._flush_is_due = False
        self._resume_is_due = False
        self._is_slow = False
        self._is_finishing = False
        #: Whether requests have to wait: the sum of all reasons, checked for every frame.
        self._is_held_up = False
        self._closed = self._loop.create_future()
        self._on_close: list[Callable[[Connection], None]] = []
        self._on_quick: list[Callable[[Connection], None]] = []
        #: Whether this side has closed it; known when it has ended.
        self.was_ended_here = False
        #: The local address.
        self.local = NOWHERE
        #: The owner's state of the peer.
        self.context: Any = None
        # Below zero between an early `reply` and its `leave_open`.
        self._left_open = 0
        self._left_open_bytes = 0
        self.bytes_in = 0
        self.bytes_out = 0
        #: The time of the last read or write, by the clock's `monotonic`.
        self.last_active = self._monotonic()

    def __repr__(self) -> str:
        return f"<Connection {self.remote} {'open' if self.is_open else 'closed'}>"

    # Requests

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
        """Send a request to the peer and wait for its answer.

        Raises `ConnectionLost`, `RequestTimedOut` or `TooManyRequests`. A refusal is an answer.
        """
        return await self.request_encoded(
            code,
            lambda opaque: self.encoded(
                Command.request(
                    code, header, opaque=opaque, body=body, extra=extra, serialization=serialization
                )
            ),
            timeout=timeout,
        )

    async def request_encoded(
        self,
        code: int,
        encode: Encode,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # as above
    ) -> Command:
        """Like `request`, with a request that the caller encodes: see `submit_encoded`."""
        answered: asyncio.Future[Command] = self._loop.create_future()
        opaque = self.submit_encoded(code, encode, settling(answered), timeout=timeout)
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
    ) -> int:
        """Send a request; `outcome` is called with its answer or the error. Returns the opaque."""
        return self.submit_encoded(
            code,
            lambda opaque: self.encoded(
                Command.request(code, header, opaque=opaque, body=body, extra=extra)
            ),
            outcome,
            timeout=timeout,
        )

    def submit_encoded(
        self, code: int, encode: Encode, outcome: Outcome, *, timeout: float | None = None
    ) -> int:
        """Like `submit`, with a request that the caller encodes when it gets the opaque.

        On a connection that `prepares` requests, `encode` has to use `encoded`.
        """
        if not self.is_open:
            self._check_open()
        pending = self._pending
        before = pending.check_room()
        opaque = next(self._opaques) & 0x7FFFFFFF
        pieces = encode(opaque)
        if timeout is None:
            timeout = self._settings.request_timeout
        pending.add(opaque, code, timeout, outcome)
        self.send_pieces(pieces, at_once=not before)
        return opaque

    def notify(
        self,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Send a one-way request. Raises `ConnectionLost`."""
        self._check_open()
        self.send_pieces(
            self.encoded(
                Command.request(
                    code,
                    header,
                    opaque=next(self._opaques) & 0x7FFFFFFF,
                    body=body,
                    extra=extra,
                    one_way=True,
                )
            )
        )

    @property
    def pending_requests(self) -> int:
        """The number of our requests that wait for an answer."""
        return len(self._pending)

    def encoded(self, request: Command) -> Sequence[Bytes]:
        """A request, prepared, as the pieces to send. May be called by any thread."""
        if self._prepare is not None:
            request = self._prepare(request)
        return command_pieces(request, limits=self._settings.limits)

    def encode_probe(self, opaque: int) -> Sequence[Bytes]:
        """A request that any server answers immediately."""
        return self.encoded(Command.request(PROBE, opaque=opaque))

    # Timeouts

    def _was_late(self, waited: float) -> None:
        """A request was not answered: check whether the peer is reachable at all.

        A connection whose peer vanished (power, cable, firewall) accepts requests indefinitely.
        Late answers alone are no reason to close it: a broker whose disk hangs is busy, not gone.
        So the peer gets a cheap request, and the connection is closed if that is not answered
        either.
        """
        if self._silence is None or self._is_probing or not self.is_open:
            return
        now = self._monotonic()
        # A timer counts from the start of its loop's step, so it may fire a little early.
        if self._last_read > now - 0.9 * waited:
            return
        if self._silent_since < self._last_read:
            self._silent_since = max(self._last_read, now - waited)
        if now - self._silent_since >= self._silence:
            self._probe(self._silence)

    def _probe(self, silence: float) -> None:
        asked, unwritten = self._monotonic(), self.unwritten

        def probed(outcome: Command | RemotingError) -> None:
            self._is_probing = False
            if isinstance(outcome, RequestTimedOut) and self._last_read < asked and self.is_open:
                if self.unwritten < unwritten:
                    # The peer reads what we write: the probe is still behind a long frame.
                    self._probe(silence)
                else:
                    heard = self._monotonic() - self._silent_since
                    self.abort(f"nothing was heard of it for {heard:.1f} s")

        self._is_probing = True
        try:
            self.submit(PROBE, None, probed, timeout=silence)
        except TooManyRequests:
            self.abort("nothing is heard of it, and too many requests wait")

    def was_late_from_thread(self, waited: float) -> None:
        """A request on a thread's own connection was not answered."""
        if self._silence is not None:
            call_on_loop(self._loop, self._was_late, waited)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.remote, self.reason)

    # Answers

    def leave_open(self, request: Command) -> None:
        """Count a request to be answered with `reply` (or answered already), or to `release`."""
        if request.flag & _ONE_WAY:
            return
        self._left_open += 1
        self._left_open_bytes += request.kept_bytes
        if not self._has_few_open:
            self._hold_up()

    def reply(self, request: Command, answer: Answer, *, at_once: bool = False) -> None:
        """Answer an open request. Nothing is written for a one-way request."""
        if request.flag & _ONE_WAY:
            return
        try:
            self.send(answer, at_once=at_once)
        finally:
            self.release(request)

    def release(self, request: Command) -> None:
        """An open request has been answered, or never will be."""
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
                self.flush()
            else:
                self._flush_is_due = True
                self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was sent now, instead of at the end of the turn."""
        self._flush_is_due = False
        if not self.is_open or not self._out.size:
            return
        if self._transport.is_closing():
            # An earlier write failed; `connection_lost` follows in the next step of the loop.
            self._end("a write failed")
            return
        self.bytes_out += self._out.flush()
        if not self._is_slow:
            self.last_active = self._monotonic()
        elif self._out.unwritten > self._settings.unwritten_bytes:
            self._fail(f"it left {self._out.unwritten} bytes unread")

    # Reads

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
            if self._reads_long:
                missing = min(self._reader.missing, _LONGEST_READ)
                self._transport.max_size = max(missing, self._settings.read_size)  # type: ignore[attr-defined]  # asyncio's
        if self._is_held_up:
            # Received before reading was paused.
            self._backlog.extend(frames)
        else:
            self._turn(frames)
        if arriving.must_wait:
            # After the turn: complete requests before the long frame must not wait for it.
            self._hold_up()

    def check_frame(self, now: float, longest: float, crowded: float, rate: float) -> None:
        """Close a connection whose frame is too slow: see `ArrivingFrame.check`."""
        if self.is_open:
            self._arriving.check(now, longest, crowded, rate)

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
            if self._out.size:
                self.flush()
        if bad is not None:
            self._fail(f"it sent a frame that is no command: {bad}", abort=False)

    def _sent_away(self, request: Command) -> bool:
        """Send GO_AWAY to a peer that understands it; others are served to the end."""
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
        """Process the backlog, then read again."""
        self._resume_is_due = False
        if not self._may_go_on:
            return
        self._is_held_up = False
        waiting, self._backlog = self._backlog, deque()
        if waiting:
            self._turn(waiting)
        if not self._is_held_up:
            self._arriving.read_again()
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

    # Life cycle

    @property
    def open_requests(self) -> int:
        """Open requests of the peer, to be answered later."""
        return max(0, self._left_open)

    @property
    def unwritten(self) -> int:
        """Bytes that were sent and that the peer has not read yet."""
        return 0 if self.remote is NOWHERE else self._out.unwritten

    @property
    def is_slow(self) -> bool:
        """Whether so much is unwritten that nothing more should be sent for now."""
        return self._is_slow and self.is_open

    def when_quick(self, callback: Callable[[Connection], None]) -> None:
        """Call `callback` once when the peer is no longer slow; never if it is gone."""
        self._on_quick.append(callback)

    def on_close(self, callback: Callable[[Connection], None]) -> None:
        """Call `callback` when the connection has ended, or now if it has."""
        if self._closed.done():
            callback(self)
        else:
            self._on_close.append(callback)

    def finish(self, reason: str = "finished") -> None:
        """Answer open requests, accept no new ones from peers that can reconnect, then close."""
        if not self.is_open:
            return
        self._is_finishing = True
        self.reason = reason
        if self._left_open <= 0:
            self.close(reason)

    def close(self, reason: str | None = None) -> None:
        """Write what was sent, then close. A peer that does not read delays that: see `abort`."""
        if not self.is_open:
            return
        self.flush()
        self._end(reason or (self.reason if self._is_finishing else "closed here"))
        self._transport.close()

    def abort(self, reason: str = "aborted here") -> None:
        """Close now; unwritten bytes are lost."""
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

    def _give_up(self, broken: FrameError) -> None:
        """The stream cannot be cut into frames any more."""
        problem = f"it sent bytes that are no frame: {broken}"
        # A wrong protocol is logged even if the host had another fault before.
        kind = str(broken) if isinstance(broken, OtherProtocol) else ""
        self._fail(problem, abort=False, kind=kind)

    def _fail(self, problem: str, *, abort: bool = True, kind: str = "") -> None:
        """The peer caused the end of the connection; each `kind` is logged once."""
        if not self.is_open:
            return
        if count := self._faults.note(f"{self.remote.host} {kind}"):
            log.warning(
                "connection closed: %s (%d from this host so far)",
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
            # asyncio's selector transport; uvloop has its own buffer.
            transport.max_size = settings.read_size
            self._reads_long = self._memory is None
        transport.set_write_buffer_limits(high=settings.slow_bytes, low=settings.resume_bytes)
        self._transport = transport
        self._out = Outgoing(transport)
        self.remote = socket_address(transport.get_extra_info("peername"))
        self.local = socket_address(transport.get_extra_info("sockname"))
        self._arriving = ArrivingFrame(
            self._reader,
            self._memory,
            self.remote,
            self._monotonic,
            go_on=self._resume_soon,
            give_up=self._fail,
        )
        self._pending = PendingRequests(
            self._loop, self.remote, settings.pending_requests, self._was_late
        )
        self._last_read = self._monotonic()
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
        self.was_ended_here = not self.is_open
        self._end(self.reason if exc is None else str(exc) or type(exc).__name__)
        self._out.clear()
        # References to the connection must not keep half a frame alive.
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


#: Called with the answer or the error. Once, on the loop.
Outcome: TypeAlias = Callable[[Command | RemotingError], None]
#: Called with the seconds after which an answer was late; on the loop.
Late: TypeAlias = Callable[[float], None]

#: Below this many entries the heap is not cleaned.
_SMALL_HEAP = 256


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    outcome: Outcome
    code: int
    timeout: float


class PendingRequests:
    """The unanswered requests of one connection, each with a deadline.

    Each leaves in exactly one way: answered, late, dropped by its sender, or lost with the
    connection. One timer is set for the earliest deadline. Deadlines of answered requests stay in
    the heap until they are most of it, so that an answer costs one lookup.
    """

    __slots__ = (
        "_deadlines",
        "_limit",
        "_loop",
        "_on_late",
        "_remote",
        "_timer",
        "_timer_at",
        "_waiting",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        remote: Address,
        limit: int,
        on_late: Late | None = None,
    ) -> None:
        self._loop = loop
        self._on_late = on_late
        self._remote = remote
        self._limit = limit
        self._waiting: dict[int, _Waiting] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self) -> int:
        """The number of waiting requests. Raises `TooManyRequests` at the limit."""
        count = len(self._waiting)
        if count >= self._limit:
            raise TooManyRequests(self._remote, self._limit)
        return count

    def add(self, opaque: int, code: int, timeout: float, outcome: Outcome) -> None:
        """Wait for the answer to `opaque`, for which there is room."""
        self._waiting[opaque] = _Waiting(outcome, code, timeout)
        deadline = self._loop.time() + timeout
        heapq.heappush(self._deadlines, (deadline, opaque))
        if self._timer is None or deadline < self._timer_at:
            self._set_timer()
        elif len(self._deadlines) > _SMALL_HEAP + 2 * len(self._waiting):
            self._forget_answered()

    def answer(self, answer: Command) -> bool:
        """Deliver an answer; False when its request is unknown or was dropped."""
        waiting = self._waiting.pop(answer.opaque, None)
        if waiting is None:
            return False
        try:
            waiting.outcome(answer)
        except Exception:
            log.exception("a callback failed on an answer", extra={"code": waiting.code})
        return True

    def give_up(self, opaque: int) -> None:
        """Drop the answer to a request."""
        self._waiting.pop(opaque, None)

    def fail_all(self, reason: str) -> None:
        """The connection ended: all requests fail."""
        waiting, self._waiting = self._waiting, {}
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for each in waiting.values():
            # Each in its own step: a callback that fails must not block the others.
            self._loop.call_soon(each.outcome, ConnectionLost(self._remote, reason))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadlines[0][0]
        self._timer = self._loop.call_at(self._timer_at, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._forget_answered()
        now = self._loop.time()
        waited = 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, opaque = heapq.heappop(self._deadlines)
            late = self._waiting.pop(opaque, None)
            if late is not None:
                waited = max(waited, late.timeout)
                _tell(late, RequestTimedOut(self._remote, late.code, late.timeout))
        if self._deadlines:
            self._set_timer()
        if waited and self._on_late is not None:
            self._on_late(waited)

    def _forget_answered(self) -> None:
        waiting = self._waiting
        self._deadlines = [entry for entry in self._deadlines if entry[1] in waiting]
        heapq.heapify(self._deadlines)


def _tell(waiting: _Waiting, outcome: Command | RemotingError) -> None:
    """Call back with the outcome; a callback that fails must not end the turn."""
    try:
        waiting.outcome(outcome)
    except Exception:
        log.exception("a callback failed on an answer", extra={"code": waiting.code})


def settling(answered: asyncio.Future[Command]) -> Outcome:
    """Sets the outcome of a request in a future."""

    def settle(outcome: Command | RemotingError) -> None:
        if answered.done():
            return
        if isinstance(outcome, Command):
            answered.set_result(outcome)
        else:
            answered.set_exception(outcome)

    return settle


#: An answer: a command, or the pieces of an encoded one.
Answer: TypeAlias = Command | Sequence[Bytes]

#: Changes one of our requests before it is sent, for example signs it.
Prepare: TypeAlias = Callable[[Command], Command]


class Owner(Protocol):
    """Serves the requests of connections. Called on the loop; must not block."""

    def connection_opened(self, connection: Connection) -> None: ...

    def request_received(self, connection: Connection, request: Command) -> None: ...

    def turn_done(self, connection: Connection) -> None: ...

    def connection_closed(self, connection: Connection) -> None: ...


#: The longest read, of a frame that is known to be long.
_LONGEST_READ = 512 * 1024
#: Bytes of an unfinished frame that every connection may keep: most frames are smaller.
FREE_BYTES = 64 * 1024


# What waits to be written. Small pieces are joined: one system call and one packet for the answers
# of a whole turn. Large bodies are not: joining a 300 KiB body to its head would map, fill and
# unmap that much memory once more than writing it from its place.

#: Smaller pieces are joined with their neighbours; copying them costs less than another vector.
JOIN_BELOW = 16 * 1024


class Outgoing:
    """Pieces of frames in the order in which they are written."""

    __slots__ = ("_pieces", "_transport", "_writes_each", "size")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[Bytes] = []
        # asyncio's selector transport, which alone has this attribute, gets single pieces: its
        # `writelines` joins all of them before Python 3.12, and in many later releases it does not
        # report that a peer is slow (CVE-2024-12254), or never ends at an empty piece.
        self._writes_each = hasattr(transport, "max_size")
        #: Bytes that wait here, without those that the transport holds.
        self.size = 0

    @property
    def unwritten(self) -> int:
        """Bytes that the peer has not accepted yet."""
        return self.size + self._transport.get_write_buffer_size()

    def add(self, pieces: Sequence[Bytes]) -> None:
        """Add the pieces of a frame; their buffers must not change until they are written."""
        self._pieces += pieces
        self.size += sum(map(len, pieces))

    def flush(self) -> int:
        """Write all pieces; returns the number of bytes."""
        size, self.size = self.size, 0
        pieces, self._pieces = self._pieces, []
        if not size:
            return 0
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        elif size < JOIN_BELOW:
            self._transport.write(b"".join(pieces))
        else:
            self._write_gathered(gathered(pieces))
        return size

    def clear(self) -> None:
        self._pieces.clear()
        self.size = 0

    def _write_gathered(self, pieces: list[Bytes]) -> None:
        if not self._writes_each:
            self._transport.writelines(pieces)
            return
        for piece in pieces:
            if self._transport.is_closing():
                # An earlier write failed; asyncio would warn about every further one.
                return
            self._transport.write(piece)


def gathered(pieces: Iterable[Bytes]) -> list[Bytes]:
    """The same bytes, with neighbouring small pieces joined and large ones untouched."""
    out: list[Bytes] = []
    small: list[Bytes] = []
    for piece in pieces:
        if len(piece) < JOIN_BELOW:
            small.append(piece)
            continue
        if small:
            out.append(b"".join(small))
            small.clear()
        out.append(piece)
    if small:
        out.append(b"".join(small))
    return out


def call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object
) -> None:
    """Call it on the loop soon; does nothing when the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise  # not of the loop: an interrupted thread can raise any type


class ArrivingFrame:
    """The frame that a connection has partly received: its progress and its memory.

    A peer has to continue a frame with at least `rate` bytes per second over any `longest` seconds.
    A long frame may take its time on a slow line; a short one that drips may not. Time during which
    reading is paused does not count.
    """

    __slots__ = (
        "_give_up",
        "_go_on",
        "_has_memory",
        "_held_up_at",
        "_memory",
        "_monotonic",
        "_reader",
        "_received",
        "began",
        "must_wait",
        "remote",
    )

    def __init__(
        self,
        reader: FrameReader,
        memory: FrameMemory | None,
        remote: Address,
        monotonic: Callable[[], float],
        *,
        go_on: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """`go_on` is called when the connection may be read from again, `give_up` when it has to be
        closed; without `memory` there is no bound."""
        self._reader = reader
        self._memory = memory
        self.remote = remote
        self._monotonic = monotonic
        self._go_on = go_on
        self._give_up = give_up
        self._has_memory = False
        #: When it began, or last made enough progress; None: there is no such frame.
        self.began: float | None = None
        #: The bytes received of it by then.
        self._received = 0
        #: Since when reading is paused; None: it is not.
        self._held_up_at: float | None = None
        #: Whether the rest must not be read yet.
        self.must_wait = False

    def note(self, now: float, *, is_another: bool) -> None:
        """Bytes were read; `is_another`: they completed the frame before."""
        reader = self._reader
        unfinished = reader.unfinished
        if is_another or self.began is None:
            self.began = now if unfinished else None
            self._received = 0
            if self._held_up_at is not None:
                # Received before reading was paused.
                self._held_up_at = now
            if self._has_memory or self.must_wait:
                self.leave()
        if unfinished < FREE_BYTES or self._has_memory or self.must_wait:
            return
        if self._memory is not None:
            self._has_memory = self._memory.enter(self, reader.announced)
            self.must_wait = not self._has_memory

    def leave(self) -> None:
        """The frame is complete, or its connection has ended."""
        if self._memory is not None and (self._has_memory or self.must_wait):
            self._has_memory = self.must_wait = False
            self._memory.leave(self)

    def held_up(self) -> None:
        """Reading is paused: time does not count for the peer. Idempotent."""
        if self._held_up_at is None:
            self._held_up_at = self._monotonic()

    def read_again(self) -> None:
        """Reading continues: time counts for the peer again."""
        if self._held_up_at is None:
            return
        if self.began is not None:
            self.began += self._monotonic() - self._held_up_at
        self._held_up_at = None

    def memory_given(self) -> None:
        """Memory was reserved: read on."""
        self._has_memory, self.must_wait = True, False
        self._go_on()

    def check(self, now: float, longest: float, crowded: float, rate: float) -> None:
        """Close a peer that was slower than `rate` for `longest`, or for `crowded` seconds while
        it uses memory that others wait for."""
        if self.began is None or self._held_up_at is not None:
            return
        memory = self._memory
        is_in_the_way = self._has_memory and memory is not None and memory.waiting > 0
        if is_in_the_way:
            longest = crowded
        passed = now - self.began
        if passed <= longest:
            return
        received = self._reader.unfinished
        if received - self._received >= rate * passed:
            self.began, self._received = now, received
            return
        problem = (
            f"its frame of {self._reader.announced} bytes went on by fewer than {rate:g} bytes a "
            f"second for {longest:g} s"
        )
        if memory is not None and is_in_the_way:
            memory.evicted += 1
            problem += ", and others wait for that memory"
        elif memory is not None:
            memory.too_slow += 1
        self._give_up(problem)


class FrameMemory:
    """Bounds the partly received long frames of all connections of a process.

    The whole announced length is reserved, so that a frame that was begun can be completed. A host
    gets at most half, or a single frame. A connection without memory for its frame is not read
    from; free memory goes to the waiting ones in their order.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: Reserved bytes: in total, per frame and per host.
        self.used = 0
        self._reserved: dict[ArrivingFrame, int] = {}
        self._hosts: Counter[str] = Counter()
        #: The lengths of waiting frames, in their order.
        self._waiting: dict[ArrivingFrame, int] = {}
        #: Since the start: frames that had to wait, that were evicted because others waited, and
        #: that were too slow.
        self.waited = 0
        self.evicted = 0
        self.too_slow = 0

    @property
    def waiting(self) -> int:
        """Connections that are not read from for lack of memory."""
        return len(self._waiting)

    def enter(self, frame: ArrivingFrame, size: int) -> bool:
        """Reserve memory; False: there is none now, and `memory_given` is called later."""
        self._waiting[frame] = size
        self._share_out(frame)
        if frame in self._reserved:
            return True
        self.waited += 1
        return False

    def leave(self, frame: ArrivingFrame) -> None:
        """The frame is complete, or its connection has ended."""
        self._waiting.pop(frame, None)
        size = self._reserved.pop(frame, 0)
        self.used -= size
        self._hosts[frame.remote.host] -= size
        if not self._hosts[frame.remote.host]:
            del self._hosts[frame.remote.host]
        if self._waiting:
            self._share_out()

    def _share_out(self, comer: ArrivingFrame | None = None) -> None:
        """Give free memory to the waiting frames in their order, unless their host has its share.

        Shorter frames do not overtake a long one, which might otherwise never get memory.
        """
        for frame, size in list(self._waiting.items()):
            host = frame.remote.host
            if (has := self._hosts[host]) and has + size > self._limit // 2:
                continue
            if self.used + size > self._limit:
                break
            if self._waiting.pop(frame, None) is None:
                continue
            self.used += size
            self._reserved[frame] = size
            self._hosts[host] += size
            if frame is not comer:
                frame.memory_given()
