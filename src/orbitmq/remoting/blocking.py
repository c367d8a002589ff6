"""Connections for threads that block until the answer arrives; no event loop is involved.

A `BlockingConnection` belongs to one thread at a time. It can send several requests before it reads
the first answer, so that a reader pulls ahead and decodes in its own thread. A `BlockingPool` lends
connections to threads, for one request at a time.

Trap: after anything but an answer (a timeout, an interrupt) the next bytes of a connection may
belong to the abandoned request. Such a connection is closed and never used again.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.remoting.settings import (
    Address,
    ConnectFailed,
    ConnectionLost,
    RemotingError,
    RequestTimedOut,
    TooManyRequests,
)
from orbitmq.wire.codes import DEFAULT_LIMITS, FrameError, RequestCode, WireLimits
from orbitmq.wire.command import Command, Credentials, decode_command, encode_command, sign
from orbitmq.wire.frame import PREFIX_SIZE, Bytes, Frame, other_protocol

if TYPE_CHECKING:
    from orbitmq.wire.headers import Header


log = logging.getLogger(__name__)

#: Creates the pieces of a request's frame from its opaque.
Encode: TypeAlias = Callable[[int], Sequence[Bytes]]
#: Allocates memory for a body of this size.
Room: TypeAlias = Callable[[int], memoryview]

#: A request that any server answers immediately, if only as not supported: it shows that it is up.
PROBE: Final = RequestCode.GET_NAMESRV_CONFIG

#: Seconds of one wait in the kernel, after which the thread checks its deadline.
_SLICE: Final = 0.5
#: Seconds without use after which the peer may have closed a connection.
_FRESH: Final = 1.0
#: Seconds for opening a connection, and until the next attempt after a failed one.
_OPENING: Final = 3.0
_PAUSE: Final = 10.0
#: Seconds after which a thread that waits for a connection checks again without a notification.
_LOOK: Final = 0.1

#: Small answers are cut out of this buffer; large ones are received directly.
_BUFFER: Final = 64 * 1024
#: The first bytes of an answer that is probably large: most of it must not be copied.
_BEGINNING: Final = 512
_unpack_prefix = struct.Struct(">iI").unpack
_HEADER_LENGTH: Final = 0xFFFFFF


class BlockingPool:
    """Lends blocking connections to one peer; opens at most `most` of them.

    Any number of threads may call `request` and `notify`. An interrupted thread loses at most its
    own connection: connections are counted by weak references, and waiting threads check again
    after a while. No lock is held during I/O.
    """

    def __init__(
        self,
        address: Address,
        encode_probe: Encode,
        *,
        most: int,
        resolved: Address | None = None,
        tls: ssl.SSLContext | None = None,
        limits: WireLimits = DEFAULT_LIMITS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resolved` is the IP address for the name in `address`: a look-up has no deadline."""
        self.address = address
        self._resolved = resolved
        self._encode_probe = encode_probe
        self._most = most
        self._tls = tls
        self._limits = limits
        self._monotonic = monotonic
        #: The most recently used one is lent first, so that surplus connections become idle.
        self._idle: deque[BlockingConnection] = deque()
        self._connections = weakref.WeakValueDictionary[int, BlockingConnection]()
        self._numbers = itertools.count()
        # Reentrant: a signal handler may send while it interrupts its own thread here.
        self._opening = threading.RLock()
        #: Waiting threads, the oldest first: each gets a connection, or None to check again.
        self._waiting: deque[SimpleQueue[BlockingConnection | None]] = deque()
        #: No connection is opened before this time: the last attempt failed.
        self._not_before = float("-inf")
        #: Why the pool was closed.
        self._closed_by: str | None = None

    def __len__(self) -> int:
        """The number of open connections."""
        return sum(each.is_open for each in self._all())

    def _all(self) -> list[BlockingConnection]:
        # Copies the references, because other threads may add some meanwhile.
        return [each for ref in self._connections.valuerefs() if (each := ref()) is not None]

    def request(self, code: int, encode: Encode, timeout: float) -> Command | None:
        """Send a request and wait for its answer; None when no connection can be opened now.

        Raises `ConnectionLost`, `RequestTimedOut`, or `TooManyRequests` when all connections were
        in use for `timeout`; and the errors of `encode`.
        """
        deadline = self._monotonic() + timeout
        connection = self._lend(deadline)
        if connection is None:
            return None
        try:
            return connection.request(code, encode, deadline, timeout)
        except ConnectionLost:
            if self._closed_by is None:
                raise
            raise ConnectionLost(self.address, self._closed_by) from None
        finally:
            self._take_back(connection)

    def notify(self, encode: Encode, timeout: float) -> bool:
        """Send a one-way request; False when no connection can be opened now."""
        deadline = self._monotonic() + timeout
        connection = self._lend(deadline)
        if connection is None:
            return False
        try:
            connection.notify(encode, deadline)
        finally:
            self._take_back(connection)
        return True

    def sweep(self, idle: float) -> None:
        """Close connections that were not used for `idle` seconds; wake late threads."""
        now = self._monotonic()
        for connection in self._all():
            # The kernel restarts its wait after each signal: a thread that gets signals more
            # often than once per slice never checks its deadline.
            if connection.is_late(now):
                connection.shut_down()
        end = now - idle
        while self._idle and self._idle[0].used_at < end:
            with suppress(IndexError):
                connection = self._idle.popleft()
                if connection.used_at < end:
                    connection.close()
                else:  # a thread took the connection meanwhile
                    self._idle.append(connection)

    def close(self, reason: str, *, is_abort: bool) -> None:
        """Lend no more connections. `is_abort` wakes threads that wait for answers."""
        self._closed_by = reason
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()
        while self._waiting:
            self._notify_waiting()
        if is_abort:
            for connection in self._all():
                connection.shut_down()

    def _lend(self, deadline: float) -> BlockingConnection | None:
        while self._closed_by is None:
            try:
                connection = self._idle.pop()
            except IndexError:
                if (new := self._reserve()) is not None:
                    return self._opened(new, deadline)
                if self._not_before > self._monotonic():
                    return None
                if (handed := self._wait(deadline)) is not None:
                    return handed
                continue
            if self._monotonic() - connection.used_at < _FRESH or connection.is_fresh:
                return connection
            connection.close()
        return None

    def _reserve(self) -> BlockingConnection | None:
        """A connection to open; None when no further one is allowed now."""
        if self._not_before > self._monotonic():
            return None
        with self._opening:
            if len(self) >= self._most:
                return None
            connection = BlockingConnection(
                self.address, timeout=_SLICE, limits=self._limits, monotonic=self._monotonic
            )
            self._connections[next(self._numbers)] = connection
        return connection

    def _opened(self, connection: BlockingConnection, deadline: float) -> BlockingConnection | None:
        """Connect and send a probe: the kernel accepts connections even if the server is full."""
        # Half of the time remains for the event loop's connection.
        now = self._monotonic()
        limit = min(_OPENING, (deadline - now) / 2)
        end = now + limit
        try:
            connection.connect(self._tls, limit, self._resolved)
            connection.request(PROBE, self._encode_probe, end, limit)
        except BaseException as error:
            connection.close()
            self._notify_waiting()
            if not isinstance(error, RemotingError):
                raise
            self._not_before = self._monotonic() + _PAUSE
            log.debug("no further connection: %s", error, extra={"broker": str(self.address)})
            return None
        return connection

    def _wait(self, deadline: float) -> BlockingConnection | None:
        """Wait for a connection; None when one may be free now, or may be opened.

        Raises `TooManyRequests` after the timeout.
        """
        left = deadline - self._monotonic()
        if left <= 0:
            raise TooManyRequests(self.address, self._most)
        waiter: SimpleQueue[BlockingConnection | None] = SimpleQueue()
        try:
            self._waiting.append(waiter)
            if not self._idle:
                return waiter.get(timeout=min(left, _LOOK))
        except Empty:
            pass
        except BaseException:
            if (handed := self._leave_line(waiter)) is not None:
                self._take_back(handed)
            raise
        return self._leave_line(waiter)

    def _leave_line(
        self, waiter: SimpleQueue[BlockingConnection | None]
    ) -> BlockingConnection | None:
        try:
            self._waiting.remove(waiter)
        except ValueError:  # removed: a connection was handed over, or is about to be
            with suppress(Empty):
                return waiter.get(timeout=_LOOK)
        return None

    def _take_back(self, connection: BlockingConnection) -> None:
        if not connection.is_open:
            self._notify_waiting()
            return
        connection.used_at = self._monotonic()
        # Handed over directly: a thread that sends in a loop would take it before another one
        # wakes.
        with suppress(IndexError):
            self._waiting.popleft().put(connection)
            return
        self._idle.append(connection)
        if self._closed_by is not None:
            connection.close()
        self._notify_waiting()

    def _notify_waiting(self) -> None:
        with suppress(IndexError):
            self._waiting.popleft().put(None)


