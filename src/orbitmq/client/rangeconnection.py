"""A connection for a thread that has nothing else to do than to wait for answers.

A worker of Spark decodes what it pulls in the thread that pulls it. An event loop in a second
thread would have to wait for the interpreter lock after every read while the first one decodes;
reading in place costs no hand-over, and what the broker sends meanwhile waits in the socket. So
this connection blocks: it sends requests ahead, and reads answers when the caller wants one.
"""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import ConnectFailed, ConnectionLost, RequestTimedOut
from orbitmq.wire.acl import sign
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.errors import FrameError
from orbitmq.wire.frame import PREFIX_SIZE, Frame, other_protocol
from orbitmq.wire.headers.base import Header
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits

#: Small answers are cut out of this buffer, large ones are read past it.
_BUFFER: Final = 64 * 1024
#: Received when an answer begins that is likely to be a large one: most of it is not to be moved.
_BEGINNING: Final = 512
_unpack_prefix = struct.Struct(">iI").unpack
_HEADER_LENGTH: Final = 0xFFFFFF

#: Gives memory for a body of this size.
Room: TypeAlias = Callable[[int], memoryview]


class RangeConnection:
    """One blocking connection. Answers may come in another order than the requests went."""

    def __init__(self, address: Address, access: RangeAccess) -> None:
        """Raises `ConnectFailed`, also for a failed handshake."""
        self.address = address
        self._credentials = access.credentials
        self._timeout = access.timeout
        self._limits: WireLimits = DEFAULT_LIMITS
        self._opaques = itertools.count(1)
        #: Requests that were sent and not answered.
        self.unanswered = 0
        self.is_open = True
        self._socket = _connected(address, access)
        self._input = _Input(self._socket)

    def ask(self, code: int, header: Header | None = None) -> Command:
        """Ask and wait for the answer, with nothing else on its way."""
        opaque = self.next_opaque()
        request = Command.request(code, header, opaque=opaque)
        if self._credentials is not None:
            request = sign(request, self._credentials)
        self.send(encode_command(request, limits=self._limits), 1)
        while (answer := self.receive()).opaque != opaque:
            pass
        return answer

    def next_opaque(self) -> int:
        """A number for a request that is made elsewhere."""
        return next(self._opaques) & 0x7FFFFFFF

    def send(self, encoded: bytes, count: int) -> None:
        """Send so many encoded requests at once. Raises `ConnectionLost`."""
        self._check_open()
        self.unanswered += count
        try:
            self._socket.sendall(encoded)
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error

    def receive(self, room: Room | None = None) -> Command:
        """The next answer, with its body in memory of its own, or where `room` says.

        Raises `ConnectionLost`, or `RequestTimedOut` when nothing comes.
        """
        self._check_open()
        while True:
            try:
                command = decode_command(self._frame(room), self._limits)
            except TimeoutError as error:
                self.close()
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
        """Whether it can be used for something new: open, with nothing on its way.

        A socket that can be read though nothing was asked has been closed by the other side.
        """
        if not self.is_open or self.unanswered:
            return False
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable

    def close(self) -> None:
        """Close it; what is on its way is lost."""
        self.is_open = False
        self._socket.close()

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
        if not size or (room is None and size <= _BUFFER):
            return Frame(mark >> 24, header, self._exactly(size))
        body = memoryview(bytearray(size)) if room is None else room(size)
        if not self._input.read_into(body):
            raise self._lost("closed by the peer")
        return Frame(mark >> 24, header, body)

    def _exactly(self, size: int) -> bytes:
        data = self._input.read(size)
        if data is None:
            raise self._lost("closed by the peer")
        return data

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.address, "closed here")

    def _lost(self, reason: str) -> ConnectionLost:
        self.close()
        return ConnectionLost(self.address, reason)


class _Input:
    """What comes from a socket, in pieces of the sizes that are asked for.

    A large piece is received where it will stay. (A buffered file would do the same by way of
    memory that is new for each piece, which costs more than all the rest.)
    """

    __slots__ = ("_ahead", "_at", "_buffer", "_end", "_socket", "_view")

    def __init__(self, source: socket.socket) -> None:
        self._socket = source
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        #: What was received and not read yet lies between these.
        self._at = self._end = 0
        #: How much is received at most beyond what is asked for.
        self._ahead = _BUFFER

    def read(self, size: int) -> bytes | None:
        """The next `size` bytes, no more than the buffer has; None if the other side has ended."""
        if self._end - self._at < size and not self._fill(size):
            return None
        at, self._at = self._at, self._at + size
        return bytes(self._view[at : self._at])

    def read_into(self, view: memoryview) -> bool:
        """Fill `view` with what comes next; false if the other side has ended before."""
        size = len(view)
        got = min(self._end - self._at, size)
        view[:got] = self._view[self._at : self._at + got]
        self._at += got
        self._ahead = _BEGINNING if size > _BUFFER else _BUFFER
        while got < size:
            came = self._socket.recv_into(view[got:])
            if not came:
                return False
            got += came
        return True

    def _fill(self, size: int) -> bool:
        """Receive until so much is there."""
        rest = self._end - self._at
        self._buffer[:rest] = self._buffer[self._at : self._end]
        self._at, self._end = 0, rest
        most = max(size, self._ahead)
        while self._end < size:
            came = self._socket.recv_into(self._view[self._end : most])
            if not came:
                return False
            self._end += came
        return True


def _connected(address: Address, access: RangeAccess) -> socket.socket:
    try:
        plain = socket.create_connection(address, timeout=access.timeout)
    except OSError as error:
        raise ConnectFailed(address, error.strerror or str(error)) from error
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if access.tls is None:
            return plain
        return access.tls.context().wrap_socket(plain, server_hostname=address.host)
    except (OSError, ssl.SSLError) as error:
        plain.close()
        raise ConnectFailed(address, error.strerror or str(error)) from error
    except BaseException:
        plain.close()
        raise
