"""A broker process that is killed again and again, and clients that write down what it told them.

The clients keep one ledger. A send that was acknowledged is a promise about one place (queue and
offset); a message that was read is a statement about one. A place may never have two values,
whoever said so and however often the broker died in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.channels import Channels
from orbitmq.remoting.settings import (
    Address,
    ConnectFailed,
    ConnectionLost,
    RequestTimedOut,
    parse_address,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    Header,
    PullMessageResponse,
    QueryConsumerOffsetRequest,
    SendMessageResponse,
    UpdateConsumerOffsetRequest,
)
from tests.support.broker import GROUP, messages_in, pull_header, send_header
from tests.support.command import Started

Place = tuple[int, int]  #: queue and offset

TOPIC = "orders"
QUEUES = 4
LATER_TOPIC = "later"

#: Answers to a pull that bring nothing and change nothing.
_NOTHING = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)
_LOST = (ConnectionLost, ConnectFailed, RequestTimedOut)


class Victim:
    """The broker, as a process on one folder and one port."""

    def __init__(self, root: Path, *settings: str) -> None:
        self._words = [word for setting in settings for word in ("--set", setting)]
        self._root = root
        self._started: Started | None = None
        self.address = Address("127.0.0.1", 0)
        #: Everything that it logged in all its lives.
        self.log = ""

    async def start(self) -> None:
        """Returns when it has said that it is ready. Others go on meanwhile."""
        self._started = await asyncio.to_thread(
            Started,
            *("broker", "--data", str(self._root), "--port", str(self.address.port)),
            *self._words,
        )
        self.address = parse_address(self._started.address("broker-a"))

    async def kill(self) -> None:
        """End it at this instant: no handler of its own runs."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """End it as one should; the exit code."""
        return await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> int:
        started = self._started
        assert started is not None
        started.process.send_signal(number)
        code = await asyncio.to_thread(started.process.wait)
        await asyncio.to_thread(started.__exit__)
        self.log += started.errors
        self._started = None
        return code

    async def bury(self) -> None:
        """Leave nothing running, whatever happened."""
        if self._started is not None:
            await self.kill()


class Ledger:
    """What the broker has promised and shown."""

    def __init__(self) -> None:
        self.acknowledged: dict[Place, int] = {}
        self.seen: dict[Place, StoredMessage] = {}
        #: Numbers of delayed messages whose sends were acknowledged, and when they are due.
        self.promised: dict[int, int] = {}

    def acknowledge(self, place: Place, number: int) -> None:
        before = self.acknowledged.setdefault(place, number)
        assert before == number, f"{place} was promised to {before} and to {number}"

    def show(self, message: StoredMessage) -> None:
        place = message.queue_id, message.queue_offset
        assert message.body == body_of(number_of(message)), f"the message at {place} is torn"
        before = self.seen.setdefault(place, message)
        assert before.encode() == message.encode(), f"{place} has two values"


class Client:
    """One connection that is made again when it was lost, with the pauses of real clients."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._channels = Channels()
        #: When the last answer came, by the monotonic clock.
        self.answered_at = 0.0
        #: Requests of which nobody knows what became of them.
        self.unanswered = 0

    async def ask(self, code: int, header: Header, body: bytes = b"") -> Command | None:
        """The answer, or None when it never came."""
        try:
            answer = await self._channels.request(
                self._victim.address, code, header, body=body, timeout=10
            )
        except _LOST as error:
            self.unanswered += not isinstance(error, ConnectFailed)
            return None
        self.answered_at = time.monotonic()
        return answer

    async def close(self) -> None:
        await self._channels.close()