class BlockingConnection:
    """One blocking connection. Answers may arrive in another order than the requests."""

    def __init__(
        self,
        address: Address,
        *,
        timeout: float,
        credentials: Credentials | None = None,
        limits: WireLimits = DEFAULT_LIMITS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout`: seconds without a byte after which an answer is abandoned."""
        self.address = address
        self._timeout = timeout
        self._credentials = credentials
        self._limits = limits
        self._monotonic = monotonic
        self._opaques = itertools.count(1)
        #: Requests without an answer yet.
        self.unanswered = 0
        #: False after `close`.
        self.is_open = True
        #: When it was last returned to its pool.
        self.used_at = 0.0
        #: The deadline of the current request; None: as long as bytes arrive.
        self._deadline: float | None = None
        #: The timeout of one socket call, in seconds.
        self._slice = timeout
        # Set by `connect`.
        self._socket: socket.socket
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        #: Received bytes that were not read yet are between these.
        self._at = self._end = 0
        #: How much is received at most beyond the requested size.
        self._ahead = _BUFFER

    def connect(
        self, tls: ssl.SSLContext | None, timeout: float, resolved: Address | None = None
    ) -> None:
        """Raises `ConnectFailed`, also for a failed handshake."""
        end = self._monotonic() + timeout
        try:
            where = resolved or self.address
            self._socket = socket.create_connection(where, timeout=max(timeout, 0.001))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(max(end - self._monotonic(), 0.001))
                self._socket = tls.wrap_socket(self._socket, server_hostname=self.address.host)
            self._set_slice(self._slice)
        except OSError as error:
            self.close()
            raise ConnectFailed(self.address, error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def request(self, code: int, encode: Encode, deadline: float, timeout: float) -> Command:
        """Send one request and wait for its answer until the deadline. No other may be in flight.

        Raises `ConnectionLost` or `RequestTimedOut`, which names `timeout`.
        """
        opaque = self.next_opaque()
        frame = b"".join(encode(opaque))
        try:
            self._begin(deadline)
            self.send(frame, 1)
            while (answer := self.receive()).opaque != opaque:
                pass
        except (_Late, ConnectionLost) as error:
            self.close()
            if isinstance(error, ConnectionLost) and self._monotonic() < deadline:
                raise
            raise RequestTimedOut(self.address, code, timeout) from None
        except BaseException:
            self.close()
            raise
        return answer

    def notify(self, encode: Encode, deadline: float) -> None:
        """Send a one-way request. Raises `ConnectionLost`."""
        frame = b"".join(encode(self.next_opaque()))
        try:
            self._begin(deadline)
            self.send(frame, 0)
        except _Late:
            raise self._lost("it left a one-way request unread") from None
        except BaseException:
            self.close()
            raise

    def ask(self, code: int, header: Header | None = None, body: bytes = b"") -> Command:
        """Send a request with this header and wait for its answer. No other may be in flight."""
        opaque = self.next_opaque()
        request = Command.request(code, header, opaque=opaque, body=body)
        if self._credentials is not None:
            request = sign(request, self._credentials)
        self.send(encode_command(request, limits=self._limits), 1)
        while (answer := self.receive()).opaque != opaque:
            pass
        return answer

    def next_opaque(self) -> int:
        """The opaque for a request that the caller encodes."""
        return next(self._opaques) & 0x7FFFFFFF

    def send(self, encoded: bytes, count: int) -> None:
        """Send `count` encoded requests. Raises `ConnectionLost`."""
        self._check_open()
        self.unanswered += count
        try:
            if self._deadline is None:
                self._socket.sendall(encoded)
            else:
                self._send_until(self._deadline, encoded)
        except OSError as error:
            if self._deadline is not None and _is_raised(error):
                raise  # by a signal handler
            raise self._lost(error.strerror or str(error)) from error
        except BaseException:
            self.close()
            raise

    def receive(self, room: Room | None = None) -> Command:
        """The next answer. Its body has its own memory, or that of `room`.

        Raises `ConnectionLost`, or `RequestTimedOut` when no bytes arrive.
        """
        self._check_open()
        while True:
            try:
                command = decode_command(self._frame(room), self._limits)
            except (BlockingIOError, TimeoutError) as error:
                self.close()
                if self._deadline is not None:
                    if _is_raised(error):
                        raise  # by a signal handler
                    raise self._lost(str(error)) from error
                raise RequestTimedOut(self.address, 0, self._timeout) from error
            except (OSError, ValueError) as error:
                raise self._lost(str(error)) from error
            except FrameError as error:
                raise self._lost(f"it sent bytes that are no answer: {error}") from error
            if command.is_response:
                self.unanswered -= 1
                return command

    @property
    def is_fresh(self) -> bool:
        """Whether it can be used for a new request: open, with nothing in flight.

        If the socket is readable although nothing was requested, the peer has closed it.
        """
        if not self.is_open or self.unanswered:
            return False
        if not hasattr(select, "poll"):
            return not select.select([self._socket], [], [], 0)[0]
        poll = select.poll()  # `select` takes no descriptor above 1,023
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def is_late(self, now: float) -> bool:
        """Whether its thread should have abandoned its request already."""
        deadline = self._deadline
        return deadline is not None and self.unanswered > 0 and deadline + _LOOK < now

    def close(self) -> None:
        """Close it; requests in flight are lost."""
        self.is_open = False
        if hasattr(self, "_socket"):
            self._socket.close()

    def shut_down(self) -> None:
        """Close it from another thread: a thread that waits for an answer gets `ConnectionLost`."""
        if hasattr(self, "_socket"):
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _frame(self, room: Room | None) -> Frame:
        total, mark = _unpack_prefix(self._exactly(PREFIX_SIZE))
        header_size = mark & _HEADER_LENGTH
        limits = self._limits
        if not 4 + header_size <= total <= limits.frame or header_size > limits.header:
            raise FrameError(
                other_protocol(total) or f"a frame of {total} bytes with a header of {header_size}"
            )
        header = self._exactly(header_size)
        size = total - 4 - header_size
        if not size:
            return Frame(mark >> 24, header)
        if room is None and size <= _BUFFER:
            return Frame(mark >> 24, header, self._exactly(size))
        body = memoryview(bytearray(size)) if room is None else room(size)
        if not self._read_into(body):
            raise self._lost("closed by the peer")
        return Frame(mark >> 24, header, body)

    def _exactly(self, size: int) -> bytes:
        data = self._read(size)
        if data is None:
            raise self._lost("closed by the peer")
        return data

    def _read(self, size: int) -> bytes | None:
        """The next `size` bytes, at most the buffer's; None if the peer has closed it."""
        if self._end - self._at < size and not self._fill(size):
            return None
        at, self._at = self._at, self._at + size
        return bytes(self._view[at : self._at])

    def _read_into(self, view: memoryview) -> bool:
        """Fill `view` with the next bytes; False if the peer closes it before."""
        size = len(view)
        got = min(self._end - self._at, size)
        view[:got] = self._view[self._at : self._at + got]
        self._at += got
        self._ahead = _BEGINNING if size > _BUFFER else _BUFFER
        while got < size:
            came = self._receive_into(view[got:])
            if not came:
                return False
            got += came
        return True

    def _fill(self, size: int) -> bool:
        """Receive until `size` bytes are available."""
        rest = self._end - self._at
        self._buffer[:rest] = self._buffer[self._at : self._end]
        self._at, self._end = 0, rest
        most = max(size, self._ahead)
        while self._end < size:
            came = self._receive_into(self._view[self._end : most])
            if not came:
                return False
            self._end += came
        return True

    def _receive_into(self, view: memoryview) -> int:
        if self._deadline is None:
            return self._socket.recv_into(view)
        return self._call_until(self._deadline, self._socket.recv_into, view)

    def _send_until(self, deadline: float, encoded: bytes) -> None:
        sent = self._call_until(deadline, self._socket.send, encoded)
        while sent < len(encoded):
            rest = memoryview(encoded)[sent:]
            sent += self._call_until(deadline, self._socket.send, rest)

    def _call_until(self, deadline: float, call: Callable[[Bytes], int], data: Bytes) -> int:
        """Repeat a socket call that times out until the deadline. Raises `_Late`.

        Slices avoid a system call that sets the timeout for each request.
        """
        while True:
            now = self._monotonic()
            left = deadline - now
            if left < self._slice:
                if left <= 0:
                    raise _Late
                self._set_slice(max(left, 0.001))
            try:
                return call(data)
            except BlockingIOError:
                continue
            except TimeoutError:
                # With TLS: the end of the slice. A signal handler may raise the same error.
                if self._has_kernel_timeout or self._monotonic() - now < 0.9 * self._slice:
                    raise

    def _begin(self, deadline: float) -> None:
        self._deadline = deadline
        if self._slice != _SLICE:
            self._set_slice(_SLICE)

    def _set_slice(self, seconds: float) -> None:
        self._slice = seconds
        if not self._has_kernel_timeout:
            self._socket.settimeout(seconds)
            return
        # The kernel's own timeout: Python's needs another system call and another wait for the
        # interpreter lock in each send and each receive.
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def _has_kernel_timeout(self) -> bool:
        return os.name == "posix" and not isinstance(self._socket, ssl.SSLSocket)

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.address, "closed here")

    def _lost(self, reason: str) -> ConnectionLost:
        self.close()
        return ConnectionLost(self.address, reason)


def _is_raised(error: OSError) -> bool:
    """Whether Python code raised it: errors of the kernel have a number."""
    return isinstance(error, TimeoutError) and error.errno is None


class _Late(Exception):
    """The deadline of the answer has passed."""
