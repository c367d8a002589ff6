"""The asking side of a connection: our requests, their opaques and deadlines, and who waits.

It knows nothing of sockets: what it makes goes to `send_pieces`, what comes back is handed to
`_pending` by whoever reads. A connection is this and more, by inheritance and not by delegation:
asking is on the way of every message of a client, and is not to cost a call more.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence

from orbitmq.remoting.address import NOWHERE
from orbitmq.remoting.blocking import Encode
from orbitmq.remoting.errors import (
    ConnectionLost,
    RemotingError,
    RequestTimedOut,
    TooManyRequests,
)
from orbitmq.remoting.onloop import call_on_loop
from orbitmq.remoting.owner import Prepare
from orbitmq.remoting.pending import Outcome, PendingRequests, settling
from orbitmq.remoting.settings import ConnectionSettings
from orbitmq.wire.codes import RequestCode, Serialization
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.base import Header

#: What any server answers at once: a name server with a few lines, a broker that it does not know
#: it. Either is a sign of life.
_PROBE = RequestCode.GET_NAMESRV_CONFIG


class Asking(abc.ABC):
    """Whoever can ask a peer. Belongs to the loop that it was made on."""

    def __init__(
        self,
        settings: ConnectionSettings,
        prepare: Prepare | None,
        monotonic: Callable[[], float],
        silence: float | None,
    ) -> None:
        self._settings = settings
        self._prepare = prepare
        #: Whether requests are changed before they are sent: signed, for instance.
        self.prepares = prepare is not None
        self._monotonic = monotonic
        self._silence = silence
        #: When something was last read.
        self._last_read = monotonic()
        #: When the first request was sent that stayed unanswered, with nothing read since.
        self._silent_since = float("-inf")
        self._is_probing = False
        self._loop = asyncio.get_running_loop()
        # Nothing can be asked before the peer is known; then there is another one.
        self._pending = PendingRequests(self._loop, NOWHERE, 0)
        self._opaques = itertools.count(1)
        #: Whether anything can still be sent.
        self.is_open = False
        #: Where the peer is.
        self.remote = NOWHERE
        #: Why the connection ended or will end.
        self.reason = "closed by the peer"

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
        if not self.is_open:
            self._check_open()
        pending = self._pending
        before = pending.check_room()
        opaque = next(self._opaques) & 0x7FFFFFFF
        pieces = encode(opaque)
        if timeout is None:
            timeout = self._settings.request_timeout
        # Before it is written: whoever reads, maybe a thread, looks here for who waits, and the
        # loop takes the reading back from threads only if something of its own is on its way.
        pending.add(opaque, code, timeout, outcome)
        self.send_pieces(pieces, at_once=not before)
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
    def pending_requests(self) -> int:
        """Requests of ours that wait for an answer."""
        return len(self._pending)

    def encoded(self, request: Command) -> Sequence[Bytes]:
        """A request, prepared, as the pieces to send. May be called by any thread."""
        if self._prepare is not None:
            request = self._prepare(request)
        return command_pieces(request, limits=self._settings.limits)

    def probe_frame(self) -> bytes:
        """A question that any server answers at once."""
        return b"".join(self.encoded(Command.request(_PROBE, opaque=self._next_opaque())))

    @abc.abstractmethod
    def send_pieces(self, pieces: Sequence[Bytes], *, at_once: bool = False) -> None:
        """Send the pieces of whole frames. Their buffers must not change any more.

        `at_once` does not wait for others of the same step, unless there are some already.
        """

    @property
    @abc.abstractmethod
    def unwritten(self) -> int:
        """Bytes that were sent and that the peer has not taken yet."""

    @abc.abstractmethod
    def abort(self, reason: str = "aborted here") -> None:
        """Close now; what was not written is lost."""

    # Waiting

    def _begin_asking(self) -> None:
        """The peer is known: requests can be sent."""
        self._pending = PendingRequests(
            self._loop, self.remote, self._settings.pending_requests, self._was_late
        )
        self._last_read = self._monotonic()

    def _was_late(self, waited: float) -> None:
        """A request was not answered; find out whether the peer is there at all.

        A connection whose other side vanished without a word - power, a cable, a firewall that
        forgot it - takes requests for ever. Late answers to some requests are no reason to give it
        up, and others may wait for theirs with more patience: a broker whose disk hangs is busy,
        not gone. So it is asked something that costs nothing, and given up if it is silent on that.
        """
        if self._silence is None or self._is_probing or not self.is_open:
            return
        now = self._monotonic()
        # A timer counts from the beginning of its loop's turn, so that it may ring a little early.
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
                    # It takes what we write: the question is still behind a long frame.
                    self._probe(silence)
                else:
                    heard = self._monotonic() - self._silent_since
                    self.abort(f"nothing was heard of it for {heard:.1f} s")

        self._is_probing = True
        try:
            self.submit(_PROBE, None, probed, timeout=silence)
        except TooManyRequests:
            self.abort("nothing is heard of it, and too many requests wait")

    def was_late_from_thread(self, waited: float) -> None:
        """A request of a thread was not answered."""
        if self._silence is not None:
            call_on_loop(self._loop, self._was_late, waited)

    def _next_opaque(self) -> int:
        return next(self._opaques) & 0x7FFFFFFF

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.remote, self.reason)