class Producer(Client):
    """Sends with many requests on their way at once."""

    def __init__(self, victim: Victim, ledger: Ledger, numbers: Iterator[int]) -> None:
        super().__init__(victim)
        self._ledger = ledger
        self._numbers = numbers

    async def run(self, in_flight: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(self._send_all())

    async def _send_all(self) -> None:
        for number in self._numbers:
            header = send_header(TOPIC, number % QUEUES, {"UNIQ_KEY": f"N{number}", "TAGS": "t"})
            answer = await self.ask(RequestCode.SEND_MESSAGE_V2, header, body_of(number))
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                stored = answer.header(SendMessageResponse)
                self._ledger.acknowledge((stored.queue_id, stored.queue_offset), number)


class LateProducer(Client):
    """Sends messages that are to be delivered after a while, of three kinds."""

    #: Properties, and the seconds that they mean.
    KINDS = (({"DELAY": "1"}, 1.0), ({"DELAY": "2"}, 5.0), ({"TIMER_DELAY_MS": "1500"}, 1.5))

    def __init__(self, victim: Victim, ledger: Ledger, numbers: Iterator[int]) -> None:
        super().__init__(victim)
        self._ledger = ledger
        self._numbers = numbers

    async def run(self) -> None:
        for number in self._numbers:
            properties, delay = self.KINDS[number % len(self.KINDS)]
            header = send_header(
                LATER_TOPIC, number % QUEUES, {"UNIQ_KEY": f"N{number}", **properties}
            )
            # All messages of a turn have the time at which the turn began, and a busy machine may
            # have stopped the broker in the middle of one.
            asked = time.time() - 0.5
            answer = await self.ask(RequestCode.SEND_MESSAGE_V2, header, body_of(number))
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                self._ledger.promised[number] = int((asked + delay) * 1000)
                await asyncio.sleep(0.01)


class Puller(Client):
    """Follows one queue with long polling."""

    def __init__(self, victim: Victim, ledger: Ledger, queue_id: int) -> None:
        super().__init__(victim)
        self._ledger = ledger
        self.queue_id = queue_id
        self.offset = 0

    async def run(self) -> None:
        while True:
            for message in await self.pull(TOPIC, hold=1.0):
                self._ledger.show(message)

    async def pull(self, topic: str, *, hold: float = 0.0) -> list[StoredMessage]:
        """What is there from where we are, and go on behind it."""
        header = pull_header(topic, self.queue_id, self.offset, hold=hold)
        answer = await self.ask(RequestCode.PULL_MESSAGE, header)
        if answer is None or answer.code in _NOTHING:
            return []
        assert answer.code == ResponseCode.SUCCESS, f"{answer.code} at {self.offset}"
        messages = messages_in(answer)
        for number, message in enumerate(messages, start=self.offset):
            assert message.queue_offset == number, "the queue has a gap"
        self.offset = answer.header(PullMessageResponse).next_begin_offset
        return messages


class Reporter(Client):
    """Tells the broker how far a group has come, and remembers when that was acknowledged."""

    def __init__(self, victim: Victim, pullers: list[Puller]) -> None:
        super().__init__(victim)
        self._pullers = pullers
        #: By queue: when a report was acknowledged, and what it said.
        self._acknowledged: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._sent: dict[int, int] = {}

    async def run(self) -> None:
        while True:
            await self.report_all()
            await asyncio.sleep(0.02)

    async def report_all(self) -> None:
        for puller in self._pullers:
            await self._report(puller.queue_id, puller.offset)

    async def _report(self, queue_id: int, offset: int) -> None:
        self._sent[queue_id] = max(offset, self._sent.get(queue_id, 0))
        header = UpdateConsumerOffsetRequest(
            consumer_group=GROUP, topic=TOPIC, queue_id=queue_id, commit_offset=offset
        )
        answer = await self.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        if answer is not None:
            assert answer.code == ResponseCode.SUCCESS, answer.remark
            self._acknowledged[queue_id].append((time.monotonic(), offset))

    def acknowledged_by(self, instant: float) -> dict[int, int]:
        """How far the group had come for certain, by queue."""
        by_then = {
            queue_id: [offset for at, offset in reports if at <= instant]
            for queue_id, reports in self._acknowledged.items()
        }
        return {queue_id: max(offsets) for queue_id, offsets in by_then.items() if offsets}

    async def assert_kept(self, since: float) -> None:
        """What was acknowledged before `since` must be known, and nothing that was never said."""
        for queue_id, least in self.acknowledged_by(since).items():
            header = QueryConsumerOffsetRequest(
                consumer_group=GROUP, topic=TOPIC, queue_id=queue_id
            )
            answer = await self.ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
            assert answer is not None
            assert answer.code == ResponseCode.SUCCESS, answer.remark
            kept = int(answer.ext_fields["offset"])
            assert least <= kept, self._lateness(queue_id, kept, since)
            assert kept <= self._sent[queue_id]

    def _lateness(self, queue_id: int, kept: int, since: float) -> str:
        known = [at for at, offset in self._acknowledged[queue_id] if offset <= kept]
        return f"progress is {since - max(known, default=0.0):.3f} s older than it may be"


def body_of(number: int) -> bytes:
    """Some hundred bytes that belong to this number and no other."""
    digest = hashlib.blake2b(number.to_bytes(8, "big")).digest()
    return number.to_bytes(8, "big") + digest * (1 + digest[0] % 24)


def number_of(message: StoredMessage) -> int:
    return int.from_bytes(message.body[:8], "big")


async def read_all(
    victim: Victim, topic: str, take: Callable[[StoredMessage], object], until: Callable[[], bool]
) -> list[StoredMessage]:
    """Read a topic from its beginning to its end, and go on until `until` holds as well."""
    pullers = [Puller(victim, Ledger(), queue_id) for queue_id in range(QUEUES)]
    found: list[StoredMessage] = []
    try:
        while True:
            before = len(found)
            for puller in pullers:
                for message in await puller.pull(topic):
                    take(message)
                    found.append(message)
            if len(found) == before:
                if until():
                    return found
                await asyncio.sleep(0.02)
    finally:
        for puller in pullers:
            await puller.close()


class Crowd:
    """Clients at work; what goes wrong in one of them fails the test."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    def check(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def disperse(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            try:
                await task
            except asyncio.CancelledError:
                continue
