"""What all workers share: their options, and the history that each of them writes."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from orbitmq import ClientSettings, ReceivedMessage, SendResult
from orbitmq.clock import SystemClock
from orbitmq.errors import BrokerRefused, MessageRefused, NoRoute, SendFailed
from tools.chaos.history import (
    Acked,
    BodyCorrupt,
    Corrupt,
    Entered,
    Read,
    Recorder,
    Refused,
    Unknown,
    Value,
    now,
    value_of,
)


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told."""

    name: str
    name_server: str
    history: str
    topic: str = "chaos"
    # Sending.
    rate: float = 200.0  #: messages a second; 0: as fast as it goes
    count: int = 0  #: end after so many; 0: on SIGTERM
    keys: int = 32  #: enough for every queue to have some
    is_keyed: bool = True  #: otherwise every message goes anywhere, and has an order with none
    size: int = 200
    timeout: float = 3.0
    retries: int = 2
    attempt_timeout: float | None = None  #: of one of several attempts
    in_flight: int = 1  #: above 1, messages of one key may be on their way together
    seed: int = 0
    delay_from: float = 0.0
    delay_to: float = 0.0
    levels: tuple[int, ...] = ()
    # Consuming.
    group: str = "readers"
    groups: int = 1  #: so many groups in this process
    ordered: bool = False
    work: float = 0.002  #: seconds of a handler
    workers: int = 8
    heartbeat: float = 30.0
    route_refresh: float = 30.0
    lock_life: float = 30.0
    lock_renewal: float = 20.0
    hold: float = 15.0
    pull_timeout: float = 30.0
    clock: str | None = None  #: a file with the seconds by which this machine's date is wrong


class Worker:
    """What all roles share."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.recorder = Recorder(Path(options.history))
        self.ended = threading.Event()
        _set_on_signal(self.ended)
        if options.clock is not None:
            _set_date_by(Path(options.clock))

    @property
    def client(self) -> ClientSettings:
        options = self.options
        return ClientSettings(
            name_servers=(options.name_server,),
            instance=options.name,
            heartbeat=options.heartbeat,
            route_refresh=options.route_refresh,
        )

    def say_ready(self) -> None:
        sys.stdout.write('"ready"\n')
        sys.stdout.flush()

    # ---- outcomes of sends

    def acked(self, value: Value, sent: SendResult) -> None:
        self.recorder.write(Acked(now(), str(value), str(sent.queue), sent.queue_offset))

    def failed(self, value: Value, error: Exception) -> None:
        kind = Refused if _is_certain(error) else Unknown
        self.recorder.write(kind(now(), str(value), f"{type(error).__name__}: {error}"[:300]))

    def took(self, group: str, message: ReceivedMessage, kind: type[Entered | Read]) -> bool:
        """Note a message; whether its body is whole."""
        queue, offset = str(message.queue), message.queue_offset
        try:
            value = value_of(message.body)
        except BodyCorrupt as error:
            self.recorder.write(Corrupt(now(), self.options.name, queue, offset, str(error)))
            return False
        self.recorder.write(kind(now(), group, self.options.name, queue, offset, str(value)))
        return True


def _set_on_signal(event: threading.Event) -> None:
    """Set an event when the process is told to end.

    A thread waits for that, and not a handler: a handler runs in the middle of what the main thread
    does, and when that is the event's own lock, neither ever goes on.
    """
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # inherited by all threads that follow

    def wait() -> None:
        signal.sigwait(endings)
        event.set()

    threading.Thread(target=wait, name="endings", daemon=True).start()


def _is_certain(error: Exception) -> bool:
    """Whether the message is certainly not stored: every error but `SendFailed` says so."""
    if isinstance(error, SendFailed):
        return error.attempts <= 1 and isinstance(error.cause, BrokerRefused)
    return isinstance(error, BrokerRefused | MessageRefused | NoRoute)


def _set_date_by(path: Path) -> None:
    """Have the client's clock read a file, so that its date can be set while it runs."""

    def date() -> float:
        try:
            return time.time() + float(path.read_text() or 0)
        except (FileNotFoundError, ValueError):
            return time.time()

    SystemClock.now = staticmethod(date)  # a seam
